"""What a metric looks like before it is a number: a numerator and a denominator, or a maximum.

A mean over a batch cannot be averaged from the means of its micro-batches and ranks, so the functions of this room
return parts, `trainer.tally.Tally` adds them up, and only the sums are divided. Every function returns the same names
whatever its data, also for no tokens at all: ranks with an empty micro-batch then still agree on what they add up.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Mean(NamedTuple):
    """The mean num / den. Example: 3 of 12 tokens clipped is Mean(3.0, 12.0). Both f64 scalars, detached."""

    num: Tensor
    den: Tensor


class Max(NamedTuple):
    """The maximum of a quantity that is never negative (0 where there is none). f64 scalar, detached."""

    value: Tensor


Parts = dict[str, Mean | Max]


def masked_mean(x: Tensor, mask: Tensor) -> Mean:
    """Mean of `x` (any float or bool dtype) over the elements where `mask` (bool, same shape) is True."""
    kept = torch.where(mask, x.detach().double(), 0.0)
    return Mean(kept.sum(), mask.sum().double())


def masked_max(x: Tensor, mask: Tensor) -> Max:
    """Maximum of the non-negative `x` over the elements where `mask` is True; 0 if there are none."""
    kept = torch.where(mask, x.detach().double(), 0.0)
    return Max(torch.cat([kept.reshape(-1), kept.new_zeros(1)]).max())


# (mean, mean square, name and rule of what they give): the squares exist only for this and do not reach the records.
_SPREADS = (
    ("trainer/mismatch_rho_mean", "trainer/mismatch_rho_square", "trainer/mismatch_ess", "ess"),
    ("trainer/correction_weight_mean", "trainer/correction_weight_square", "trainer/correction_ess", "ess"),
    ("trainer/advantage_mean", "trainer/advantage_square", "trainer/advantage_std", "std"),
)


def finish(stats: dict[str, float]) -> dict[str, float]:
    """Replaces the mean squares in `stats`, already global, by what is made of them; other entries stay.

    ESS = 1 / E[(w/w̄)²] = w̄² / E[w²], a fraction in [0, 1] of the tokens (0 if there are none); std is E[x²] − x̄²,
    square root taken.
    """
    stats = dict(stats)
    for mean_name, square_name, name, rule in _SPREADS:
        if square_name in stats:
            mean, square = stats[mean_name], stats.pop(square_name)
            if rule == "ess":
                stats[name] = mean * mean / square if square > 0 else 0.0
            else:
                stats[name] = max(square - mean * mean, 0.0) ** 0.5
    return stats
