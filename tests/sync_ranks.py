"""Runs a function on 4 forked ranks of a gloo group, with groups of the first 1, 2 and 3 of them."""

import multiprocessing
import tempfile
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

RANKS = 4


def run(function: Callable[..., Any], *args: Any) -> list[Any]:
    """`function(rank, groups, *args)` on every rank; `groups[n]` are the first n ranks. The results, by rank."""
    context = multiprocessing.get_context("fork")  # a spawned process would import torch anew, for seconds
    results = context.SimpleQueue()
    with tempfile.NamedTemporaryFile() as store:
        workers = [context.Process(target=_rank, args=(r, store.name, results, function, args)) for r in range(RANKS)]
        for worker in workers:
            worker.start()
        received = dict(results.get() for _ in workers)
        for worker in workers:
            worker.join()
    failures = [value for value in received.values() if isinstance(value, str) and value.startswith("Traceback")]
    assert not failures, failures[0]
    return [received[rank] for rank in range(RANKS)]


def _rank(rank: int, store: str, results: Any, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
        groups = {n: dist.new_group(list(range(n))) for n in range(1, RANKS + 1)}
        results.put((rank, function(rank, groups, *args)))
        dist.barrier()
    except BaseException:
        results.put((rank, traceback.format_exc()))
