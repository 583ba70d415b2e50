"""Block FP8 of Llama models: SGLang's own loader loses their scales, ours mends it (engine/llama_scales.py).

One SGLang start; the loaders themselves are SGLang's, run on a model of two parameters.
"""

import contextlib
from types import SimpleNamespace

import pytest
import torch
from test_engine_host import EOS, FP8, WIRE, Pushed, compare, swap
from trainer_cases import process_group
from transformers import AutoModelForCausalLM, LlamaConfig

from engine import llama_scales
from engine.host import EngineConfig, EngineHost
from engine.protocol import Sampling
from sync.push import Pusher, SyncConfig

pytestmark = [pytest.mark.sglang, pytest.mark.slow]
SCALE = "model.layers.0.mlp.down_proj.weight_scale_inv"


class Tied(Pushed):
    """lm_head is the embedding: a checkpoint has it once, as has the trainer."""

    def weights(self):
        return [(name, tensor) for name, tensor in super().weights() if name != "lm_head.weight"]


@pytest.fixture(scope="module")
def setup(tmp_path_factory):
    directory = tmp_path_factory.mktemp("llama")
    config = LlamaConfig(
        vocab_size=64, hidden_size=128, num_hidden_layers=4, intermediate_size=256, num_attention_heads=2,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=256, initializer_range=0.08, pad_token_id=0,
        eos_token_id=EOS, bos_token_id=None, tie_word_embeddings=True,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    pushed = Tied(directory)
    quantization = FP8.sglang_quantization_config(4, [name for name, _ in pushed.weights()])
    host = EngineHost(
        EngineConfig(context_length=128, max_running_requests=64), directory, quantization, directory / "engine.log",
        seed=0, device=torch.device("cpu"),
    )  # fmt: skip
    with process_group(), host:
        yield host, pushed


@pytest.mark.parametrize("method", ["plan", "stock"])
def test_the_engine_has_the_scales_of_the_last_swap(setup, tmp_path, method):
    host, pushed = setup
    config = SyncConfig(bucket_mb=1, method=method)
    host.unplanned = True
    pushed.pusher = Pusher(host, WIRE, config, host.reports, torch.device("cpu"), None, str)
    for version in (1, 2):
        stats = swap(host, pushed, version)  # verified: a parameter that nobody wrote is an error
        assert stats["sync/tensors"] == 2 + 4 * (2 + 2 * 7) and stats["sync/verified_params"] == 2 + 4 * (2 + 2 * 4)
        assert stats["sync/stock_tensors"] == (stats["sync/tensors"] if method == "stock" else 0)
        sampling = Sampling(16, temperature=0.7, stop_token_ids=(EOS,))
        median, arena = compare(host, pushed, tmp_path / f"v{version}", sampling)
        assert median < 1e-4 and set(arena.versions) == {version}
        with torch.no_grad():  # other scales, the same codes
            for name, parameter in pushed.model.named_parameters():
                if name.endswith("_proj.weight"):
                    parameter *= 1.5
        stale, _ = compare(host, pushed, tmp_path / f"stale{version}", sampling)
        assert stale > 0.01, "the oracle must notice an engine that still has the old scales"
        pushed.perturb(seed=version)


# --- SGLang's two loaders on a model of two parameters ----------------------------------------------------------------


def small(scale: str = SCALE):
    """An instance of SGLang's class with the embedding and one scale as its only parameters."""
    from sglang.srt.models.llama import LlamaForCausalLM

    model = LlamaForCausalLM.__new__(LlamaForCausalLM)
    torch.nn.Module.__init__(model)
    model.config = SimpleNamespace(tie_word_embeddings=True)
    for name in ("model.embed_tokens.weight", scale):
        *path, leaf = name.split(".")
        module = model
        for part in path:
            if part not in module._modules:
                module.add_module(part, torch.nn.Module())
            module = module._modules[part]
        module.register_parameter(leaf, torch.nn.Parameter(torch.zeros(2, 2), requires_grad=False))
    return model


def tensors(scale: str = SCALE):
    return [("model.embed_tokens.weight", torch.full((2, 2), 3.0)), (scale, torch.full((2, 2), 5.0))]


def values(model):
    return {name.rpartition(".")[2]: parameter[0, 0].item() for name, parameter in model.named_parameters()}


@pytest.fixture(params=["legacy", "v2"])
def loader(request, monkeypatch):
    """(SGLang's loader as it is, the same as the plugin hooks it)."""
    from sglang.srt.model_loader import auto_loader
    from sglang.srt.models.llama import LlamaForCausalLM
    from sglang.srt.plugins.hook_registry import HookType, _wrap_fn

    if request.param == "legacy":
        original = LlamaForCausalLM._legacy_load_weights
        return original, _wrap_fn(original, llama_scales.load_weights, HookType.AROUND)
    hooked = _wrap_fn(auto_loader.get_weight_remap, llama_scales.weight_remap, HookType.AFTER)

    def mended(model, weights):
        with monkeypatch.context() as patch:
            patch.setattr(auto_loader, "get_weight_remap", hooked)
            return model._load_weights_v2(weights)

    return LlamaForCausalLM._load_weights_v2, mended


def test_block_scales_are_lost_without_us_and_loaded_with_us(loader):
    original, mended = loader
    model = small()
    with contextlib.suppress(ValueError):  # v2 says that there is no such parameter
        original(model, tensors())
    assert values(model)["weight_scale_inv"] == 0, "SGLang loads them by itself: engine/llama_scales.py can go"
    model = small()
    mended(model, tensors())
    assert values(model) == {"weight": 3, "weight_scale_inv": 5}


def test_per_tensor_scales_are_renamed_as_ever(loader):
    _, mended = loader
    model = small(SCALE.removesuffix("_inv"))
    mended(model, tensors())
    assert values(model) == {"weight": 3, "weight_scale": 5}


def test_a_loader_that_finds_them_gets_the_model_itself():
    def right(model, weights):
        parameters = dict(model.named_parameters())
        for name, value in weights:
            parameters[name].weight_loader(parameters[name], value)
        return model

    class Model:
        def named_parameters(self):
            return [(SCALE, SimpleNamespace(weight_loader=lambda parameter, value: None))]

    model = Model()
    assert llama_scales.load_weights(right, model, tensors()[1:]) is model
    assert llama_scales.weight_remap(None, model) is None
