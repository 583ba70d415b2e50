"""What the trainer's tests share: a process group, tiny model directories, random batches, an independent gradient."""

import contextlib
import tempfile
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen3Config

from sync.batch import Batch
from sync.quantize import Fp8Config
from trainer.algo import AlgoConfig
from trainer.algo.loss import LossConfig
from trainer.model import ModelConfig, materialize
from trainer.presets import character_tokenizer
from trainer.trainer import Trainer, TrainerConfig

STD = 0.08  # large enough that experts are chosen clearly and log-probs differ between tokens


@contextlib.contextmanager
def process_group(rank: int = 0, world: int = 1, store: Path | None = None):
    """A gloo group, unless one exists; one thread, as the tests share few cores."""
    torch.set_num_threads(1)
    if dist.is_initialized():
        yield
        return
    with tempfile.TemporaryDirectory() as directory:
        dist.init_process_group(
            "gloo", init_method=f"file://{store or Path(directory) / 'store'}", rank=rank, world_size=world
        )
        yield
        dist.destroy_process_group()


def preset(name: str, directory: Path) -> Path:
    return materialize(ModelConfig(preset=name, init_std=STD), directory, seed=1)


def write_model(kind: str, directory: Path) -> Path:
    """A random model directory: the presets, or shapes they lack (tied embeddings, grouped queries, sliding window)."""
    if kind.startswith("tiny-"):
        return preset(kind, directory)
    shape = {
        "vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 96, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128, "initializer_range": STD,
        "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None,
    }  # fmt: skip
    config = {
        "llama-tied": lambda: LlamaConfig(**shape, tie_word_embeddings=True),
        "mistral-window": lambda: MistralConfig(**shape, tie_word_embeddings=False, sliding_window=5),
        "qwen3-tied": lambda: Qwen3Config(**shape, tie_word_embeddings=True),
    }[kind]()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(directory / kind)
    character_tokenizer().save_pretrained(directory / kind)
    return directory / kind


def random_batch(seed: int = 0, groups: int = 3, per_group: int = 4, gaps: bool = False) -> Batch:
    """Groups that share a prompt, responses of 1 to 14 tokens; with `gaps`, tokens inside responses are not sampled."""
    rng = np.random.default_rng(seed)
    tokens, sampled, group_ids = [], [], []
    for group in range(groups):
        prompt = rng.integers(2, 47, rng.integers(1, 9))
        for _ in range(per_group):
            response = rng.integers(2, 47, rng.integers(1, 15))
            flags = np.ones(len(response), bool)
            if gaps:
                flags[rng.integers(len(response))] = False
            tokens.append(np.concatenate([prompt, response]))
            sampled.append(np.concatenate([np.zeros(len(prompt), bool), flags]))
            group_ids.append(group)
    starts = np.concatenate([[0], np.cumsum([len(part) for part in tokens])]).astype(np.int32)
    flags, n = np.concatenate(sampled), len(tokens)
    return Batch(
        tokens=np.concatenate(tokens).astype(np.int32),
        starts=starts,
        sampled=flags,
        logprobs=np.where(flags, rng.normal(-4, 0.7, len(flags)), 0).astype(np.float32),
        rewards=rng.integers(0, 3, n).astype(np.float32),
        groups=np.array(group_ids, np.int32),
        versions=np.zeros(n, np.int32),
        finish=np.zeros(n, np.uint8),
    ).check()


def new_trainer(
    directory: Path, algo: AlgoConfig | None = None, temperature: float = 0.8, fp8: Fp8Config | None = None, **options
) -> Trainer:
    defaults = {"dtype": "fp32", "lr": 1e-3, "max_grad_norm": 0.0, "tokens_per_micro_batch": 64}
    return Trainer(
        TrainerConfig(**(defaults | options)), algo or AlgoConfig(), directory, device=torch.device("cpu"),
        temperature=temperature, total_steps=10, max_response_tokens=16, fp8=fp8,
    )  # fmt: skip


def first_gradient(trainer: Trainer) -> dict[str, torch.Tensor]:
    """The gradient of a trainer's only update so far, whole, from AdamW's first moment (1 − β1)·g. A collective."""
    state = trainer.optimizer.state
    return {
        name: state[p]["exp_avg"].full_tensor() / (1 - trainer.config.beta1)
        for name, p in trainer.policy.hf.named_parameters()
    }


def plain_logprobs(model, batch: Batch, temperature: float) -> list[torch.Tensor]:
    """Log-probs of the sampled tokens of every sequence, one transformers call per sequence, in the model's dtype."""
    result = []
    for a, b in zip(batch.starts[:-1], batch.starts[1:]):
        ids = torch.from_numpy(batch.tokens[a:b].astype(np.int64))
        logits = model(ids[None]).logits[0, :-1] / temperature
        logp = torch.log_softmax(logits, -1).gather(1, ids[1:, None])[:, 0]
        result.append(logp[torch.from_numpy(batch.sampled[a + 1 : b])])
    return result


ALGORITHMS = {
    "token_mean": AlgoConfig(),
    "sequence_mean": AlgoConfig(loss=LossConfig(aggregation="sequence_mean")),
    "constant": AlgoConfig(loss=LossConfig(aggregation="constant", constant_length=16)),
    "gspo": AlgoConfig(loss=LossConfig(objective="gspo", aggregation="sequence_mean")),
}


def reference_gradient(
    directory: Path, batch: Batch, temperature: float, algorithm: str = "token_mean"
) -> dict[str, torch.Tensor]:
    """f64 gradient of one of ALGORITHMS at r = 1 with GRPO's advantages and token TIS (C = 2): plain transformers."""
    experts = {"experts_implementation": "eager"} if "moe" in directory.name else {}  # grouped GEMMs know no f64
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64, **experts)
    loss = torch.zeros((), dtype=torch.float64)
    for i, logp in enumerate(plain_logprobs(model, batch, temperature)):
        peers = batch.rewards[batch.groups == batch.groups[i]].astype(np.float64)
        advantage = 0.0 if np.ptp(peers) == 0 else (batch.rewards[i] - peers.mean()) / (peers.std(ddof=1) + 1e-6)
        rows = slice(batch.starts[i], batch.starts[i + 1])
        rollout = torch.from_numpy(batch.logprobs[rows][batch.sampled[rows]].astype(np.float64))
        weight = (logp.detach() - rollout).exp().clamp(max=2.0)
        change = logp - logp.detach()
        gain = weight * advantage * (change.mean() if algorithm == "gspo" else change).exp()
        loss = loss - (gain.mean() if algorithm in ("sequence_mean", "gspo") else gain.sum())
    total = {"token_mean": int(batch.sampled.sum()), "constant": 16 * batch.n_sequences}
    (loss / total.get(algorithm, batch.n_sequences)).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def relative_error(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """The largest over parameters of |got − expected| / |expected| (Euclidean)."""
    assert got.keys() == expected.keys()
    return max(
        ((got[name].double() - expected[name].double()).norm() / (expected[name].double().norm() + 1e-12)).item()
        for name in got
    )
