"""Every recipe in configs/ resolves, and what it asks of a GPU fits.

The models that GPU recipes name are built on the meta device from their architecture, so that weights and bytes are
counted on the real shapes. Memory is counted per phase (sync/phases.py): the engine while it samples, the trainer while
it works, and both while weights cross.
"""

from functools import cache
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config, Qwen3MoeConfig

from config import SGLANG_SPARE, Config
from settings import load, recipes
from sync.quantize import BLOCK, audit_layers

ROOT = Path(__file__).resolve().parents[1]
CONFIGS = ROOT / "configs"
GPU = 80e9  # bytes, the smallest that the GPU recipes are written for
SPARE = 0.1  # of it: CUDA's own, gathered layers, logits, fragmentation
QWEN3 = {"vocab_size": 151936, "head_dim": 128, "max_position_embeddings": 32768, "tie_word_embeddings": False}
MODELS = {  # as the models' config.json have it; published parameters
    "Llama-3.1-8B-Instruct": (8.03e9, lambda: LlamaConfig(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, max_position_embeddings=131072, tie_word_embeddings=False)),
    "Qwen3-8B-Base": (8.19e9, lambda: Qwen3Config(
        **QWEN3, hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32,
        num_key_value_heads=8)),
    "Qwen3-14B-Base": (14.77e9, lambda: Qwen3Config(
        **QWEN3, hidden_size=5120, intermediate_size=17408, num_hidden_layers=40, num_attention_heads=40,
        num_key_value_heads=8)),
    "Qwen3-30B-A3B-Base": (30.53e9, lambda: Qwen3MoeConfig(
        **QWEN3, hidden_size=2048, intermediate_size=6144, moe_intermediate_size=768, num_hidden_layers=48,
        num_attention_heads=32, num_key_value_heads=4, num_experts=128, num_experts_per_tok=8)),
}  # fmt: skip
NAMES = [name for name, _ in recipes(CONFIGS)]


def recipe(name: str) -> Config:
    return load(Config, CONFIGS / f"{name}.yaml")


ON_GPUS = [name for name in NAMES if recipe(name).cluster.device == "cuda"]


@cache
def built(path: str):
    """(config, shapes by parameter name) of a model that a recipe names."""
    _, config = MODELS[path]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config())
    return model.config, {name: tuple(p.shape) for name, p in model.named_parameters()}


def count(shapes) -> int:
    return sum(torch.Size(shape).numel() for shape in shapes)


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_resolves_and_is_listed(name):
    config, summary = recipe(name), dict(recipes(CONFIGS))[name]
    assert config.name == name
    assert f"| `{name}` |" in (ROOT / "README.md").read_text()
    assert summary.endswith(".") and ("on a GPU" in summary) == (name in ON_GPUS)


@pytest.mark.parametrize("path", MODELS)
def test_the_models_are_the_published_ones(path):
    assert round(count(built(path)[1].values()) / 1e9, 2) == MODELS[path][0] / 1e9


@pytest.mark.parametrize("name", ON_GPUS)
def test_weights_are_whole_blocks_and_sequences_fit(name):
    recipe_, (model, shapes) = recipe(name), built(recipe(name).model.path)
    layers = model.num_hidden_layers
    assert recipe_.fp8.num_first_layers_in_bf16 + recipe_.fp8.num_last_layers_in_bf16 < layers
    quantized = {n: s for n, s in shapes.items() if recipe_.fp8.is_quantized(n, s, layers)}
    split = {n: s for n, s in quantized.items() if s[-2] % BLOCK[0] or s[-1] % BLOCK[1]}
    assert quantized and not split  # SGLang and DeepGEMM take whole blocks
    audit_layers(quantized, recipe_.fp8.sglang_quantization_config(layers, shapes), shapes)
    assert recipe_.engine.context_length <= model.max_position_embeddings
    assert recipe_.trainer.activation_checkpointing
    longest = recipe_.task.max_prompt_tokens + recipe_.rollout.max_tokens + SGLANG_SPARE
    assert longest <= recipe_.engine.context_length <= longest + 256
    updates = recipe_.trainer.updates_per_rollout
    assert recipe_.rollout.prompts_per_step % (updates * recipe_.cluster.ranks) == 0


@pytest.mark.parametrize("name", ON_GPUS)
def test_every_phase_fits_on_a_gpu(name):
    found = bytes_of(recipe(name))
    print({what: f"{nbytes / 1e9:.1f} GB" for what, nbytes in found.items()})
    assert found["weights"] + 8 * found["longest"] < found["engine"], "fewer than 8 of the longest sequences at once"
    for phase in ("engine", "train", "sync"):
        assert found[phase] < (1 - SPARE) * GPU, phase


def bytes_of(recipe_: Config) -> dict[str, float]:
    """Per GPU: `weights` of an engine process, KV cache of the `longest` sequence, and each phase as a whole."""
    model, shapes = built(recipe_.model.path)
    fp8, ranks = recipe_.fp8, recipe_.cluster.ranks // recipe_.trainer.replicas
    total = count(shapes.values())
    codes = count(s for n, s in shapes.items() if fp8.is_quantized(n, s, model.num_hidden_layers))
    weights = (codes + 4 * codes / (BLOCK[0] * BLOCK[1]) + 2 * (total - codes)) / recipe_.engine.tensor_parallel
    head = getattr(model, "head_dim", None) or model.hidden_size // model.num_attention_heads
    token = 2 * model.num_hidden_layers * model.num_key_value_heads * head * 2  # keys and values, BF16
    train = 16 * total / ranks  # fp32 masters, gradients, two moments
    train += codes / ranks if fp8.train != "off" else 0
    policies = 1
    if recipe_.algo.kl.coef:  # a reference policy
        train, policies = train + 4 * total / ranks, 2
    train += 2 * policies * count(s for n, s in shapes.items() if ".layers." not in n)  # stay gathered, BF16
    tokens = max(recipe_.trainer.tokens_per_micro_batch, recipe_.engine.context_length)
    train += 2 * model.num_hidden_layers * model.hidden_size * tokens  # inputs of the checkpointed layers, BF16
    assert recipe_.trainer.offload and recipe_.engine.memory_saver, "else phases share their memory"
    return {
        "weights": weights,
        "longest": token * recipe_.engine.context_length / recipe_.engine.tensor_parallel,
        "engine": recipe_.engine.gpu_memory_fraction * GPU,
        "train": train,
        "sync": weights + 4 * total / ranks + 3 * recipe_.sync.bucket_mb * 2**20,
    }
