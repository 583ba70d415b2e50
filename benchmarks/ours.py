"""Our side of benchmarks/loop.py, as a process that works when its turn comes: the trainer alone, or the whole loop.

python -m benchmarks.ours JOB      JOB is JSON: kind, threads, overrides of the demo recipe, and files
"""

import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch.distributed as dist

from benchmarks.sides import Turns
from config import Config
from settings import find_recipe, load
from sync.batch import Batch
from trainer.trainer import Trainer

RECIPES = Path(__file__).resolve().parents[1] / "configs"


def recipe(overrides: list[str]) -> Config:
    """The demo without what is not part of a step: evaluation, checkpoints, export."""
    skip = ["eval.every=0", "checkpoint.every=0", "checkpoint.export_hf=false", "steps=1000000", "cluster.device=cpu"]
    return load(Config, find_recipe("demo", RECIPES), [*skip, *overrides])


@contextmanager
def alone() -> Iterator[None]:
    """A process group of one rank."""
    with tempfile.TemporaryDirectory() as directory:
        dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=0, world_size=1)
        yield
        dist.destroy_process_group()


def random_batch(groups: int, group_size: int, longest: int, vocabulary: int, seed: int) -> Batch:
    """Samples with a realistic spread of lengths: responses log-normal (median `longest`/4, sigma 0.7, cut to 8 …
    `longest` tokens), prompts uniform from 8 to 40 tokens; rewards 0 or 1; random tokens, ids from 2 on."""
    rng = np.random.default_rng(seed)
    n = groups * group_size
    prompts = [rng.integers(2, vocabulary, rng.integers(8, 41)) for _ in range(groups)]
    sizes = np.exp(rng.normal(np.log(longest / 4), 0.7, n)).round().clip(8, longest).astype(int)
    rows = [
        np.concatenate([prompts[i // group_size], rng.integers(2, vocabulary, size)]) for i, size in enumerate(sizes)
    ]
    lengths = np.array([len(row) for row in rows])
    sampled = np.concatenate([np.arange(len(row)) >= len(row) - size for row, size in zip(rows, sizes, strict=True)])
    return Batch(
        tokens=np.concatenate(rows).astype(np.int32),
        starts=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32),
        sampled=sampled,
        logprobs=np.zeros(lengths.sum(), np.float32),
        rewards=rng.integers(0, 2, n).astype(np.float32),
        groups=np.repeat(np.arange(groups), group_size).astype(np.int32),
        versions=np.zeros(n, np.int32),
        finish=np.zeros(n, np.uint8),
    ).check()


class TrainerSide:
    """`Trainer.step` on one batch, again and again. Needs a process group."""

    def __init__(self, config: Config, model: Path, batch: Batch, device: Any):
        longest = int(batch.sampled_lengths.max())
        self.trainer = Trainer(
            config.trainer, config.algo, model, device=device, temperature=1.0, total_steps=config.steps,
            max_response_tokens=longest,
        )  # fmt: skip
        self.batch = msgspec.structs.replace(batch, logprobs=self.trainer.logprobs(batch))

    def step(self) -> float:
        """Seconds of one step."""
        began = time.perf_counter()
        self.trainer.step(self.batch)
        return time.perf_counter() - began


def main(job: dict[str, Any]) -> None:
    """Serves turns until there are none."""
    from ranks import Ranks

    turns = Turns()
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    config = recipe([f"cluster.threads={job['threads']}", *job["overrides"]])
    ranks = Ranks(config.cluster)
    if job["kind"] == "trainer":
        side = TrainerSide(config, Path(job["model"]), Batch.load(Path(job["batch"])), ranks.device)
        turns.reply()
        while turns.wait():
            turns.reply(seconds=side.step())
    else:
        _serve_loop(config, ranks, Path(job["output"]), turns)


def _serve_loop(config: Config, ranks: Any, output: Path, turns: Turns) -> None:
    from loop import Loop
    from records.console import RunConsole
    from trainer.checkpoint import export_hf

    (output / "run").mkdir(parents=True)
    with ExitStack() as stack:
        loop = Loop(config, output / "run", ranks, RunConsole(active=False), stack)
        loop.prepare(resume=False)
        export_hf(loop.trainer, output / "start")
        turns.reply(model=str(output / "start"))
        step = 0
        while turns.wait():
            began = time.perf_counter()
            loop.step(step)
            turns.reply(seconds=time.perf_counter() - began, parts=loop.times)
            step += 1


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
