"""The process group of a run, and the few things that ranks tell each other outside the trainer."""

import os
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from config import ClusterConfig
from trainer.algo.parts import Max, Mean
from trainer.tally import Tally

COLLECTIVE_TIMEOUT = timedelta(minutes=60)  # longer than any rollout that one rank may wait for


class Ranks:
    """This rank among all of them. Reads the variables that torch elastic and torchrun set."""

    def __init__(self, config: ClusterConfig):
        """Joins the default process group: NCCL for CUDA tensors, gloo for CPU ones. `neighbours` counts the ranks of
        this machine."""
        self.rank, self.world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        local, self.neighbours = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
        kind = config.resolved_device()
        self.device = torch.device(kind, local) if kind == "cuda" else torch.device(kind)
        if kind == "cuda":
            torch.cuda.set_device(self.device)
        torch.set_num_threads(config.threads or max(1, (os.cpu_count() or 1) // self.neighbours))
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo",
            timeout=COLLECTIVE_TIMEOUT,
            device_id=self.device if kind == "cuda" else None,
        )

    @property
    def first(self) -> bool:
        return self.rank == 0

    def agree(self, ok: bool) -> bool:
        """True if every rank passes True."""
        vote = torch.tensor([int(ok)])
        dist.all_reduce(vote, dist.ReduceOp.MIN)
        return bool(vote.item())

    def first_problem(self, problem: str) -> str:
        """What the first rank with a problem says; "" if none has one."""
        if not self.largest(int(bool(problem))):
            return ""
        return self.gather(problem or None)[0]

    def largest(self, number: int) -> int:
        """The largest of all ranks' numbers."""
        box = torch.tensor([number])
        dist.all_reduce(box, dist.ReduceOp.MAX)
        return int(box.item())

    def share(self, value: Any) -> Any:
        """Rank 0's `value`, on every rank (pickled: for plain values of our own)."""
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def all(self, value: Any) -> list[Any]:
        """Every rank's `value`, on every rank, in rank order (pickled, as in `share`)."""
        values = [None] * self.world
        dist.all_gather_object(values, value)
        return values

    def gather(self, text: str | None) -> list[str]:
        """What ranks have to say, on every rank, in rank order; None is silence."""
        texts = self.all(text)
        return [f"rank {rank}: {text}" if self.world > 1 else text for rank, text in enumerate(texts) if text]

    def combine(
        self,
        means: Mapping[str, tuple[float, float]],
        totals: Mapping[str, float],
        peaks: Mapping[str, float],
    ) -> dict[str, float]:
        """Metrics over all ranks: `means` are (numerator, denominator), `totals` are added up, `peaks` maximised."""

        def scalar(x: float) -> torch.Tensor:
            return torch.tensor(x, dtype=torch.float64)

        tally = Tally("cpu")
        tally.add({name: Mean(scalar(a), scalar(b)) for name, (a, b) in means.items()})
        tally.add({name: Mean(scalar(x * self.world), scalar(1)) for name, x in totals.items()})
        tally.add({name: Max(scalar(x)) for name, x in peaks.items()})
        return tally.result()
