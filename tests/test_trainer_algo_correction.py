"""Rollout correction and mismatch metrics against scalar Python written per sequence."""

import math
from itertools import combinations

import msgspec
import pytest
import torch

from trainer.algo import AlgoConfig
from trainer.algo.correction import CorrectionConfig, check_finite, correct, normalized
from trainer.algo.mismatch import mismatch
from trainer.tally import Tally

LENGTHS = [6, 1, 9, 4, 5, 7, 3]
QUIET = {
    1: 0.002,
    2: 0.03,
    3: 0.0005,
}  # log-ratio spread of some sequences, so that every rule keeps some and drops some
N = len(LENGTHS)


def random_pair(seed=0, spread=0.7):
    """old, roll in f32 with NaN outside the mask; mask; sequence ids. The last sequence has no token that counts."""
    g = torch.Generator().manual_seed(seed)
    t = sum(LENGTHS)
    sequence = torch.repeat_interleave(torch.arange(N), torch.tensor(LENGTHS))
    scale = torch.tensor([QUIET.get(int(s), spread) for s in sequence])
    roll = -3 * torch.rand(t, generator=g) - 0.1
    old = roll + scale * torch.randn(t, generator=g)
    mask = (torch.rand(t, generator=g) < 0.75) & (sequence != N - 1)
    mask[6] = True  # the sequence of one token
    old[~mask], roll[~mask] = math.nan, -math.inf
    return old, roll, mask, sequence


def sequences(old, roll, mask, sequence):
    """[[(log old, log roll), …], …] as Python floats, masked tokens only."""
    return [
        [(float(old[t]), float(roll[t])) for t in range(len(old)) if mask[t] and sequence[t] == i] for i in range(N)
    ]


def measure(parts):
    tally = Tally("cpu")
    tally.add(parts)
    return tally.result()


def mean(values):
    values = list(values)
    return sum(values) / len(values) if values else 0.0


def reference(pairs, config):
    """Per sequence: weight of each token (None where it left the loss); how many were capped, taken out; rejected."""
    low, high = config.bounds
    weights, capped, out, rejected = [], 0, 0, 0
    for tokens in pairs:
        ells = [a - b for a, b in tokens]
        rhos = [math.exp(x) for x in ells]
        row = []
        for rho in rhos:
            total = math.exp(math.fsum(ells))
            if config.importance == "none":
                row.append(1.0)
            elif config.importance == "token_tis":
                row.append(min(rho, high))
                capped += rho > high
            elif config.importance == "sequence_tis":
                row.append(min(total, high))
                capped += total > high
            else:
                inside = low <= rho <= high
                out += not inside
                row.append(rho if inside else (None if config.importance == "mis" else 0.0))
        drop = False
        if tokens:
            if "geometric" in config.rejection:
                drop |= not config.geometric_low <= math.prod(rhos) ** (1 / len(rhos)) <= config.geometric_high
            if "seq_mean_k3" in config.rejection:
                drop |= mean(r - 1 - math.log(r) for r in rhos) > config.seq_mean_k3_max
            if "seq_max_k2" in config.rejection:
                drop |= max(x * x / 2 for x in ells) > config.seq_max_k2_max
            drop |= min(rhos) < config.veto
        rejected += drop
        weights.append([None] * len(row) if drop else row)
    return weights, capped, out, rejected


RULES = ("geometric", "seq_mean_k3", "seq_max_k2")
REJECTIONS = [c for k in range(4) for c in combinations(RULES, k)]


@pytest.mark.parametrize("importance", ["none", "token_tis", "sequence_tis", "mis", "icepop"])
@pytest.mark.parametrize("rejection", REJECTIONS, ids="+".join)
@pytest.mark.parametrize("veto", [0.0, 0.4])
def test_correction_against_reference(importance, rejection, veto):
    kept_sizes = set()
    for seed in range(3):
        batch = random_pair(seed)
        config = CorrectionConfig(
            importance=importance, rejection=rejection, veto=veto, seq_max_k2_max=0.3,
            high=None if importance == "none" else 1.5, low=0.7 if importance in ("mis", "icepop") else None,
        )  # fmt: skip
        result = correct(*batch, N, config)
        weights, capped, out, rejected = reference(sequences(*batch), config)

        flat = iter([w for row in weights for w in row])
        for t in range(len(batch[0])):
            w = next(flat) if batch[2][t] else None
            assert bool(result.keep_T[t]) == (w is not None)
            assert result.weight_T[t].item() == pytest.approx(w or 0.0, rel=1e-6)
        kept = [w for row in weights for w in row if w is not None]
        kept_sizes.add(len(kept))
        tokens, filled = int(batch[2].sum()), sum(1 for row in weights if row)
        stats = measure(result.parts)
        assert stats["trainer/correction_truncated_frac"] == pytest.approx(capped / tokens)
        assert stats["trainer/correction_masked_frac"] == pytest.approx(out / tokens)
        assert stats["trainer/correction_rejected_seq_frac"] == pytest.approx(rejected / filled)
        assert stats["trainer/correction_weight_mean"] == pytest.approx(mean(kept), rel=1e-6)
        ess = mean(kept) ** 2 / mean(w * w for w in kept) if any(kept) else 0.0
        assert stats["trainer/correction_ess"] == pytest.approx(ess, rel=1e-6)
        assert result.totals.tolist() == pytest.approx([sum(kept), len(kept)], rel=1e-6)
        assert result.weight_T.dtype == torch.float32
        assert rejected < filled or len(rejection) > 1
        assert rejected > 0 or not (rejection or veto)
    assert len(kept_sizes) > 1


def test_default_bounds():
    bounds = {name: CorrectionConfig(importance=name).bounds for name in ("token_tis", "sequence_tis", "mis", "icepop")}
    assert bounds == {"token_tis": (0, 2), "sequence_tis": (0, 5), "mis": (0.5, 2), "icepop": (0.5, 5)}


@pytest.mark.parametrize("config", [CorrectionConfig(mode="off", veto=0.5, rejection=RULES),
                                    CorrectionConfig(mode="bypass", importance="none")])  # fmt: skip
def test_off_and_bypass_change_nothing(config):
    old, roll, mask, sequence = random_pair()
    if config.mode == "bypass":
        old = roll
    result = correct(old, roll, mask, sequence, N, config)
    assert torch.equal(result.keep_T, mask) and torch.equal(result.weight_T, mask.float())


@pytest.mark.parametrize("importance", ["token_tis", "sequence_tis", "mis", "icepop"])
def test_normalized_weights_have_mean_one_over_all_micro_batches(importance):
    config = CorrectionConfig(importance=importance, normalize=True)
    results = [correct(*random_pair(seed), N, config) for seed in (0, 1)]
    totals = results[0].totals + results[1].totals
    kept = torch.cat([normalized(r, totals).weight_T[r.keep_T] for r in results])
    assert kept.mean().item() == pytest.approx(1.0, rel=1e-6)
    raw = torch.cat([r.weight_T[r.keep_T] for r in results])
    torch.testing.assert_close(kept, raw / raw.mean())
    empty = normalized(results[0], torch.zeros(2))
    assert torch.equal(empty.weight_T, results[0].weight_T)


def test_weights_are_constants():
    old, roll, mask, sequence = random_pair()
    result = correct(old.requires_grad_(), roll.requires_grad_(), mask, sequence, N, CorrectionConfig())
    assert not result.weight_T.requires_grad and not result.totals.requires_grad


@pytest.mark.parametrize("whose", ["trainer", "rollout"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_non_finite_log_prob_names_the_sample(whose, value):
    batch = random_pair()
    t = 10  # the fourth token of the third sequence
    batch[2][t] = True
    batch[0][t] = batch[1][t] = -1.0
    batch[0 if whose == "trainer" else 1][t] = value
    names = range(40, 40 + N)
    check_finite("other", batch[1 if whose == "trainer" else 0], *batch[2:], names)
    with pytest.raises(ValueError, match=rf"sample 42 of the batch .* non-finite {whose} log-prob .* token 3"):
        check_finite(whose, batch[0 if whose == "trainer" else 1], *batch[2:], names)


@pytest.mark.parametrize("gap", [-1e30, -50.0, 50.0, 1e30])
@pytest.mark.parametrize("importance", ["none", "token_tis", "sequence_tis", "mis", "icepop"])
def test_huge_finite_gaps_stay_finite(gap, importance):
    old, roll, mask, sequence = torch.full((4,), gap), torch.zeros(4), torch.ones(4).bool(), torch.tensor([0, 0, 1, 2])
    result = correct(old, roll, mask, sequence, 3, CorrectionConfig(importance=importance, rejection=RULES))
    assert not result.keep_T.any() and result.weight_T.isfinite().all()
    kept = correct(old, roll, mask, sequence, 3, CorrectionConfig(importance=importance))
    assert kept.weight_T.isfinite().all()
    stats = measure(result.parts | mismatch(old.clamp(max=0), roll, mask, sequence, 3))
    assert all(math.isfinite(v) for v in stats.values())


@pytest.mark.parametrize("tokens", [0, 3])
def test_no_tokens(tokens):
    x, mask = torch.full((tokens,), math.nan), torch.zeros(tokens, dtype=torch.bool)
    sequence = torch.zeros(tokens, dtype=torch.int64)
    result = correct(x, x, mask, sequence, 1, CorrectionConfig(rejection=RULES, veto=0.1))
    assert result.weight_T.sum() == 0 and not result.keep_T.any() and result.totals.tolist() == [0, 0]
    stats = measure(result.parts | mismatch(x, x, mask, sequence, 1))
    assert len(stats) == 16 and all(v == 0 for v in stats.values())
    assert normalized(result, result.totals).weight_T.isfinite().all()


def test_mismatch_against_reference():
    batch = random_pair(4)
    pairs = [row for row in sequences(*batch) if row]
    tokens = [pair for row in pairs for pair in row]
    rhos = [math.exp(a - b) for a, b in tokens]
    sums = [math.fsum(a - b for a, b in row) for row in pairs]
    moved = [abs(math.exp(a) - math.exp(b)) for a, b in tokens]
    expected = {
        "mismatch_k1": mean(b - a for a, b in tokens),
        "mismatch_k3": mean(r - 1 - math.log(r) for r in rhos),
        "mismatch_abs_p_mean": mean(moved),
        "mismatch_abs_p_max": max(moved),
        "mismatch_ppl_ratio": mean(
            math.exp(-mean(a for a, _ in row)) / math.exp(-mean(b for _, b in row)) for row in pairs
        ),
        "mismatch_chi2_token": mean(r * r for r in rhos) - 1,
        "mismatch_chi2_seq": mean(math.exp(s) ** 2 for s in sums) - 1,
        "mismatch_prob_error": mean(max(r, 1 / r) for r in rhos),
        "mismatch_outside_frac": mean(not 0.5 <= r <= 2 for r in rhos),
        "mismatch_rho_mean": mean(rhos),
        "mismatch_ess": 1 / mean((r / mean(rhos)) ** 2 for r in rhos),
    }
    assert 0 < expected["mismatch_outside_frac"] < 1
    stats = measure(mismatch(*batch, N))
    assert stats == pytest.approx({f"trainer/{name}": value for name, value in expected.items()}, rel=1e-9)


def test_tiny_mismatch_keeps_its_digits():
    roll = torch.full((1000,), -1.0)
    old = roll + 1e-4 * torch.tensor([1.0, -1.0]).repeat(500)
    stats = measure(mismatch(old, roll, torch.ones(1000).bool(), torch.zeros(1000, dtype=torch.int64), 1))
    ell = (old.double() - roll.double())[0].item()
    assert stats["trainer/mismatch_k3"] == pytest.approx(ell**2 / 2, rel=1e-3)
    assert stats["trainer/mismatch_chi2_token"] == pytest.approx(2 * ell**2, rel=1e-3)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"mode": "bypass"}, "bypass has no weights"),
        ({"mode": "bypass", "importance": "none", "veto": 1e-4}, "bypass has no weights"),
        ({"mode": "bypass", "importance": "none", "rejection": ["geometric"]}, "bypass has no weights"),
        ({"low": 0.5}, "low is for importance mis and icepop, not token_tis"),
        ({"importance": "none", "high": 2.0}, "high and normalize need"),
        ({"importance": "none", "normalize": True}, "high and normalize need"),
        ({"importance": "mis", "low": 3.0}, "low 3.0 must be at least 0 and below high 2.0"),
        ({"importance": "mis", "low": -1.0}, "low -1.0"),
        ({"high": 0.0}, "high 0.0"),
        ({"high": math.nan}, "high nan"),
        ({"high": math.inf}, "high inf"),
        ({"rejection": ["nope"]}, "nope"),
        ({"rejection": "geometric"}, "Expected `array`"),
        ({"geometric_low": 1.1}, "geometric_low"),
        ({"geometric_high": 0.9}, "geometric_high"),
        ({"seq_mean_k3_max": 0.0}, "seq_mean_k3_max"),
        ({"seq_max_k2_max": 0.0}, "seq_max_k2_max"),
        ({"veto": 1.0}, "veto"),
        ({"mode": "on"}, "mode"),
    ],
)
def test_config_errors(fields, message):
    with pytest.raises(msgspec.ValidationError, match=message):
        msgspec.convert({"correction": fields}, AlgoConfig)
