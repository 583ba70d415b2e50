"""Calibrated clipping (ALGORITHMS §8): clip bounds under which FP8 ratios clip what precise ratios would have clipped.

r = π_θ/π_old of a sampled token, once from FP8 forwards (r8) and once from high-precision ones (r16). FP8 noise widens
r8: with a fixed bound 1 − ε_lo, many bad tokens (A < 0) whose r16 is within it lose their gradient, go unpunished, and
entropy surges mid-run; rollout correction does not see it, since both log-probs are the trainer's.

    α       fraction of A<0 tokens with r16 <= 1 − ε_lo
    L       r8 <= L on exactly floor(α·n_neg) of the same tokens
    U+(r;H) = Σ_{A>0} w·A·r·1[r <= H]          U−(r;L) = Σ_{A<0} w·|A|·r·1[L < r <= c]       c = dual_clip
    H       largest with U+(r8;H) <= U−(r8;L) · U+(r16;1+ε_hi) / U−(r16;1−ε_lo)

L stays in [low_min, 1], H in [1, high_max]; U−(r8;L) is taken at the L within these limits. Then log L and log H are
averaged with those before, which have the weight `smoothing`. arXiv 2609.22870; the rule is known second-hand, so this
is a reconstruction. Two things it leaves open: of all bounds between two tokens, which clip the same, 1 − ε_lo or
1 + ε_hi is taken where it is among them (so r8 = r16 changes nothing), else the largest; a batch without mass of a sign
is skipped.

Quantiles come from histograms of log r (4096 bins on [−3, 3]) that are summed over ranks, so every rank derives the
same bounds from the same sums. A bin of the first histogram holds a few tokens, so the bin that holds the answer is
divided twice more: L then clips floor(α·n_neg) to the token. `add` sums a tensor over ranks: the one thing of this
room that is passed in as a function, since what to ask for next depends on it.
Shape letters: see packed.py.
"""

import math
from collections.abc import Callable
from typing import Annotated, NamedTuple

import msgspec
import torch
from torch import Tensor

from sync.fields import doc
from trainer.algo.packed import ratio

BINS, LOG_RANGE, LEVELS = 4096, 3.0, 3  # the last level's bins are 9e-11 wide: finer than any f32 log-ratio
ROUNDING = 1e-9  # relative; sums of the same masses in another order differ by less, single tokens count for more

Add = Callable[[Tensor], Tensor]


class CalibrationConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    period: Annotated[
        int,
        doc("Steps between calibrations; needs trainer.updates_per_rollout >= 2; 0: off (published: 20).",
            unit="steps", ge=0),
    ] = 0  # fmt: skip
    smoothing: Annotated[float, doc("β: weight of the bounds before, in log space; 0: none.", ge=0, lt=1)] = 0.5
    low_min: Annotated[float, doc("L_min: the lower bound of the ratio never falls below this.", ge=0.05, le=1)] = 0.4
    high_max: Annotated[float, doc("H_max: the upper bound of the ratio never exceeds this.", ge=1, le=20)] = 2.5
    initial_low: Annotated[
        float | None, doc("L before the first calibration; null: 1 − algo.loss.clip_low (published: 0.6).")
    ] = None
    initial_high: Annotated[
        float | None, doc("H before the first calibration; null: 1 + algo.loss.clip_high (published: 1.8).")
    ] = None
    min_tokens: Annotated[
        int, doc("Fewer tokens than this of either sign of the advantage: no calibration.", unit="tokens", ge=1)
    ] = 512

    def initial(self, clip: tuple[float, float]) -> tuple[float, float]:
        """(L, H) before the first calibration, where `clip` is (1 − ε_lo, 1 + ε_hi)."""
        low, high = clip
        return (low if self.initial_low is None else self.initial_low), (
            high if self.initial_high is None else self.initial_high
        )

    def check(self, clip: tuple[float, float]) -> None:
        """Raises ValueError if the configured or the initial bounds are outside the limits."""
        names = ("loss.clip_low and loss.clip_high", "calibration.initial_low and initial_high")
        for name, (low, high) in zip(names, (clip, self.initial(clip))):
            if not (self.low_min <= low <= 1 <= high <= self.high_max):
                raise ValueError(
                    f"{name} give the bounds {low:g} and {high:g}; calibration allows {self.low_min:g} (low_min) to 1, "
                    f"and 1 to {self.high_max:g} (high_max)"
                )


class ClipTokens(NamedTuple):
    """The tokens of a mini-batch that its loss keeps; A = 0 counts for nothing. All f64[T], on one device."""

    log_r8_T: Tensor
    log_r16_T: Tensor
    advantage_T: Tensor
    weight_T: Tensor  # w, the rollout correction's


class Calibration(NamedTuple):
    """What a calibration found. If `skipped`, a reason, is not empty, the other fields are those of before or 0."""

    low: float  # L, to be used from now on
    high: float  # H
    alpha: float = 0.0  # α, the fraction of A<0 tokens clipped in high precision
    alpha_naive: float = 0.0  # the fraction that the configured bound clips in FP8
    mass_ratio: float = 0.0  # U+(r8;H) / U−(r8;L) over U+(r16;1+ε_hi) / U−(r16;1−ε_lo), with the new L and H; ideal: 1
    skipped: str = ""


class _Sums(NamedTuple):
    """Over the tokens of all ranks, at the configured bounds."""

    n_pos: float  # tokens with A > 0
    n_neg: float  # and with A < 0
    clipped16: float  # of the latter, those with r16 <= 1 − ε_lo
    clipped8: float  # and with r8 <= 1 − ε_lo
    up16: float  # U+(r16; 1+ε_hi)
    down16: float  # U−(r16; 1−ε_lo)
    up8: float  # U+(r8; 1+ε_hi)


def calibrate(
    tokens: ClipTokens,
    clip: tuple[float, float],
    dual_clip: float,
    before: tuple[float, float],
    config: CalibrationConfig,
    add: Add,
) -> Calibration:
    """New bounds from the tokens of all ranks; the same on every rank.

    `clip`: (1 − ε_lo, 1 + ε_hi) as configured; `dual_clip`: c, 0 for none; `before`: (L, H) in use; `add`: sums an f64
    tensor over ranks, every one of which must call this. Log-ratios must be finite.
    """
    log_clip = math.log(clip[0]), math.log(clip[1])
    log_c = math.log(dual_clip) if dual_clip else math.inf
    sums = _sums(tokens, log_clip, log_c, add)
    if min(sums.n_pos, sums.n_neg) < config.min_tokens:
        few = f"{sums.n_pos:.0f} tokens with A > 0 and {sums.n_neg:.0f} with A < 0 are too few"
        return Calibration(*before, skipped=f"{few} (min_tokens = {config.min_tokens})")

    positive_T, negative_T = tokens.advantage_T > 0, tokens.advantage_T < 0
    mass_T = _mass(tokens, tokens.log_r8_T)
    up = tokens.log_r8_T[positive_T], mass_T[positive_T]
    down = tokens.log_r8_T[negative_T], mass_T[negative_T]

    def down8(log_l: float) -> float:
        return add(torch.where((down[0] > log_l) & (down[0] <= log_c), down[1], 0.0).sum()).item()

    log_l, clipped = largest_bound(down[0], torch.ones_like(down[1]), sums.clipped16, add)
    if clipped == sums.clipped8:
        log_l = log_clip[0]
    log_l = min(max(log_l, math.log(config.low_min)), 0.0)
    mass = down8(log_l)
    if not (sums.up16 > 0 and sums.down16 > 0 and mass > 0):
        masses = f"U+ {sums.up16:g}, U− {sums.down16:g} in high precision, U− {mass:g} in FP8"
        return Calibration(*before, skipped=f"a sign has no mass within its bounds ({masses})")
    log_h, kept = largest_bound(*up, sums.up16 * (mass / sums.down16), add)
    if abs(kept - sums.up8) <= ROUNDING * sums.up8:
        log_h = log_clip[1]
    log_h = min(max(log_h, 0.0), math.log(config.high_max))

    beta = config.smoothing
    log_l, log_h = (beta * math.log(old) + (1 - beta) * new for old, new in zip(before, (log_l, log_h)))
    mass, kept = down8(log_l), add(torch.where(up[0] <= log_h, up[1], 0.0).sum()).item()
    return Calibration(
        math.exp(log_l), math.exp(log_h), sums.clipped16 / sums.n_neg, sums.clipped8 / sums.n_neg,
        kept / mass / (sums.up16 / sums.down16) if mass else 0.0,
    )  # fmt: skip


def _mass(tokens: ClipTokens, log_r_T: Tensor) -> Tensor:
    """w·|A|·r, f64[T]."""
    return (tokens.weight_T * tokens.advantage_T).abs() * ratio(log_r_T)


def _sums(tokens: ClipTokens, log_clip: tuple[float, float], log_c: float, add: Add) -> _Sums:
    positive_T, negative_T = tokens.advantage_T > 0, tokens.advantage_T < 0
    low_T = tokens.log_r16_T <= log_clip[0]
    mass8_T, mass16_T = _mass(tokens, tokens.log_r8_T), _mass(tokens, tokens.log_r16_T)
    terms = [
        positive_T,
        negative_T,
        negative_T & low_T,
        negative_T & (tokens.log_r8_T <= log_clip[0]),
        torch.where(positive_T & (tokens.log_r16_T <= log_clip[1]), mass16_T, 0.0),
        torch.where(negative_T & ~low_T & (tokens.log_r16_T <= log_c), mass16_T, 0.0),
        torch.where(positive_T & (tokens.log_r8_T <= log_clip[1]), mass8_T, 0.0),
    ]
    return _Sums(*add(torch.stack([term_T.double().sum() for term_T in terms])).tolist())


def largest_bound(log_r_T: Tensor, mass_T: Tensor, limit: float, add: Add) -> tuple[float, float]:
    """(b, S(b)): the largest b in [−LOG_RANGE, LOG_RANGE], to the finest bin, with S(b) <= `limit`. S(b) is the sum of
    `mass_T` (f64, >= 0) over the tokens of all ranks with `log_r_T` (f64) <= b.

    Log-ratios beyond the range count as its ends. Bins are open below and closed above, as S is.
    """
    limit += ROUNDING * abs(limit)
    log_r_T = log_r_T.clamp(-LOG_RANGE + 1e-12, LOG_RANGE)  # inside the first bin of every level
    start, below, width = -LOG_RANGE, 0.0, 2 * LOG_RANGE
    for _ in range(LEVELS):
        width /= BINS  # 6 / 4096^n: a dyadic number, like every edge; no edge is ever rounded
        bin_T = ((log_r_T - start) / width).ceil() - 1
        inside_T = (bin_T >= 0) & (bin_T < BINS)
        histogram = torch.bincount(bin_T[inside_T].long(), mass_T[inside_T], minlength=BINS)  # i64 for no token
        edges = below + add(histogram.double()).cumsum(0)  # S at the upper edge of every bin
        count = int((edges <= limit).sum())
        start += count * width
        below = edges[count - 1].item() if count else below
        if count == BINS:  # only at the first level, but for rounding: everything is within the limit
            break
    return start, below
