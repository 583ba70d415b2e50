"""Calibrated clipping against sorting and summing in float64; the table of ALGORITHMS §8; ranks; batches of no use."""

import math

import msgspec
import numpy as np
import pytest
import sync_ranks
import torch
import torch.distributed as dist

from trainer.algo import AlgoConfig
from trainer.algo.clipping import CalibrationConfig, ClipTokens, calibrate, largest_bound
from trainer.algo.loss import LossConfig, policy_loss

EXACT = CalibrationConfig(period=1, smoothing=0.0)
GRPO, DAPO = (0.8, 1.2), (0.8, 1.28)


def alone(x):
    return x


def synthetic(noise, n=100_000, seed=0, weights=False):
    """Log-ratios of std 0.1, FP8 noise on top, advantages of either sign; with `weights`, sizes and weights vary."""
    rng = np.random.default_rng(seed)
    log16 = rng.normal(0, 0.1, n)
    log8 = log16 + rng.normal(0, noise, n)
    advantage = rng.choice([-1.0, 1.0], n)
    weight = np.ones(n)
    if weights:
        advantage *= rng.exponential(1.0, n)
        weight = np.minimum(np.exp(rng.normal(0, 0.5, n)), 2.0)
    return log8, log16, advantage, weight


def tokens_of(arrays):
    return ClipTokens(*(torch.from_numpy(np.asarray(x, np.float64)) for x in arrays))


def run(arrays, clip=GRPO, dual_clip=10.0, before=GRPO, config=EXACT):
    return calibrate(tokens_of(arrays), clip, dual_clip, before, config, alone)


def reference(arrays, clip, dual_clip=10.0):
    """α, L and H by sorting: the definitions of §8, with no histogram, no tensor and no bound but the tokens' own."""
    log8, log16, advantage, weight = (np.asarray(x, np.float64) for x in arrays)
    r8, r16 = np.exp(log8), np.exp(log16)
    mass = weight * np.abs(advantage)
    negative, positive = advantage < 0, advantage > 0
    alpha = np.count_nonzero(r16[negative] <= clip[0]) / np.count_nonzero(negative)
    k = round(alpha * np.count_nonzero(negative))
    ordered = np.sort(r8[negative])
    low = ordered[k]  # clips k tokens, however little below it
    if k == 0 or ordered[k - 1] <= clip[0] < ordered[k]:
        low = min(low, clip[0])

    def down(r, bound):
        return (mass * r)[negative & (r > bound) & (r <= dual_clip)].sum()

    target = down(r8, low * (1 - 1e-12)) * (mass * r16)[positive & (r16 <= clip[1])].sum() / down(r16, clip[0])
    order = np.argsort(r8[positive])
    kept = np.cumsum((mass * r8)[positive][order])
    fitting = np.searchsorted(kept, target * (1 + 1e-12), side="right")
    high = r8[positive][order][fitting] if fitting < len(kept) else math.inf
    return alpha, low, high


@pytest.mark.parametrize(
    ("noise", "naive", "low", "high"), [(0.1, 0.057, 0.73, 1.30), (0.2, 0.158, 0.61, 1.56)], ids=["0.1", "0.2"]
)
def test_the_synthetic_table(noise, naive, low, high):
    log8, log16, advantage, _ = arrays = synthetic(noise, 400_000)
    found = run(arrays)
    assert found.alpha_naive == pytest.approx(naive, abs=0.001) and found.alpha == pytest.approx(0.013, abs=0.0005)
    assert found.low == pytest.approx(low, abs=0.005) and found.high == pytest.approx(high, abs=0.01)
    negative = advantage < 0
    clipped = np.count_nonzero(np.exp(log8[negative]) <= found.low)
    assert clipped == np.count_nonzero(np.exp(log16[negative]) <= 0.8), "α is restored to the token"
    assert found.mass_ratio == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize("clip", [GRPO, DAPO, (0.7, 1.05)])
@pytest.mark.parametrize("noise", [0.0, 0.03, 0.25])
@pytest.mark.parametrize("n", [3_000, 60_000])
def test_against_sorting(clip, noise, n):
    log8, log16, advantage, weight = arrays = synthetic(noise, n, seed=n, weights=True)
    log8[::97] += 2.4  # some beyond the dual clip
    advantage[::31] = 0.0
    found = run(arrays, clip, config=msgspec.structs.replace(EXACT, low_min=0.1))
    alpha, low, high = reference(arrays, clip)
    assert (found.alpha, found.skipped) == (alpha, "")
    assert found.low == pytest.approx(low, rel=1e-9)
    assert found.high == pytest.approx(min(max(high, 1.0), EXACT.high_max), rel=1e-9)
    r8 = np.exp(log8)
    positive, negative = advantage > 0, advantage < 0
    up = (weight * advantage * r8)[positive & (r8 <= found.high)].sum()
    down = -(weight * advantage * r8)[negative & (r8 > found.low) & (r8 <= 10)].sum()
    r16 = np.exp(log16)
    up16 = (weight * advantage * r16)[positive & (r16 <= clip[1])].sum()
    down16 = -(weight * advantage * r16)[negative & (r16 > clip[0]) & (r16 <= 10)].sum()
    assert found.mass_ratio == pytest.approx(up / down / (up16 / down16), rel=1e-9)


def test_the_dual_clip_bounds_the_negative_mass():
    arrays = synthetic(0.1, 50_000)
    arrays[0][arrays[2] < 0] += np.where(np.arange(np.count_nonzero(arrays[2] < 0)) % 10, 0, 1.3)
    for dual_clip in (0.0, 3.0):
        found = run(arrays, dual_clip=dual_clip)
        _, low, high = reference(arrays, GRPO, dual_clip or math.inf)
        assert (found.low, found.high) == pytest.approx((low, min(high, EXACT.high_max)), rel=1e-9)
    assert run(arrays, dual_clip=0.0).high > run(arrays, dual_clip=3.0).high


@pytest.mark.parametrize("n", [40, 1000, 100_000])
@pytest.mark.parametrize("spread", [0.0, 0.01, 0.1, 0.5])
def test_without_noise_nothing_changes(n, spread):
    """However few the tokens, and where nothing at all is clipped."""
    rng = np.random.default_rng(n)
    log = rng.normal(0, spread, n)
    config = CalibrationConfig(period=1, min_tokens=1)
    found = run((log, log, rng.normal(size=n), np.ones(n)), DAPO, before=DAPO, config=config)
    assert not found.skipped and found.alpha == found.alpha_naive
    assert (found.low, found.high) == pytest.approx(DAPO, rel=1e-12) and found.mass_ratio == pytest.approx(1, rel=1e-9)


def test_smoothing_is_geometric_and_limits_hold():
    arrays = synthetic(0.1, 100_000)
    raw = run(arrays)
    for beta in (0.25, 0.5):
        found = run(arrays, before=(0.6, 1.8), config=msgspec.structs.replace(EXACT, smoothing=beta))
        assert found.low == pytest.approx(0.6**beta * raw.low ** (1 - beta), rel=1e-12)
        assert found.high == pytest.approx(1.8**beta * raw.high ** (1 - beta), rel=1e-12)
    arrays = synthetic(0.6, 100_000)
    narrow = msgspec.structs.replace(EXACT, low_min=0.6, high_max=20.0)
    found = run(arrays, config=narrow)
    assert found.low == pytest.approx(0.6, rel=1e-12) and found.mass_ratio == pytest.approx(1, abs=1e-3)
    capped = run(arrays, config=msgspec.structs.replace(narrow, high_max=1.3))
    assert capped.high == pytest.approx(1.3, rel=1e-12) and capped.mass_ratio < 0.95


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda a: a[2].__setitem__(slice(None), 1.0), r"2000 tokens with A > 0 and 0 with A < 0 are too few"),
        (lambda a: a[2].__setitem__(slice(511, None), -1.0), r"too few \(min_tokens = 512\)"),
        (lambda a: a[2].__setitem__(slice(None), 0.0), "0 tokens with A > 0 and 0 with A < 0"),
        (lambda a: a[3].__setitem__(slice(None), 0.0), "no mass"),
        (lambda a: a[3].__setitem__(a[2] < 0, 0.0), r"U− 0 in high precision"),
        (lambda a: a[1].__setitem__(a[2] < 0, -1.0), r"U− 0 in high precision"),
        (lambda a: a[1].__setitem__(a[2] > 0, 1.0), r"U\+ 0"),
    ],
    ids=["one sign", "too few", "no sign", "no weights", "no negative weights", "all negative clipped", "all positive"],
)
def test_a_degenerate_batch_is_skipped_with_a_reason(change, reason):
    arrays = synthetic(0.1, 2000)
    arrays[2][:] = np.where(np.arange(2000) < 511, 1.0, arrays[2])
    change(arrays)
    found = run(arrays, before=(0.71, 1.33))
    assert (found.low, found.high) == (0.71, 1.33)
    with pytest.raises(AssertionError, match=reason):
        assert not found.skipped, found.skipped
    empty = run([np.empty(0)] * 4, before=(0.71, 1.33))
    assert "too few" in empty.skipped and (empty.low, empty.high) == (0.71, 1.33)


def test_extreme_log_ratios_stay_finite():
    arrays = synthetic(0.1, 20_000)
    arrays[0][::50], arrays[1][::50] = 700.0, -700.0
    arrays[0][1::50], arrays[1][1::50] = -700.0, 700.0
    found = run(arrays)
    assert not found.skipped and all(math.isfinite(x) for x in found[:5])
    assert EXACT.low_min <= found.low <= 1 <= found.high <= EXACT.high_max


def test_largest_bound_on_edges_and_ties():
    """Log-ratios of exactly 0 and of exact bin edges, and beyond the range: S counts what is equal to the bound."""
    edge = 6 * 100 / 4096
    x = torch.tensor([-9.0, -0.5, 0.0, 0.0, 0.0, edge, edge + 1e-8, 5.0], dtype=torch.float64)
    inside = x.clamp(-3 + 1e-10, 3)
    counts = []
    for limit in range(9):
        bound, below = largest_bound(x, torch.ones_like(x), float(limit), alone)
        assert below == int((inside <= bound).sum())
        beyond = inside[inside > bound]
        assert 0 <= (float(beyond.min()) if len(beyond) else 3.0) - bound < 1e-9, "and no larger bound would do"
        counts.append(below)
    assert counts == [0, 1, 2, 2, 2, 5, 6, 7, 8]


def on_ranks(rank, groups, arrays):
    """The bounds from 1, 2 and 4 ranks that share the tokens unevenly; of two, the second has none."""
    shares = {1: [(0, 1)], 2: [(0, 1), (1, 1)], 4: [(0, 0.1), (0.1, 0.1), (0.1, 0.7), (0.7, 1)]}
    found = {}
    for ranks, parts in shares.items():
        if rank >= ranks:
            continue

        def add(x, group=groups[ranks]):
            dist.all_reduce(x, group=group)
            return x

        first, last = (int(end * len(arrays[0])) for end in parts[rank])
        mine = tokens_of([x[first:last] for x in arrays])
        found[ranks] = calibrate(mine, DAPO, 10.0, DAPO, CalibrationConfig(period=1), add)
    return found


def test_ranks_derive_identical_bounds():
    arrays = synthetic(0.1, 20_001, weights=True)
    results = sync_ranks.run(on_ranks, arrays)
    whole = results[0][1]
    assert whole.low < 0.79 and whole.high > 1.29 and whole[:5] != run(arrays, DAPO)[:5]
    for result in results:
        for ranks, found in result.items():
            assert found == results[0][ranks], "all ranks of a group agree to the last bit"
            assert (found.low, found.high, found.alpha) == (whole.low, whole.high, whole.alpha)
            assert found.mass_ratio == pytest.approx(whole.mass_ratio, rel=1e-12)


def test_the_loss_clips_with_calibrated_bounds():
    """The gradient is zero for exactly the tokens beyond the new bounds: α of the A<0 tokens, as BF16 would have it."""
    log8, log16, advantage, _ = arrays = synthetic(0.1, 20_000)
    found = run(arrays, DAPO)
    config = LossConfig(clip_low=1 - found.low, clip_high=found.high - 1)
    logp = torch.from_numpy(log8).requires_grad_()
    n, sequence = len(log8), torch.arange(len(log8))
    args = (torch.zeros(n, dtype=torch.float64), torch.from_numpy(advantage), torch.ones(n, dtype=torch.bool))
    policy_loss(logp, *args, torch.ones(n), sequence, torch.tensor(float(n)), config)[0].backward()
    assert logp.grad is not None
    silent = (logp.grad == 0).numpy()
    assert np.count_nonzero(silent & (advantage < 0)) == np.count_nonzero((advantage < 0) & (np.exp(log16) <= 0.8))
    assert (
        silent == ((advantage < 0) & (np.exp(log8) <= found.low)) | ((advantage > 0) & (np.exp(log8) > found.high))
    ).all()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"loss": {"objective": "gspo"}}, "for loss.objective = ppo, not gspo"),
        ({"correction": {"mode": "bypass", "importance": "none"}}, "correction.mode = decoupled or off"),
        ({"loss": {"clip_low": 0.7}}, r"clip_low and loss.clip_high give the bounds 0.3 and 1.2; .*0.4 \(low_min\)"),
        ({"loss": {"clip_high": 2.0}}, r"1 to 2.5 \(high_max\)"),
        ({"calibration": {"period": 5, "initial_low": 0.3}}, "initial_low and initial_high give the bounds 0.3"),
        ({"calibration": {"period": 5, "initial_high": 0.9}}, "give the bounds 0.8 and 0.9"),
        ({"calibration": {"period": 5, "low_min": 0.01}}, "low_min"),
        ({"calibration": {"period": 5, "smoothing": 1.0}}, "smoothing"),
    ],
)
def test_config_errors(fields, message):
    with pytest.raises(msgspec.ValidationError, match=message):
        msgspec.convert({"calibration": {"period": 5}} | fields, AlgoConfig)
    if "calibration" not in fields:
        msgspec.convert(fields, AlgoConfig)  # period 0: nothing to check


def test_initial_bounds():
    assert CalibrationConfig().initial(DAPO) == DAPO
    assert CalibrationConfig(initial_low=0.6, initial_high=1.8).initial(DAPO) == (0.6, 1.8)
