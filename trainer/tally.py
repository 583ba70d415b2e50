"""Adds up metrics over micro-batches and ranks.

`add` stays on the device and never waits for it; `result` does one all-reduce of sums, one of maxima. Ranks must have
added the same names, which the functions of trainer.algo guarantee even for an empty micro-batch; since an all-reduce
over different names would mix up metrics or hang, `result` proves it with a checksum that travels with the maxima.
"""

import zlib

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.algo.parts import Max, Mean, Parts, finish

MAXIMA_CAPACITY = 32  # a fixed size, so that ranks that disagree on their names can still meet in one all-reduce


class Tally:
    """Usage: `tally.add(parts)` per micro-batch, `stats |= tally.result(group)` once per step."""

    def __init__(self, device: torch.device | str) -> None:
        self.device = torch.device(device)
        self._means: dict[str, Tensor] = {}  # name -> f64[2], numerator and denominator
        self._maxima: dict[str, Tensor] = {}  # name -> f64 scalar

    def add(self, parts: Parts) -> None:
        """Adds numerators and denominators, keeps the larger maximum. Means and maxima must not share a name."""
        for name, part in parts.items():
            if isinstance(part, Mean):
                assert name not in self._maxima, name
                pair = torch.stack([part.num, part.den]).detach().to(self.device, torch.float64)
                self._means[name] = self._means[name] + pair if name in self._means else pair
            else:
                assert isinstance(part, Max) and name not in self._means, name
                value = part.value.detach().to(self.device, torch.float64)
                self._maxima[name] = torch.maximum(self._maxima[name], value) if name in self._maxima else value

    def result(self, group: dist.ProcessGroup | None = None) -> dict[str, float]:
        """All metrics, sorted by name, over all micro-batches and the ranks of `group` (None: the default group).

        A mean over nothing is 0. Waits for the device. Raises RuntimeError on every rank if they added different names.
        """
        mean_names, max_names = sorted(self._means), sorted(self._maxima)
        sums = torch.stack([self._means[name] for name in mean_names] or [torch.zeros(2)]).to(
            self.device, torch.float64
        )
        assert len(max_names) <= MAXIMA_CAPACITY, "raise MAXIMA_CAPACITY"
        maxima = torch.zeros(MAXIMA_CAPACITY + 2, dtype=torch.float64, device=self.device)
        for i, name in enumerate(max_names):
            maxima[i] = self._maxima[name]
        if dist.is_available() and dist.is_initialized():
            names = " ".join([*mean_names, "|", *max_names])
            checksum = zlib.crc32(names.encode())
            # The largest of x and of −x agree only if all ranks have the same x.
            maxima[-2], maxima[-1] = checksum, -checksum
            dist.all_reduce(maxima, dist.ReduceOp.MAX, group)
            if maxima[-2] != -maxima[-1]:
                raise RuntimeError(f"ranks measured different metrics; this rank has: {names}")
            dist.all_reduce(sums, dist.ReduceOp.SUM, group)
        values = {name: num / den if den else 0.0 for name, (num, den) in zip(mean_names, sums.tolist())}
        values |= dict(zip(max_names, maxima.tolist()))
        return dict(sorted(finish(values).items()))
