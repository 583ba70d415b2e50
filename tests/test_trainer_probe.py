"""Attribution: the estimate against statistics done another way, and probes whose answer is known."""

from dataclasses import replace

import msgspec
import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from trainer_cases import new_trainer, process_group, random_batch, write_model

from sync.quantize import Fp8Config
from trainer.algo.attribution import Bootstrap, group_sums
from trainer.probe import Numerics, ProbeConfig, attribute

FP8 = Fp8Config(train="reference")
CONFIG = ProbeConfig(resamples=500)
KINDS = ["tiny-qwen3-moe", "llama-tied"]


@pytest.fixture(scope="module")
def models(tmp_path_factory, group):
    root = tmp_path_factory.mktemp("models")
    return {kind: write_model(kind, root) for kind in KINDS}


def sampled_by(trainer, numerics, batch):
    """The batch as an engine would have sampled it that computes like this."""
    with trainer.fp8_twin() as policy, numerics.of(policy):
        return msgspec.structs.replace(batch, logprobs=trainer.logprobs(batch, policy))


def kl(found, label):
    return next(arm.kl for arm in found.arms if arm.label == label)


# ---------------------------------------------------------------- the estimate


def test_sums_are_those_of_every_token():
    rng = np.random.default_rng(0)
    roll, arms = rng.normal(-2, 1, 40), rng.normal(-2, 1, (3, 40))
    arms[:, 7], sampled = np.nan, rng.random(40) < 0.6
    sampled[7], group = False, np.sort(rng.integers(0, 5, 40))
    group[-1] = 5
    got = group_sums(arms, roll, sampled, group)
    expected = np.zeros((6, 4))
    for t in np.flatnonzero(sampled):
        ratios = np.exp(arms[:, t]) / np.exp(roll[t])
        expected[group[t]] += [1, *(ratios - 1 - np.log(ratios))]
    np.testing.assert_allclose(got, expected, rtol=1e-9, atol=1e-12)


def test_a_log_prob_that_is_not_finite_names_its_group():
    arms = np.zeros((2, 4))
    arms[1, 2] = np.inf
    with pytest.raises(ValueError, match="group 1 is not finite"):
        group_sums(arms, np.zeros(4), np.ones(4, bool), np.array([0, 0, 1, 2]))


def test_intervals_are_those_of_the_normal_limit():
    """Groups of equal size: the mean of G independent numbers, so ±1.96 standard errors."""
    rng = np.random.default_rng(1)
    a, b = rng.gamma(2, 1, 400), rng.gamma(3, 1, 400)
    sums = np.stack([np.full(400, 8.0), 8 * a, 8 * (a + b)], axis=1)
    estimate = Bootstrap(sums, 0.95, 4000, seed=0)
    for got, x in ((estimate.kl(0), a), (estimate.difference(1, 0), b)):
        half = 1.96 * x.std(ddof=1) / 20
        np.testing.assert_allclose(got, [x.mean(), x.mean() - half, x.mean() + half], rtol=0.02)
    wide, narrow = (Bootstrap(sums, c, 4000, seed=0).kl(0) for c in (0.99, 0.5))
    assert wide.low < narrow.low < narrow.high < wide.high


def test_groups_count_by_their_tokens_and_one_is_not_enough():
    sums = np.array([[1, 4.0], [0, 0.0], [9, 9.0]])
    estimate = Bootstrap(sums, 0.9, 1000, seed=0)
    assert estimate.kl(0).value == pytest.approx(1.3) and (estimate.groups, estimate.tokens) == (2, 10)
    assert estimate.kl(0).low == pytest.approx(1.0) and estimate.kl(0).high == pytest.approx(4.0)
    with pytest.raises(ValueError, match="1 groups of samples have tokens"):
        Bootstrap(sums[:2], 0.9, 100, seed=0)


# ---------------------------------------------------------------- probes whose answer is known


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("train", ["off", "reference"])
def test_an_engine_in_fp8_leaves_no_remainder(models, kind, train):
    trainer = new_trainer(models[kind], fp8=Fp8Config(train=train))
    batch = sampled_by(trainer, Numerics(), random_batch(groups=4))
    found = attribute(trainer, batch, CONFIG, seed=0)
    assert kl(found, "all matched") == 0
    assert {source.name: source.open for source in found.sources} == {
        "weights": train == "off", "activations": train == "off", "scales": False,
    }  # fmt: skip
    assert kl(found, "none matched") > 1e-6
    assert all(source.low <= source.kl <= source.high and source.kl > 1e-6 for source in found.sources)
    assert kl(found, "as trained") == (kl(found, "none matched") if train == "off" else 0)
    assert set(found.metrics()) == {
        f"trainer/probe_{name}" for name in ("kl", "remainder", "weights", "activations", "scales")
    }


@pytest.mark.parametrize("name", ["weights", "activations", "scales"])
def test_an_engine_that_differs_in_one_way_is_found(models, name):
    """What alone is unmatched has a negative part, as large as the remainder; nothing else explains that."""
    trainer = new_trainer(models["llama-tied"], fp8=FP8)
    batch = sampled_by(trainer, replace(Numerics(), **{name: False}), random_batch(groups=4))
    found = attribute(trainer, batch, CONFIG, seed=0)
    parts = {source.name: source.kl for source in found.sources}
    assert parts[name] == -kl(found, "all matched") < -1e-6
    assert all(part > parts[name] for other, part in parts.items() if other != name)


def test_the_twin_has_the_weights_of_now_and_disturbs_nothing(models):
    trainer = new_trainer(models["tiny-qwen3-moe"], fp8=Fp8Config())
    before, batch = trainer.logprobs(random_batch()), random_batch(groups=4)
    trainer.step(random_batch(seed=1))
    trained = new_trainer(models["tiny-qwen3-moe"], fp8=FP8)
    with torch.no_grad():
        for mine, theirs in zip(trained.policy.parameters(), trainer.policy.parameters(), strict=True):
            mine.to_local().copy_(theirs.to_local())
    with trainer.fp8_twin() as policy:
        assert policy is not trainer.policy
        np.testing.assert_array_equal(trainer.logprobs(batch, policy), trained.logprobs(batch))
    moved = trainer.logprobs(random_batch())
    attribute(trainer, batch, CONFIG, seed=0)
    np.testing.assert_array_equal(trainer.logprobs(random_batch()), moved)
    assert abs(moved - before).max() > 0
    copy = new_trainer(models["tiny-qwen3-moe"], fp8=Fp8Config())
    copy.step(random_batch(seed=1))
    assert trainer.step(batch)["trainer/grad_norm"] == copy.step(batch)["trainer/grad_norm"]


def test_an_engine_without_fp8_has_no_sources(models):
    trainer = new_trainer(models["llama-tied"])
    found = attribute(trainer, random_batch(), CONFIG, seed=0)
    assert not found.sources and set(found.absent.values()) == {"fp8.enabled = false"}
    assert len({arm.kl for arm in found.arms}) == 1


# ---------------------------------------------------------------- ranks


def _work(rank, store, directory, results):
    with process_group(rank, 2, store):
        trainer = new_trainer(directory, fp8=Fp8Config())
        batch = random_batch(groups=5)
        mine = batch.select(np.flatnonzero(batch.groups % 2 == rank))
        (results / f"{rank}.json").write_bytes(msgspec.json.encode(attribute(trainer, mine, CONFIG, seed=0)))
        dist.barrier()


def test_two_ranks_find_what_one_finds(models, tmp_path):
    mp.spawn(_work, (tmp_path / "store", models["llama-tied"], tmp_path), nprocs=2)
    first, second = ((tmp_path / f"{rank}.json").read_bytes() for rank in range(2))
    assert first == second
    alone = attribute(new_trainer(models["llama-tied"], fp8=Fp8Config()), random_batch(groups=5), CONFIG, seed=0)
    found = msgspec.json.decode(first, type=type(alone))
    for got, expected in zip([*found.arms, *found.sources], [*alone.arms, *alone.sources], strict=True):
        assert got.kl == pytest.approx(expected.kl, rel=1e-4, abs=1e-9)
