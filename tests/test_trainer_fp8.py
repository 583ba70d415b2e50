"""FP8 training of whole models: which layers, the bytes that trainer and engine share, ranks, what stays unaffected."""

import itertools

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from trainer_cases import (
    first_gradient,
    new_trainer,
    plain_logprobs,
    process_group,
    random_batch,
    relative_error,
    write_model,
)
from transformers import AutoModelForCausalLM

from sync.encode import Wire, encode, exchange_edges
from sync.layout import Share
from sync.quantize import Fp8Config, audit_layers, dequantize, quantize
from trainer.algo import AlgoConfig
from trainer.algo.kl import KlConfig
from trainer.checkpoint import CheckpointConfig, Checkpointer

KINDS = ["tiny-qwen3-moe", "llama-tied"]  # llama-tied: 96 and 32 rows, so a border of 2 ranks is inside a block
FP8 = Fp8Config(train="reference")
LAYERS = {"tiny-qwen3": 4, "tiny-qwen3-moe": 4, "llama-tied": 2}


@pytest.fixture(scope="module")
def models(tmp_path_factory, group):
    root = tmp_path_factory.mktemp("models")
    return {kind: write_model(kind, root) for kind in ["tiny-qwen3", *KINDS]}


def quantized_weights(trainer, fp8=FP8):
    """(name, codes, scale) of sync.quantize applied to every checkpoint tensor that is quantized. A collective."""
    n_layers = trainer.policy.hf.config.num_hidden_layers
    return {
        name: quantize(w, "block", fp8.scales, name=name)
        for name, w in trainer.weights()
        if fp8.is_quantized(name, w.shape, n_layers)
    }


def put_together(parts):
    """(codes u8, scale) of every FP8 checkpoint tensor, from the shards of all ranks."""
    whole = {}
    for shards in zip(*parts):
        if shards[0].scale is None:
            continue
        codes, scales = (torch.cat([getattr(s, key) for s in shards]) for key in ("local", "scale"))
        at = 0
        for piece in shards[0].pieces:
            blocks = -(-piece.rows // 128)
            rows = codes[piece.row : piece.row + piece.rows]
            whole[piece.name] = (rows.view(torch.uint8), scales[at : at + blocks])
            at += blocks
        assert at == len(scales)
    return whole


def same_codes(whole, expected):
    assert whole.keys() == expected.keys()
    for name, (codes, scale) in expected.items():
        assert torch.equal(whole[name][0], codes.view(torch.uint8)) and torch.equal(whole[name][1], scale), name
    return True


# ---------------------------------------------------------------- which layers


def names_of(trainer):
    return [name for name, _ in trainer.weights()]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"num_first_layers_in_bf16": 1, "num_last_layers_in_bf16": 2},
        {"ignored_layers": ["layers.1.mlp", "layers.*.o_proj"]},
        {"ignored_layers": ["self_attn"]},
    ],
)
@pytest.mark.parametrize("kind", ["tiny-qwen3", "tiny-qwen3-moe"])
def test_the_trainer_quantizes_what_the_engine_is_told_to(models, kind, fields):
    fp8 = Fp8Config(train="reference", **fields)
    trainer = new_trainer(models[kind], fp8=fp8)
    names, n_layers = names_of(trainer), LAYERS[kind]
    trained = trainer.policy.fp8_names
    expected = {n for n, w in trainer.weights() if fp8.is_quantized(n, w.shape, n_layers)}
    assert set(trained) == expected and expected
    audit_layers(trained, fp8.sglang_quantization_config(n_layers, names), names)
    for number, layer in enumerate(trainer.policy.hf.get_decoder().layers):
        swapped = any(hasattr(module, "arithmetic") for module in layer.modules())
        assert swapped == any(f"layers.{number}." in name for name in trained)
    trainer.step(random_batch())


def test_the_audit_names_what_only_one_side_quantizes(models):
    trainer = new_trainer(models["tiny-qwen3-moe"], fp8=FP8)
    names, trained = names_of(trainer), trainer.policy.fp8_names
    other = Fp8Config(ignored_layers=["layers.2.mlp"]).sglang_quantization_config(4, names)
    with pytest.raises(ValueError, match=r"the trainer alone quantizes model\.layers\.2\.mlp\.experts$"):
        audit_layers(trained, other, names)
    with pytest.raises(ValueError, match=r"the engine alone quantizes model\.layers\.0\.self_attn\.q_proj$"):
        told = FP8.sglang_quantization_config(4, names)
        audit_layers([n for n in trained if "layers.0.self_attn.q_proj" not in n], told, names)


def test_ignored_layers_train_as_without_fp8(models):
    """With everything but layer 0's down_proj ignored, only that product differs."""
    others = [f"layers.{n}" for n in (1, 2, 3)] + ["self_attn", "gate_proj", "up_proj"]
    trainer = new_trainer(models["tiny-qwen3"], fp8=Fp8Config(train="reference", ignored_layers=others))
    assert trainer.policy.fp8_names == ["model.layers.0.mlp.down_proj.weight"]
    batch, plain = random_batch(), new_trainer(models["tiny-qwen3"])
    difference = np.abs(trainer.logprobs(batch) - plain.logprobs(batch))[batch.sampled].mean()
    whole = new_trainer(models["tiny-qwen3"], fp8=FP8)
    all_layers = np.abs(whole.logprobs(batch) - plain.logprobs(batch))[batch.sampled].mean()
    assert 0 < difference < all_layers / 2


# ---------------------------------------------------------------- what is computed


@pytest.mark.parametrize("kind", ["tiny-qwen3", "llama-tied"])
@pytest.mark.parametrize("scales", ["fp32", "pow2"])
def test_logprobs_are_those_of_a_model_of_rounded_operands(models, kind, scales):
    """transformers' own model with dequantized weights, and a hook that rounds the input of every projection."""
    batch, fp8 = random_batch(gaps=True), Fp8Config(train="reference", scales=scales)
    model = AutoModelForCausalLM.from_pretrained(models[kind], dtype=torch.float32)

    def round_input(module, args):
        (x,) = args
        codes, scale = quantize(x, "group", scales)
        return (dequantize(codes, scale, "group"),)

    for name, module in model.named_modules():
        if name.endswith("_proj"):
            module.weight.data = dequantize(*quantize(module.weight.data, "block", scales))
            module.register_forward_pre_hook(round_input)
    with torch.no_grad():
        expected = torch.cat(plain_logprobs(model, batch, 0.8)).numpy()
    got = new_trainer(models[kind], fp8=fp8).logprobs(batch)[batch.sampled]
    # fp32 sums of another order move some activations to the next code
    assert np.abs(got - expected).mean() < 1e-3
    plain = new_trainer(models[kind]).logprobs(batch)[batch.sampled]
    assert np.abs(got - plain).mean() > 20 * np.abs(got - expected).mean()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_gradient_points_the_same_way(models, kind, dtype):
    batch, found = random_batch(gaps=True), []
    for fp8 in (Fp8Config(), FP8, Fp8Config(train="reference", gradients="e5m2", scales="pow2")):
        trainer = new_trainer(models[kind], fp8=fp8, dtype=dtype, tokens_per_micro_batch=10_000)
        trainer.step(batch)
        found.append(torch.cat([g.flatten() for g in first_gradient(trainer).values()]))
    for gradient in found[1:]:
        cosine = torch.cosine_similarity(found[0], gradient, 0)
        assert 0.9 < cosine < 0.9999


@pytest.mark.parametrize("kind", KINDS)
def test_activation_checkpointing_changes_nothing(models, kind):
    gradients = []
    for checkpointing in (False, True):
        trainer = new_trainer(models[kind], fp8=FP8, activation_checkpointing=checkpointing)
        trainer.step(random_batch())
        gradients.append(first_gradient(trainer))
    assert relative_error(*gradients) == 0


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_high_precision_is_training_without_fp8(models, dtype):
    batch = random_batch()
    for kind in KINDS:
        trainer, plain = new_trainer(models[kind], fp8=FP8, dtype=dtype), new_trainer(models[kind], dtype=dtype)
        with trainer.policy.high_precision(), plain.policy.high_precision():
            inside = trainer.logprobs(batch)
            assert np.abs(inside - plain.logprobs(batch)).max() < (1e-5 if dtype == "fp32" else 0.1)
        with trainer.policy.high_precision(activations=False):
            half = trainer.logprobs(batch)
        outside = trainer.logprobs(batch)
        means = [np.abs(a - b).mean() for a, b in itertools.combinations((inside, half, outside), 2)]
        assert min(means) > 1e-3


def test_the_reference_policy_is_fp8_too_and_follows(models):
    trainer = new_trainer(models["tiny-qwen3"], AlgoConfig(kl=KlConfig(coef=0.1)), fp8=FP8)
    trainer.sft_step([([2, 3], [4, 5, 1])], lr=1e-2)
    trainer.begin_rl()
    batch = random_batch()
    assert trainer.step(batch)["trainer/kl_ref"] == pytest.approx(0, abs=1e-9)
    assert trainer.step(batch)["trainer/kl_ref"] > 1e-5


def test_supervised_steps_reduce_the_loss(models):
    trainer = new_trainer(models["tiny-qwen3-moe"], fp8=FP8)
    pairs = [([10 + i, 12], [20 + i, 21, 22 + i, 1]) for i in range(6)]
    losses = [trainer.sft_step(pairs, lr=3e-3)["trainer/loss"] for _ in range(12)]
    assert losses[0] > 3.5 and losses[-1] < 2


# ---------------------------------------------------------------- one set of bytes


@pytest.mark.parametrize("kind", KINDS)
def test_shards_are_the_codes_of_the_whole_masters_after_every_change(models, kind):
    trainer, batch = new_trainer(models[kind], fp8=FP8, updates_per_rollout=2), random_batch()
    for _ in range(2):
        assert same_codes(put_together([trainer.shards()]), quantized_weights(trainer))
        assert trainer.step(batch)["sync/codes_equal"] == 1.0
    trainer.sft_step([([2, 3], [4, 5, 1])], lr=1e-2)
    assert same_codes(put_together([trainer.shards()]), quantized_weights(trainer))
    for stored in trainer.policy.fp8.stored.values():
        stored.parameter._local_tensor.data.mul_(1.01)  # a write that leaves no trace
    assert same_codes(put_together([trainer.shards()]), quantized_weights(trainer))


def test_every_forward_multiplies_with_the_codes_of_its_masters(models):
    """Also between two updates of one step, where no swap makes the codes anew."""
    trainer, wrong = new_trainer(models["llama-tied"], fp8=FP8, updates_per_rollout=3), []
    layer = trainer.policy.hf.get_decoder().layers[0]
    stored = trainer.policy.fp8.stored["model.layers.0.mlp.up_proj.weight"]

    def compare(module, args):
        codes, scale = quantize(stored.parameter.full_tensor())
        equal = torch.equal(module.weight.codes.view(torch.uint8), codes.view(torch.uint8))
        wrong.append(not (equal and torch.equal(module.weight.scale, scale)))

    layer.mlp.up_proj.register_forward_pre_hook(compare)
    trainer.step(random_batch())
    assert len(wrong) > 3 and not any(wrong)


def test_the_swap_ships_the_bytes_that_the_forward_multiplies_with(models):
    """What encode writes from the trainer's codes is what it writes from the masters."""
    trainer = new_trainer(models["tiny-qwen3-moe"], fp8=FP8)
    plain = new_trainer(models["tiny-qwen3-moe"])
    wire = Wire(FP8, 4, torch.bfloat16)
    for made, master in zip(trainer.shards(), plain.shards()):
        form = wire.form(master)
        assert wire.form(made) == form
        n_codes = made.rows * made.local.shape[1] * (1 if form.scales else 2)
        spaces = [torch.zeros(n_codes * 2, dtype=torch.uint8) for _ in range(2)]
        rows = 0 if made.scale is None else len(made.scale)
        for shard, space in zip((made, master), spaces):
            encode(wire, Share(0, (0, made.rows), 0, n_codes, (0, rows)), form, shard, 0, {}, space)
        assert torch.equal(*spaces) and spaces[0].any()


def test_other_bytes_than_those_sent_are_noticed(models):
    for change in (True, False):
        trainer, batch = new_trainer(models["tiny-qwen3-moe"], fp8=FP8), random_batch()
        trainer.shards()
        if change:
            trainer.policy.fp8.stored["model.layers.1.mlp.experts.down_proj"].codes[2, 3, 4] ^= 1
            with pytest.raises(AssertionError, match="FP8 weights are not those that were sent"):
                trainer.step(batch)
        else:
            assert trainer.step(batch)["sync/codes_equal"] == 1.0
            assert "sync/codes_equal" not in trainer.step(batch), "nothing was sent since"


def test_a_nan_in_a_master_is_named(models):
    trainer = new_trainer(models["tiny-qwen3"], fp8=FP8)
    trainer.logprobs(random_batch())
    with torch.no_grad():
        trainer.policy.fp8.stored["model.layers.2.mlp.up_proj.weight"].parameter.to_local()[3, 4] = torch.nan
    for read in (lambda: trainer.logprobs(random_batch()), trainer.shards):
        with pytest.raises(ValueError, match=r"layers\.2\.mlp\.up_proj\.weight holds a NaN or Inf"):
            read()


def test_a_resumed_run_is_the_uninterrupted_one(models, tmp_path):
    trainer, batch = new_trainer(models["tiny-qwen3-moe"], fp8=FP8), random_batch()
    trainer.step(batch)
    checkpoints = Checkpointer(CheckpointConfig(), tmp_path)
    checkpoints.save(trainer, 1, {"a": 1})
    checkpoints.wait()
    expected = trainer.step(batch)
    other = new_trainer(models["tiny-qwen3-moe"], fp8=FP8)
    other.step(random_batch(seed=5))  # codes of other masters are there
    assert checkpoints.restore(other, pytest.fail) == {"a": 1}
    found = other.step(batch)
    for name in expected.keys() - {"trainer/tokens_per_s"}:
        assert found[name] == expected[name], name
    assert same_codes(put_together([other.shards()]), quantized_weights(trainer))
    plain = new_trainer(models["tiny-qwen3-moe"])  # FP8 leaves no trace in a checkpoint
    checkpoints.restore(plain, pytest.fail)
    checkpoints.close()


# ---------------------------------------------------------------- two ranks


def copied(shards):
    return [s._replace(local=s.local.clone(), scale=None if s.scale is None else s.scale.clone()) for s in shards]


def two_ranks(rank, store, models, results):
    with process_group(rank, 2, store):
        batch, found = random_batch(gaps=True), {}
        for kind in KINDS:
            trainer = new_trainer(models[kind], fp8=FP8, tokens_per_micro_batch=10_000)
            found[kind, "first"] = copied(shards := trainer.shards())
            wire = Wire(FP8, LAYERS[kind], torch.float32)
            edges = exchange_edges(wire, [wire.form(s) for s in shards], shards, rank, trainer.shard_group)
            assert not edges, "the swap has no amax to agree on: the codes are there"
            share = batch.select(range(0, 4) if rank else range(4, 12))
            found[kind, "logprobs"] = trainer.logprobs(share)[share.sampled]
            found[kind, "step"] = trainer.step(share)
            found[kind, "gradient"] = first_gradient(trainer)
            found[kind, "second"] = copied(trainer.shards())
            found[kind, "expected"] = quantized_weights(trainer)
            with trainer.policy.high_precision():
                found[kind, "high"] = trainer.logprobs(batch)
            found[kind, "weights"] = {n: p.full_tensor() for n, p in trainer.policy.hf.named_parameters()}
            replicas = new_trainer(models[kind], fp8=FP8, replicas=2)
            replicas.shards()
            found[kind, "replicas"] = replicas.step(share)
            with torch.no_grad():
                name = "model.layers.1.self_attn.o_proj.weight"
                if rank:
                    trainer.policy.fp8.stored[name].parameter.to_local()[0, 0] = torch.inf
                trainer.policy.weights_changed()
                with pytest.raises(ValueError) as raised:
                    trainer.logprobs(share)
                found[kind, "error"] = str(raised.value)
        torch.save(found, results / f"{rank}.pt")
        dist.barrier()


@pytest.fixture(scope="module")
def ranks(models, tmp_path_factory):
    root = tmp_path_factory.mktemp("ranks")
    mp.spawn(two_ranks, (root / "store", models, root), nprocs=2)
    return [torch.load(root / f"{rank}.pt", weights_only=False) for rank in range(2)]


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_have_the_codes_of_one(ranks, models, kind):
    alone = new_trainer(models[kind], fp8=FP8)
    for when, expected in (("first", quantized_weights(alone)), ("second", ranks[0][kind, "expected"])):
        assert same_codes(put_together([rank[kind, when] for rank in ranks]), expected)
    split = [s for s in ranks[0][kind, "first"] if s.scale is not None and s.bounds[1] % 128]
    assert split, "borders inside blocks are tested too"


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_train_as_one(ranks, models, kind):
    batch = random_batch(gaps=True)
    alone = new_trainer(models[kind], fp8=FP8, tokens_per_micro_batch=10_000)
    logprobs = [alone.logprobs(share)[share.sampled] for share in (batch.select(range(4, 12)), batch.select(range(4)))]
    expected = alone.step(batch)
    for rank, logp in zip(ranks, logprobs):
        np.testing.assert_allclose(rank[kind, "logprobs"], logp, rtol=0, atol=1e-5)
        assert rank[kind, "step"]["sync/codes_equal"] == rank[kind, "replicas"]["sync/codes_equal"] == 1.0
        for step in ("step", "replicas"):
            assert rank[kind, step]["trainer/loss"] == pytest.approx(expected["trainer/loss"], rel=1e-3)
        # groups of tokens begin elsewhere, so wgrad is rounded otherwise
        assert relative_error(rank[kind, "gradient"], first_gradient(alone)) < 0.1


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_have_the_masters_in_high_precision(ranks, models, kind):
    batch, plain = random_batch(gaps=True), new_trainer(models[kind])
    with torch.no_grad():
        for name, p in plain.policy.hf.named_parameters():
            p.to_local().copy_(ranks[0][kind, "weights"][name])
    for rank in ranks:
        np.testing.assert_allclose(rank[kind, "high"], plain.logprobs(batch), rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_bad_weight_on_one_rank_stops_all(ranks, kind):
    messages = [rank[kind, "error"] for rank in ranks]
    assert "o_proj.weight holds a NaN or Inf" in messages[1]
    assert "holds a NaN or Inf" in messages[0]
