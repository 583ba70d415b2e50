"""Measured memory of each phase.

On a GPU: what its driver counts, so the rank, its engine, their contexts and caches together. On a CPU: the resident
sets of the rank and of its engine's processes, in which pages that both map count twice.
"""

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

_MB = 1e6
_PROC = Path("/proc")


class Ledger:
    """Keeps, until it is asked, the most that each phase had in use and the least that it left free."""

    def __init__(self, device: torch.device, engine_pid: Callable[[], int | None]) -> None:
        """`engine_pid` gives the root of the engine's processes, None where there are none."""
        self._device, self._engine_pid = device, engine_pid
        self._peaks: dict[str, float] = {}

    def measure(self, phase: str) -> None:
        """Reads the counters at the end of `phase`; below 5 ms."""
        if self._device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self._device)
            self._raise(f"memory/{phase}_mb", (total - free) / _MB)
            self._raise(f"memory/{phase}_free_mb", -free / _MB)  # the least free is the largest negative
        else:
            self._raise(f"memory/{phase}_mb", resident_bytes(os.getpid(), self._engine_pid()) / _MB)

    def take(self, largest: Callable[[dict[str, float]], dict[str, float]]) -> dict[str, float]:
        """All ranks: `memory/…` metrics since the last call. `largest` maximises each number over all ranks."""
        peaks, self._peaks = largest(self._peaks), {}
        return {name: -value if name.endswith("_free_mb") else value for name, value in peaks.items()}

    def _raise(self, name: str, value: float) -> None:
        self._peaks[name] = max(value, self._peaks.get(name, value))


def resident_bytes(pid: int, engine_pid: int | None) -> int:
    """Resident set [bytes] of process `pid` alone and of `engine_pid` with all its descendants."""
    pids = [pid] if engine_pid is None else [pid, engine_pid, *_descendants(engine_pid)]
    return sum(map(_resident_pages, pids)) * os.sysconf("SC_PAGE_SIZE")


def _resident_pages(pid: int) -> int:
    with contextlib.suppress(OSError):  # it has ended
        return int((_PROC / str(pid) / "statm").read_text().split()[1])
    return 0


def _descendants(pid: int) -> Iterator[int]:
    """Through the kernel's lists of children: reading every process of a large machine would take too long."""
    with contextlib.suppress(OSError):  # it, or one of its threads, has ended
        for thread in os.listdir(_PROC / str(pid) / "task"):
            for child in map(int, (_PROC / str(pid) / "task" / thread / "children").read_text().split()):
                yield child
                yield from _descendants(child)
