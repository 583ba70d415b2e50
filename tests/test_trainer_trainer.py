"""The step: its gradient against plain transformers and autograd in f64, whatever the micro-batches and ranks."""

import contextlib
import itertools

import msgspec
import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from trainer_cases import (
    ALGORITHMS,
    first_gradient,
    new_trainer,
    plain_logprobs,
    process_group,
    random_batch,
    reference_gradient,
    relative_error,
    write_model,
)
from transformers import AutoModelForCausalLM

from trainer.algo import AlgoConfig
from trainer.algo.advantages import AdvantageConfig
from trainer.algo.clipping import CalibrationConfig
from trainer.algo.correction import CorrectionConfig
from trainer.algo.kl import KlConfig
from trainer.algo.loss import LossConfig
from trainer.model import reshard
from trainer.settings import TrainerConfig, learning_rate

KINDS = ["tiny-qwen3-moe", "llama-tied"]
TEMPERATURE = 0.8


@pytest.fixture(scope="module")
def models(tmp_path_factory, group):
    root = tmp_path_factory.mktemp("models")
    return {kind: write_model(kind, root) for kind in ["tiny-qwen3", *KINDS]}


@pytest.fixture(scope="module")
def exact(models):
    return {kind: reference_gradient(models[kind], random_batch(gaps=True), TEMPERATURE) for kind in KINDS}


@pytest.fixture(scope="module", params=[name for name in ALGORITHMS if name != "token_mean"])
def algorithm(request, models):
    """Name of an algorithm and its exact gradient on the small dense model."""
    batch = random_batch(gaps=True)
    return request.param, reference_gradient(models["llama-tied"], batch, TEMPERATURE, request.param)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("budget", [1, 40, 10_000])
def test_the_gradient_is_autograds_for_every_token_budget(models, exact, kind, budget):
    trainer = new_trainer(models[kind], tokens_per_micro_batch=budget)
    metrics = trainer.step(random_batch(gaps=True))
    assert relative_error(first_gradient(trainer), exact[kind]) < 1e-5
    whole = torch.cat([g.flatten() for g in exact[kind].values()]).norm().item()
    assert metrics["trainer/grad_norm"] == pytest.approx(whole, rel=1e-5)


@pytest.mark.parametrize("budget", [1, 40, 10_000])
def test_so_it_is_for_other_denominators(models, algorithm, budget):
    name, expected = algorithm
    trainer = new_trainer(models["llama-tied"], ALGORITHMS[name], tokens_per_micro_batch=budget)
    trainer.step(random_batch(gaps=True))
    assert relative_error(first_gradient(trainer), expected) < 1e-5


def test_two_ranks_have_it_for_other_denominators(ranks, algorithm):
    name, expected = algorithm
    for rank in ranks:
        assert relative_error(rank[name], expected) < 1e-5


def test_normalised_weights_take_an_extra_pass_and_divide_by_their_mean(models, exact):
    algo = AlgoConfig(correction=CorrectionConfig(normalize=True))
    trainer = new_trainer(models["llama-tied"], algo)
    metrics = trainer.step(random_batch(gaps=True))
    mean = metrics["trainer/correction_weight_mean"]
    scaled = {name: g / mean for name, g in exact["llama-tied"].items()}
    assert relative_error(first_gradient(trainer), scaled) < 1e-5


# Groups 0 and 2, 1 and 3: with two updates, the last mini-batch of the ranks together is that of one rank.
CALIBRATED = [[*range(0, 4), *range(8, 12)], [*range(4, 8), *range(12, 16)]]


def calibrated(directory, batch):
    """Metrics of a step with calibrated clipping; FP8 is played by an error that depends on the log-prob."""
    algo = AlgoConfig(calibration=CalibrationConfig(period=1, min_tokens=5))
    trainer = new_trainer(directory, algo, updates_per_rollout=2)
    exact = []
    trainer.policy.high_precision = lambda: exact_forwards(exact)
    trainer.policy.register_forward_hook(
        lambda module, args, out: out if exact else (out[0] + 0.2 * torch.sin(100 * out[0].detach()), out[1])
    )
    return trainer.step(batch)


@contextlib.contextmanager
def exact_forwards(flag):
    flag.append(True)
    yield
    flag.clear()


def two_ranks(rank, store, models, results):
    """One process of two: everything that needs a second rank, in one start-up."""
    with process_group(rank, 2, store):
        batch = random_batch(gaps=True)
        shares = {"halves": [range(0, 4), range(4, 12)], "one empty": [range(12), []]}
        found = {}
        for kind in KINDS:
            for name, share in shares.items():
                trainer = new_trainer(models[kind])
                metrics = trainer.step(batch.select(share[rank]))
                found[kind, name] = (first_gradient(trainer), metrics)
            found[kind, "weights"] = {name: w.clone() for name, w in trainer.weights()}
            found[kind, "shards"] = trainer.shards()
        halves = batch.select(shares["halves"][rank])
        for name, algo in ALGORITHMS.items():
            trainer = new_trainer(models["llama-tied"], algo)
            trainer.step(halves)
            found[name] = first_gradient(trainer)
        trainer = new_trainer(models["llama-tied"], replicas=2)
        norm = trainer.step(halves)["trainer/grad_norm"]
        found["hsdp"] = (first_gradient(trainer), norm)
        trainer = new_trainer(
            models["llama-tied"], AlgoConfig(kl=KlConfig(coef=0.1)), updates_per_rollout=3, replicas=2
        )
        trainer.sft_step([([2, 3], [4])] if rank else [], lr=1e-3)
        trainer.begin_rl()
        trainer.step(batch.select(shares["one empty"][rank]))
        found["replicas"] = {name: w.clone() for name, w in trainer.weights()}
        bad = msgspec.structs.replace(halves, rewards=np.ones(halves.n_sequences, np.float32))
        found["degenerate"] = new_trainer(models["llama-tied"]).step(bad)["trainer/grad_norm"]
        found["calibration"] = calibrated(models["llama-tied"], random_batch(groups=4).select(CALIBRATED[rank]))
        torch.save(found, results / f"{rank}.pt")
        dist.barrier()


@pytest.fixture(scope="module")
def ranks(models, tmp_path_factory):
    root = tmp_path_factory.mktemp("ranks")
    mp.spawn(two_ranks, (root / "store", models, root), nprocs=2)
    return [torch.load(root / f"{rank}.pt", weights_only=False) for rank in range(2)]


def test_calibrated_bounds_are_the_same_on_every_rank_and_those_of_one(ranks, models):
    alone = calibrated(models["llama-tied"], random_batch(groups=4))
    names = [f"trainer/clip_{name}" for name in ("low", "high", "alpha", "alpha_naive", "mass_ratio", "calibrated")]
    first, second = ([rank["calibration"][name] for name in names] for rank in ranks)
    assert first == second == pytest.approx([alone[name] for name in names], rel=1e-3)
    assert first[0] != 0.8 and first[-1] == 1


@pytest.mark.parametrize("kind", KINDS)
def test_the_ranks_shards_together_are_the_weights(ranks, models, kind):
    def put_together(parts):
        """Checkpoint tensors from the shards of all ranks."""
        whole = {}
        for shard in zip(*parts):
            rows = torch.cat([part.local for part in shard])
            assert len(rows) == shard[0].rows and [len(p.local) for p in shard] == np.diff(shard[0].bounds).tolist()
            for piece in shard[0].pieces:
                whole[piece.name] = rows[piece.row : piece.row + piece.rows].view(piece.shape)
        return whole

    alone = new_trainer(models[kind])
    for parts, weights in [
        ([rank[kind, "shards"] for rank in ranks], ranks[0][kind, "weights"]),
        ([alone.shards()], dict(alone.weights())),
    ]:
        whole = put_together(parts)
        assert whole.keys() == weights.keys()
        assert all(torch.equal(whole[name], weights[name]) for name in weights)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("share", ["halves", "one empty"])
def test_two_ranks_have_the_gradient_of_one(ranks, exact, models, kind, share):
    alone = new_trainer(models[kind])
    expected = alone.step(random_batch(gaps=True))
    for rank in ranks:
        gradient, metrics = rank[kind, share]
        assert relative_error(gradient, exact[kind]) < 1e-5
        for name in expected.keys() - {"trainer/tokens_per_s", "trainer/micro_batches", "trainer/packed_frac"}:
            assert metrics[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-6), name


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_export_the_weights_of_one(ranks, models, kind):
    trainer = new_trainer(models[kind])
    trainer.step(random_batch(gaps=True))
    for name, tensor in trainer.weights():
        for rank in ranks:
            # AdamW's first update is lr * sign(g): where g is rounding noise, so is the sign
            assert (rank[kind, "weights"][name] - tensor).abs().max() <= 2.1e-3, name
            assert (rank[kind, "weights"][name] - tensor).abs().mean() <= 1e-5, name


def test_two_replicas_have_the_gradient_of_one_rank(ranks, exact):
    whole = torch.cat([g.flatten() for g in exact["llama-tied"].values()]).norm().item()
    for rank in ranks:
        gradient, norm = rank["hsdp"]
        assert relative_error(gradient, exact["llama-tied"]) < 1e-5
        assert norm == pytest.approx(whole, rel=1e-5)


def test_replicas_agree_after_sft_kl_and_several_updates(ranks):
    first, second = (rank["replicas"] for rank in ranks)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert ranks[0]["degenerate"] == 0.0


@pytest.mark.parametrize("kind", ["tiny-qwen3", "tiny-qwen3-moe"])
def test_logprobs_are_row_aligned_and_follow_the_update(models, kind):
    trainer, batch = new_trainer(models[kind]), random_batch()
    for _ in range(2):
        got = trainer.logprobs(batch)
        model = AutoModelForCausalLM.from_pretrained(models[kind], dtype=torch.float32)
        if trainer.updates:
            source = dict(model.named_parameters())
            for name, p in trainer.policy.hf.named_parameters():
                source[name].data.copy_(p.full_tensor())
        with torch.no_grad():
            expected = torch.cat(plain_logprobs(model, batch, TEMPERATURE)).numpy()
        np.testing.assert_allclose(got[batch.sampled], expected, rtol=0, atol=2e-5)
        assert (got[~batch.sampled] == 0).all()
        trainer.step(batch)


def test_several_updates_start_at_ratio_one_and_move_away(models):
    one = new_trainer(models["tiny-qwen3"]).step(random_batch())
    assert one["trainer/ratio_max"] == 1.0 and one["trainer/updates"] == 1
    four = new_trainer(models["tiny-qwen3"], updates_per_rollout=4)
    metrics = four.step(random_batch())  # of three groups
    assert metrics["trainer/updates"] == 4 == four.updates and metrics["trainer/ratio_max"] > 1.001


def test_several_updates_feed_every_prompt_once(models):
    batch = random_batch(groups=5)
    trainer = new_trainer(models["tiny-qwen3"], updates_per_rollout=2, tokens_per_micro_batch=10_000)
    metrics = trainer.step(batch)
    prompts = (batch.lengths - batch.sampled_lengths)[::4]
    assert metrics["trainer/micro_batches"] == 2
    assert metrics["trainer/packed_frac"] * 2 * 10_000 == pytest.approx(
        (batch.sampled_lengths - 1).sum() + prompts.sum()
    )


def test_only_weights_that_exist_are_normalised(models):
    """Without importance weights there is nothing to normalise, and no extra pass for it."""
    trainer = new_trainer(models["tiny-qwen3"], AlgoConfig(correction=CorrectionConfig(mode="off", normalize=True)))
    seen = []
    trainer.policy.register_forward_hook(lambda *_: seen.append(torch.is_grad_enabled()))
    trainer.step(random_batch())
    assert seen and all(seen)


def test_a_non_finite_logprob_names_the_sample_of_the_batch(models):
    batch = random_batch()
    longest_first = np.argsort(-batch.lengths)
    assert longest_first[5] != 5
    batch.logprobs[batch.starts[6] - 1] = np.nan  # last token of sample 5
    with pytest.raises(ValueError, match="sample 5 of the batch has a non-finite rollout log-prob"):
        new_trainer(models["tiny-qwen3"], tokens_per_micro_batch=10_000).step(batch)


def test_bypass_takes_the_rollouts_logprobs_as_old(models):
    algo = AlgoConfig(correction=CorrectionConfig(mode="bypass", importance="none"))
    batch = random_batch()
    trainer = new_trainer(models["tiny-qwen3"], algo)
    ratio = np.exp(np.clip(trainer.logprobs(batch) - batch.logprobs, -20, 20))[batch.sampled]
    metrics = trainer.step(batch)
    assert metrics["trainer/ratio_mean"] == pytest.approx(ratio.mean(), rel=1e-4)
    assert metrics["trainer/ratio_max"] == pytest.approx(ratio.max(), rel=1e-4)
    assert metrics["trainer/mismatch_rho_mean"] == pytest.approx(ratio.mean(), rel=1e-4)


def test_rejected_sequences_leave_numerator_and_denominator(models):
    """With the limit between two sequences' k3, the gradient is that of a batch without the rejected ones."""
    batch = random_batch()
    probe = new_trainer(models["llama-tied"])
    ell = (probe.logprobs(batch) - batch.logprobs).astype(np.float64)
    ids = batch.sequence_ids
    k3 = np.array(
        [(np.exp(x) - 1 - x)[s].mean() for i in range(12) for x, s in [(ell[ids == i], batch.sampled[ids == i])]]
    )
    limit = float(np.median(k3))
    correction = CorrectionConfig(rejection=("seq_mean_k3",), seq_mean_k3_max=limit)
    kept = new_trainer(models["llama-tied"], AlgoConfig(correction=correction))
    assert kept.step(batch)["trainer/correction_rejected_seq_frac"] == 0.5
    other = new_trainer(models["llama-tied"])
    sampled = batch.sampled & (k3 <= limit)[ids]
    other.step(msgspec.structs.replace(batch, sampled=sampled))
    assert relative_error(first_gradient(kept), first_gradient(other)) < 1e-5


def test_the_reference_policy_is_the_one_rl_began_with(models):
    trainer = new_trainer(models["tiny-qwen3"], AlgoConfig(kl=KlConfig(coef=0.1)))
    trainer.sft_step([([2, 3], [4, 5, 1])], lr=1e-2)
    trainer.begin_rl()
    batch = random_batch()
    assert trainer.step(batch)["trainer/kl_ref"] == pytest.approx(0, abs=1e-9)
    assert trainer.step(batch)["trainer/kl_ref"] > 1e-5


def test_every_algorithm_runs_through_the_step(models):
    for algo in (
        AlgoConfig(loss=LossConfig(objective="gspo", aggregation="sequence_mean")),
        AlgoConfig(loss=LossConfig(objective="cispo", aggregation="constant", constant_length=16)),
        AlgoConfig(advantage=AdvantageConfig(name="reinforce_pp"), correction=CorrectionConfig(mode="off")),
    ):
        metrics = new_trainer(models["tiny-qwen3"], algo).step(random_batch())
        assert all(np.isfinite(value) for value in metrics.values()) and metrics["trainer/grad_norm"] > 0


def test_the_support_renormalises_the_logprobs(models):
    """Against a softmax over the logits of two candidates; every third token has itself as the only one."""
    batch = random_batch()
    other = (batch.tokens + 5) % 40 + 2
    support = np.stack([np.where(np.arange(batch.n_tokens) % 3, other, -1), batch.tokens], 1).astype(np.int32)
    got = new_trainer(models["tiny-qwen3"]).logprobs(msgspec.structs.replace(batch, support=support))
    model = AutoModelForCausalLM.from_pretrained(models["tiny-qwen3"], dtype=torch.float32)
    for a, b in itertools.pairwise(batch.starts):
        ids = torch.from_numpy(batch.tokens[a:b].astype(np.int64))
        with torch.no_grad():
            logits = model(ids[None]).logits[0] / TEMPERATURE
        for t in np.flatnonzero(batch.sampled[a:b]):
            candidates = [int(c) for c in support[a + t] if c >= 0]
            expected = torch.softmax(logits[t - 1, candidates], 0)[-1].log()
            assert got[a + t] == pytest.approx(expected.item(), abs=2e-5)


@pytest.mark.parametrize("where", ["weights", "advantage"])
def test_a_non_finite_update_is_refused_and_nothing_applied(models, where):
    trainer, batch = new_trainer(models["tiny-qwen3"]), random_batch()
    trainer.step(batch)
    before = [p.full_tensor().clone() for p in trainer.policy.parameters()]
    if where == "advantage":  # grows beyond f32 in the loss
        batch = msgspec.structs.replace(batch, rewards=batch.rewards * np.float32(1e38))
        trainer.algo = AlgoConfig(advantage=AdvantageConfig(name="dr_grpo"))
        with pytest.raises(FloatingPointError, match=r"update 1: .*not applied"):
            trainer.step(batch)
    else:
        with torch.no_grad():
            next(iter(trainer.policy.parameters())).to_local().fill_(torch.nan)
        with pytest.raises((FloatingPointError, ValueError), match=r"nan|non-finite"):
            trainer.step(batch)
        before[0].fill_(torch.nan)
        reshard(trainer.policy)  # the error came between forward and backward
    for p, old in zip(trainer.policy.parameters(), before):
        assert torch.equal(p.full_tensor().nan_to_num(), old.nan_to_num())


def test_supervised_steps_reduce_the_loss(models):
    trainer = new_trainer(models["tiny-qwen3-moe"])
    pairs = [([10 + i, 12], [20 + i, 21, 22 + i, 1]) for i in range(6)]
    losses = [trainer.sft_step(pairs, lr=3e-3)["trainer/loss"] for _ in range(25)]
    assert losses[0] > 3.5 and losses[-1] < 0.5


def test_bf16_stays_near_fp32_and_keeps_fp32_masters(models):
    batch, found = random_batch(), {}
    for dtype in ("fp32", "bf16"):
        trainer = new_trainer(models["tiny-qwen3-moe"], dtype=dtype)
        found[dtype] = trainer.logprobs(batch)
        assert np.isfinite(trainer.step(batch)["trainer/grad_norm"])
        assert {p.dtype for p in trainer.policy.parameters()} == {torch.float32}
    difference = np.abs(found["bf16"] - found["fp32"])[batch.sampled]
    assert 1e-4 < difference.mean() < 0.05


def test_clipping_scales_to_the_limit(models, exact):
    trainer = new_trainer(models["llama-tied"], max_grad_norm=1e-3)
    norm = trainer.step(random_batch(gaps=True))["trainer/grad_norm"]
    clipped = {name: g * (1e-3 / norm) for name, g in exact["llama-tied"].items()}
    assert norm > 1e-2 and relative_error(first_gradient(trainer), clipped) < 1e-5


def test_the_schedule():
    def rates(schedule):
        config = TrainerConfig(lr=1.0, warmup_steps=2, schedule=schedule)
        return [learning_rate(config, update, 6) for update in range(6)]

    assert rates("constant") == [0.5, 1, 1, 1, 1, 1]
    assert rates("linear") == [0.5, 1, 1, 0.75, 0.5, 0.25]
    assert rates("cosine") == pytest.approx([0.5, 1, 1, (1 + 0.5**0.5) / 2, 0.5, (1 - 0.5**0.5) / 2])


def test_replicas_must_divide_the_ranks(models):
    with pytest.raises(ValueError, match="replicas 2 must divide"):
        new_trainer(models["tiny-qwen3"], replicas=2)
