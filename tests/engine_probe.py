"""Run as a script by test_engine_cpu_platform.py: one SGLang engine on CPU, asked a fixed list of questions.

    python tests/engine_probe.py MODEL_DIR OUT.pt FP8 BUCKET...

Starts the engine on MODEL_DIR (from its weights; FP8=1: empty, with a block-FP8 override), answers, then loads each
BUCKET (a torch file of {name: tensor}) as a flattened bucket in one update session and answers again. OUT.pt gets one
list of answers per weight version. A process of its own because SGLang kills its creator when a scheduler fails.
"""

import base64
import json
import sys
from typing import Any

import numpy as np
import torch

ARGUMENTS: dict[str, Any] = {
    "device": "cpu", "attention_backend": "torch_native", "sampling_backend": "pytorch", "disable_cuda_graph": True,
    "disable_overlap_schedule": True, "skip_tokenizer_init": True, "sleep_on_idle": True, "log_level": "error",
    "random_seed": 1, "dtype": "float32", "max_total_tokens": 8192, "max_running_requests": 64,
    "chunked_prefill_size": 64,
}  # fmt: skip
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


def prompts() -> list[list[int]]:
    """Lengths from 1 to 90: batches are ragged, and the longest is prefilled in two chunks."""
    generator = torch.Generator().manual_seed(3)
    lengths = [1, 2, 7, 19, 33, 33, 48, 90]
    return [torch.randint(3, 64, (n,), generator=generator).tolist() for n in lengths]


def ask(engine, moe: bool) -> list[dict[str, Any]]:
    """Every prompt with all log-probs, then all again from the prefix cache with n=3."""
    extra = {"return_routed_experts": True} if moe else {}
    params = [{"temperature": 1.0, "max_new_tokens": 1 + 5 * i, "ignore_eos": True} for i in range(len(prompts()))]
    first = engine.generate(
        input_ids=prompts(), sampling_params=params, return_logprob=True, logprob_start_len=0, **extra
    )
    again = engine.generate(
        input_ids=prompts(), sampling_params=[p | {"n": 3} for p in params], return_logprob=True, **extra
    )
    owners = list(range(len(first))) + [i // 3 for i in range(len(again))]
    return [answer(prompts()[i], out) for i, out in zip(owners, first + again)]


def answer(prompt: list[int], out: dict[str, Any]) -> dict[str, Any]:
    meta = out["meta_info"]
    logged = [x for x in meta["input_token_logprobs"] if x[0] is not None] + meta["output_token_logprobs"]
    experts = meta.get("routed_experts")
    return {
        "ids": prompt + out["output_ids"],
        "logprobs": [x[0] for x in logged],  # of the last tokens of ids
        "cached": meta["cached_tokens"],
        "experts": None if experts is None else np.frombuffer(base64.b64decode(experts), np.int32).copy(),
    }


def load(engine, path: str) -> None:
    from sglang.srt.utils import MultiprocessingSerializer
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

    bucket = FlattenedTensorBucket(named_tensors=list(torch.load(path).items()))
    payload = {"flattened_tensor": bucket.get_flattened_tensor(), "metadata": bucket.get_metadata()}
    for done, message in (
        engine.begin_weight_update(),
        engine.update_weights_from_tensor(
            [MultiprocessingSerializer.serialize(payload)], load_format="flattened_bucket"
        ),
        engine.end_weight_update(),
    ):
        assert done, message


def main(model_dir: str, out: str, fp8: str, *buckets: str) -> None:
    import sglang

    with open(f"{model_dir}/config.json") as file:
        moe = json.load(file)["model_type"] == "qwen3_moe"
    arguments = ARGUMENTS | ({"enable_return_routed_experts": True} if moe else {})
    if fp8 == "1":
        override = json.dumps({"quantization_config": FP8})
        arguments |= {"load_format": "dummy", "quantization": "fp8", "json_model_override_args": override}
    engine = sglang.Engine(model_path=model_dir, **arguments)
    versions = [ask(engine, moe)]
    for path in buckets:
        load(engine, path)
        versions.append(ask(engine, moe))
    torch.save(versions, out)
    engine.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
