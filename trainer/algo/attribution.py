"""How much of the mismatch between trainer and engine each difference between them makes, with confidence intervals.

The same sampled tokens are evaluated in several ways ("arms"), each a float64 estimate of KL(π_roll || π_arm) by
k3 = E[ρ − 1 − ℓ] (ALGORITHMS §5): never negative, and of small variance near 1. A source's part is the difference of
two arms, so most of the sampling noise cancels. Intervals are percentile bootstraps that draw whole groups (the samples
of one prompt are not independent), the same groups for all arms; the number of tokens varies with them.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

LIMIT = 20.0  # of log-ratios, as in trainer/algo/packed.py


class Interval(NamedTuple):
    """An estimate, in nats, with the limits of its confidence interval."""

    value: float
    low: float
    high: float


def group_sums(arms_AT: NDArray, roll_T: NDArray, sampled_T: NDArray, group_T: NDArray) -> NDArray:
    """f64[G, 1 + A] of G groups and A arms: sampled tokens, then the sum over them of ρ − 1 − ℓ for every arm.

    `arms_AT` and `roll_T` are float log-probs, `group_T` the group of every token, numbered from 0 without gaps.
    Raises ValueError naming the group of a sampled token whose log-prob is not finite.
    """
    sampled = np.flatnonzero(sampled_T)
    ell_AS = arms_AT[:, sampled].astype(np.float64) - roll_T[sampled].astype(np.float64)
    group_S = group_T[sampled]
    if not np.isfinite(ell_AS).all():
        raise ValueError(f"a log-prob of group {group_S[~np.isfinite(ell_AS).all(0)][0]} is not finite")
    ell_AS = ell_AS.clip(-LIMIT, LIMIT)
    k3_AS = np.expm1(ell_AS) - ell_AS
    n_groups = int(group_T.max(initial=-1)) + 1
    columns = [np.ones(len(sampled)), *k3_AS]
    return np.stack([np.bincount(group_S, column, n_groups) for column in columns], axis=1)


class Bootstrap:
    """KL estimates of arms and of their differences, from the `group_sums` of all ranks."""

    def __init__(self, sums_GA: NDArray, confidence: float, resamples: int, seed: int) -> None:
        """Raises ValueError for fewer than two groups with sampled tokens: nothing is known of their spread."""
        sums_GA = sums_GA[sums_GA[:, 0] > 0]
        n = len(sums_GA)
        if n < 2:
            raise ValueError(f"{n} groups of samples have tokens; an interval needs at least 2")
        self.groups, self.tokens = n, int(sums_GA[:, 0].sum())
        self.tail = (1 - confidence) / 2
        self.mean_A = sums_GA[:, 1:].sum(0) / sums_GA[:, 0].sum()
        drawn_BG = np.random.default_rng(seed).multinomial(n, np.full(n, 1 / n), size=resamples)
        drawn_BA = drawn_BG @ sums_GA
        self.means_BA = drawn_BA[:, 1:] / drawn_BA[:, :1]

    def kl(self, arm: int) -> Interval:
        """KL(π_roll || π_arm)."""
        return self._interval(self.mean_A[arm], self.means_BA[:, arm])

    def difference(self, arm: int, base: int) -> Interval:
        """KL of `arm` less that of `base`, on the same tokens."""
        return self._interval(self.mean_A[arm] - self.mean_A[base], self.means_BA[:, arm] - self.means_BA[:, base])

    def _interval(self, value: float, values_B: NDArray) -> Interval:
        low, high = np.quantile(values_B, [self.tail, 1 - self.tail])
        return Interval(float(value), float(low), float(high))
