"""The policy loss and the KL term against scalar Python written per sequence, finite differences and exact sums."""

import math
from itertools import product

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.algo import AlgoConfig
from trainer.algo.kl import KlConfig, kl_estimate, kl_loss
from trainer.algo.loss import LossConfig, denominator, policy_loss
from trainer.tally import Tally

LENGTHS = [5, 1, 7, 4, 3]  # the last sequence has no token that counts


def random_batch(lengths, seed=0, spread=0.4):
    """logp, old, ref, advantages, mask, weights, sequence ids in f64; NaN wherever nobody may look."""
    g = torch.Generator().manual_seed(seed)
    t = sum(lengths)
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths, dtype=torch.int64))
    old = -3 * torch.rand(t, generator=g, dtype=torch.float64) - 0.1
    logp = old + spread * torch.randn(t, generator=g, dtype=torch.float64)
    ref = old + spread * torch.randn(t, generator=g, dtype=torch.float64)
    weight = 2 * torch.rand(t, generator=g, dtype=torch.float64)
    mask = (torch.rand(t, generator=g) < 0.7) & (sequence != len(lengths) - 1)
    advantages = torch.randn(len(lengths), generator=g, dtype=torch.float64)
    for x in (logp, old, ref, weight):
        x[~mask] = math.nan
    return logp, old, ref, advantages, mask, weight, sequence


def by_sequence(x, mask, sequence, n):
    return [[float(x[t]) for t in range(len(x)) if sequence[t] == i and mask[t]] for i in range(n)]


def average(values_per_sequence, config):
    """The aggregation rules, from the token losses of each sequence."""
    filled = [v for v in values_per_sequence if v]
    if config.aggregation == "token_mean":
        return sum(map(sum, filled)) / sum(map(len, filled))
    if config.aggregation == "sequence_mean":
        return sum(sum(v) / len(v) for v in filled) / len(filled)
    return sum(map(sum, filled)) / (config.constant_length * len(filled))


def reference_loss(logp, old, advantages, weight, config, frozen):
    """Lists of lists in, a float out. `frozen`: the log-probs at which stop-gradients are evaluated."""
    low, high = config.bounds
    result = []
    for x, x0, o, w, a in zip(logp, frozen, old, weight, advantages):
        ratios = [math.exp(p - q) for p, q in zip(x, o)]
        if config.objective == "gspo" and x:
            ratios = [math.prod(ratios) ** (1 / len(x))] * len(x)
        losses = []
        for t, r in enumerate(ratios):
            if config.objective == "cispo":
                losses.append(-w[t] * min(max(math.exp(x0[t] - o[t]), low), high) * a * x[t])
            elif a >= 0:
                losses.append(-w[t] * a * min(r, high))
            else:
                r = max(r, low)
                losses.append(-w[t] * a * (min(r, config.dual_clip) if config.dual_clip else r))
        result.append(losses)
    return average(result, config)


CONFIGS = [
    LossConfig(objective=objective, clip_low=low, clip_high=high, dual_clip=dual, aggregation=aggregation,
               constant_length=9 if aggregation == "constant" else 0)
    for (objective, low, high), dual, aggregation in product(
        [("ppo", 0.2, 0.28), ("ppo", None, None), ("gspo", 0.05, 0.08), ("gspo", None, None), ("cispo", 0.3, 0.25),
         ("cispo", None, None)],
        [0.0, 1.4], ["token_mean", "sequence_mean", "constant"])
]  # fmt: skip


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: f"{c.objective}-{c.clip_low}-{c.dual_clip}-{c.aggregation}")
def test_loss_and_gradient_against_reference(config):
    n = len(LENGTHS)
    logp, old, _, advantages, mask, weight, sequence = random_batch(LENGTHS, seed=3)
    logp.requires_grad_()
    total = denominator(mask, sequence, n, config)
    loss, _ = policy_loss(logp, old, advantages, mask, weight, sequence, total, config)
    loss.backward()
    assert logp.grad is not None

    lists = [by_sequence(x.detach(), mask, sequence, n) for x in (logp, old, weight)]
    point, olds, weights = lists

    def reference(x):
        return reference_loss(x, olds, advantages.tolist(), weights, config, frozen=point)

    assert loss.item() == pytest.approx(reference(point), rel=1e-12)
    grads = by_sequence(logp.grad, mask, sequence, n)
    h = 1e-6
    for i, j in [(k, t) for k in range(n) for t in range(len(point[k]))]:
        up, down = [list(map(list, point)) for _ in range(2)]
        up[i][j] += h
        down[i][j] -= h
        assert grads[i][j] == pytest.approx((reference(up) - reference(down)) / (2 * h), abs=1e-8)
    assert logp.grad[~mask].abs().sum() == 0
    assert any(g == 0 for row in grads for g in row) == (config.objective != "cispo"), "no clip was ever active"


def test_float32_matches_float64():
    n = len(LENGTHS)
    logp, old, _, advantages, mask, weight, sequence = random_batch(LENGTHS)
    total = denominator(mask, sequence, n, LossConfig())
    exact, _ = policy_loss(logp, old, advantages, mask, weight, sequence, total, LossConfig())
    small = [x.float() for x in (logp, old, advantages)]
    loss, _ = policy_loss(*small, mask, weight.float(), sequence, total, LossConfig())
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(exact.item(), rel=1e-5)


def test_clip_metrics_split_by_sign():
    # A > 0: ratios 2 (clipped), 0.1 and 1 (not); A < 0: 0.1 (clipped), 2 (not), 20 (dual clip); A = 0: never.
    ratios = torch.tensor([2.0, 0.1, 1.0, 0.1, 2.0, 20.0, 5.0, 7.0])
    sequence = torch.tensor([0, 0, 0, 1, 1, 1, 2, 2])
    mask = torch.tensor([True] * 7 + [False])
    args = (ratios.log(), torch.zeros(8), torch.tensor([1.5, -0.5, 0.0]), mask, torch.ones(8), sequence)

    def measure(config):
        tally = Tally("cpu")
        tally.add(policy_loss(*args, torch.tensor(7.0), config)[1])
        return tally.result()

    stats = measure(LossConfig())
    assert stats["trainer/clip_frac"] == pytest.approx(2 / 7)
    assert stats["trainer/clip_frac_pos"] == pytest.approx(1 / 3)
    assert stats["trainer/clip_frac_neg"] == pytest.approx(1 / 3)
    assert stats["trainer/dual_clip_frac"] == pytest.approx(1 / 3)
    assert stats["trainer/ratio_mean"] == pytest.approx((2 + 0.1 + 1 + 0.1 + 2 + 20 + 5) / 7)
    assert stats["trainer/ratio_max"] == pytest.approx(20)
    assert stats["trainer/loss"] == pytest.approx((-1.5 * (1.2 + 0.1 + 1) + 0.5 * (0.8 + 2 + 10)) / 7)
    assert stats["trainer/clip_frac"] != stats["trainer/clip_frac_neg"], "the counts must tell the denominators apart"
    assert measure(LossConfig(dual_clip=0))["trainer/dual_clip_frac"] == 0
    stats = measure(LossConfig(objective="cispo", clip_low=0.5, clip_high=0.5))
    assert stats["trainer/clip_frac_pos"] == pytest.approx(2 / 3) and stats["trainer/clip_frac_neg"] == 1.0


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 6), min_size=1, max_size=7), st.lists(st.integers(0, 3), min_size=7, max_size=7),
       st.sampled_from(CONFIGS), st.integers(0, 1000))  # fmt: skip
def test_any_micro_batching_gives_the_gradient_of_one_batch(lengths, owner, config, seed):
    lengths = [*lengths, 2]
    n = len(lengths)
    owner = [*owner, 0][:n]
    logp, old, ref, advantages, mask, weight, sequence = random_batch(lengths, seed)
    kl = KlConfig(coef=0.3)

    def run(pieces):
        x = logp.clone().requires_grad_()
        args = []
        for piece in pieces:
            token = torch.isin(sequence, torch.tensor(piece, dtype=torch.int64))
            local = torch.searchsorted(torch.tensor(piece, dtype=torch.int64), sequence[token])
            args.append((token, local, piece))
        total = sum((denominator(mask[t], s, len(p), config) for t, s, p in args), torch.zeros(()))
        tally = Tally("cpu")
        for t, s, p in args:
            loss, parts = policy_loss(x[t], old[t], advantages[p], mask[t], weight[t], s, total, config)
            kl_term, kl_parts = kl_loss(x[t], ref[t], mask[t], s, len(p), total, kl, config)
            (loss + kl_term).backward()
            tally.add(parts | kl_parts)
        assert x.grad is not None
        return x.grad, tally.result()

    one, stats = run([list(range(n))])
    many, stats_many = run([[i for i in range(n) if owner[i] == k] for k in range(4)])  # some have no token at all
    torch.testing.assert_close(many, one, rtol=1e-10, atol=1e-14)
    assert stats_many == pytest.approx(stats, rel=1e-10, abs=1e-14)


@pytest.mark.parametrize("config", CONFIGS[::3] + CONFIGS[1::3])
@pytest.mark.parametrize("tokens", [0, 3])
def test_nothing_to_learn_from_is_finite_with_zero_gradient(config, tokens):
    logp = torch.full((tokens,), math.nan, requires_grad=True)
    ones, mask = torch.full((tokens,), math.inf), torch.zeros(tokens, dtype=torch.bool)
    sequence = torch.zeros(tokens, dtype=torch.int64)
    total = denominator(mask, sequence, 1, config)
    assert total == 0
    loss, parts = policy_loss(logp, ones, torch.ones(1), mask, ones, sequence, total, config)
    kl_term, kl_parts = kl_loss(logp, ones, mask, sequence, 1, total, KlConfig(coef=1.0), config)
    (loss + kl_term).backward()
    assert loss == 0 and kl_term == 0
    assert logp.grad is not None and (logp.grad == 0).all()
    tally = Tally("cpu")
    tally.add(parts | kl_parts)
    assert all(value == 0 for value in tally.result().values())


@pytest.mark.parametrize("config", CONFIGS[::3] + CONFIGS[1::3])
@pytest.mark.parametrize("gap", [-1e4, -25.0, 25.0, 1e4])
def test_huge_log_ratios_stay_finite(config, gap):
    logp = torch.full((2,), gap, requires_grad=True)
    mask, sequence = torch.ones(2, dtype=torch.bool), torch.arange(2)
    args = (mask, torch.ones(2), sequence, denominator(mask, sequence, 2, config), config)
    loss, _ = policy_loss(logp, torch.zeros(2), torch.tensor([1.0, -1.0]), *args)
    loss.backward()
    assert loss.isfinite() and logp.grad is not None and logp.grad.isfinite().all()


def test_rejected_tokens_leave_the_denominator_and_zero_weights_do_not():
    logp, sequence = torch.tensor([-1.0, -1.0, -1.0]), torch.tensor([0, 0, 1])
    masks = {"all": [True, True, True], "token": [True, False, True], "sequence": [True, True, False]}
    expected = {"token_mean": (3, 2, 2), "sequence_mean": (2, 2, 1), "constant": (20, 20, 10)}
    for aggregation, counts in expected.items():
        config = LossConfig(aggregation=aggregation, constant_length=10 if aggregation == "constant" else 0)
        got = tuple(int(denominator(torch.tensor(mask), sequence, 2, config)) for mask in masks.values())
        assert got == counts, aggregation
    loss, _ = policy_loss(logp, logp, torch.ones(2), torch.tensor(masks["all"]), torch.tensor([1.0, 0.0, 1.0]),
                          sequence, torch.tensor(3.0), LossConfig())  # fmt: skip
    assert loss.item() == pytest.approx(-2 / 3)


def test_weights_advantages_and_old_log_probs_are_constants():
    leaves = [torch.rand(3, requires_grad=True) for _ in range(5)]
    logp, old, weight, advantages, ref = leaves
    mask, sequence, total = torch.ones(3, dtype=torch.bool), torch.arange(3), torch.tensor(3.0)
    loss, _ = policy_loss(logp, old, advantages, mask, weight, sequence, total, LossConfig())
    kl_term, _ = kl_loss(logp, ref, mask, sequence, 3, total, KlConfig(coef=1.0), LossConfig())
    (loss + kl_term).backward()
    assert [leaf.grad is not None for leaf in leaves] == [True, False, False, False, False]


def softmax_pair(seed):
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(6, generator=g, dtype=torch.float64).requires_grad_()
    return logits, torch.randn(6, generator=g, dtype=torch.float64).log_softmax(0)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_gradient_is_in_expectation_that_of_the_exact_kl(estimator):
    logits, ref = softmax_pair(1)
    logp = logits.log_softmax(0)
    p = logp.detach().exp()  # every outcome once, with its probability: the expectation, no sampling
    values = kl_estimate(logp, ref, torch.ones(6, dtype=torch.bool), KlConfig(estimator=estimator))
    (grad,) = torch.autograd.grad((p * values).sum(), logits, retain_graph=True)
    reverse = (logp.exp() * (logp - ref)).sum()
    forward = (ref.exp() * (ref - logp)).sum()
    (exact,) = torch.autograd.grad(forward if estimator == "k3" else reverse, logits)
    torch.testing.assert_close(grad, exact)
    assert grad.norm() > 0.01
    if estimator != "k2":
        assert (p * values).sum().item() == pytest.approx(reverse.item())


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "constant"])
def test_kl_loss_against_reference(estimator, aggregation):
    n = len(LENGTHS)
    logp, _, ref, _, mask, _, sequence = random_batch(LENGTHS, seed=5)
    loss = LossConfig(aggregation=aggregation, constant_length=9 if aggregation == "constant" else 0)
    total = denominator(mask, sequence, n, loss)
    term, parts = kl_loss(logp, ref, mask, sequence, n, total, KlConfig(coef=0.7, estimator=estimator), loss)
    rule = {"k1": lambda d: d, "k2": lambda d: d * d / 2, "k3": lambda d: math.exp(-d) - 1 + d}[estimator]
    pairs = zip(by_sequence(logp, mask, sequence, n), by_sequence(ref, mask, sequence, n))
    values = [[rule(p - q) for p, q in zip(x, y)] for x, y in pairs]
    assert term.item() == pytest.approx(0.7 * average(values, loss), rel=1e-12)
    tally = Tally("cpu")
    tally.add(parts)
    assert tally.result()["trainer/kl_ref"] == pytest.approx(average(values, LossConfig()))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"loss": {"clip_low": 1.5}}, r"clip_low 1.5 must be in \[0, 1\]"),
        ({"loss": {"clip_low": -0.1}}, "clip_low"),
        ({"loss": {"clip_high": -0.1}}, "clip_high"),
        ({"loss": {"clip_high": math.inf}}, "clip_high"),
        ({"loss": {"clip_high": math.nan}}, "clip_high"),
        ({"loss": {"dual_clip": 1.0}}, "dual_clip 1.0 must be 0"),
        ({"loss": {"dual_clip": -1.0}}, "dual_clip"),
        ({"loss": {"aggregation": "constant"}}, "constant_length must be above 0"),
        ({"loss": {"constant_length": 5}}, "constant_length must be above 0"),
        ({"loss": {"objective": "trpo"}}, "trpo"),
        ({"loss": {"clip": 0.2}}, "unknown field `clip`"),
        ({"kl": {"coef": -1.0}}, r"\$.kl.coef"),
        ({"kl": {"estimator": "k4"}}, r"\$.kl.estimator"),
        ({"unknown": {}}, "unknown"),
    ],
)
def test_config_errors(fields, message):
    with pytest.raises(msgspec.ValidationError, match=message):
        msgspec.convert(fields, AlgoConfig)


def test_default_bounds():
    assert LossConfig().bounds == pytest.approx((0.8, 1.2))
    assert LossConfig(clip_high=0.28).bounds == pytest.approx((0.8, 1.28))
    assert LossConfig(objective="gspo").bounds == pytest.approx((1 - 3e-4, 1 + 4e-4))
    assert LossConfig(objective="cispo").bounds == pytest.approx((0, 5))
