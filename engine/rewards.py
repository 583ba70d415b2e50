"""Rewards in worker processes, each with a time and a memory limit. Reward code may do anything; the run goes on.

    with RewardPool(config.task, seed) as pool:
        future = pool.submit(examples, completions)     # while the engine generates the rest
        scores = gather([future, …])

A worker answers sample by sample, so that a sample that raises, hangs or dies costs itself alone: its worker is
replaced where needed and goes on with the next one. Cost of a cheap reward is one small message each way.
"""

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection, Pipe
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from engine.tasks import TaskConfig
from engine.tasks.base import Example

START_LIMIT_S = 120.0  # importing a task on a busy machine
CLOSE_CHECK_S = 0.1  # how often a waiting thread looks whether the pool is being closed
CHUNK = 16  # samples per worker turn in `score`


class Scores(msgspec.Struct, frozen=True, kw_only=True):
    """Rewards of n samples, in the order they were submitted."""

    rewards: NDArray[Any]  # f32[n], NaN where the sample is lost
    failed: int  # samples whose reward raised, gave no finite number, or killed its worker
    timeouts: int  # samples whose reward passed the time limit
    first_error: str | None  # message of the first lost sample


class RewardPool:
    """`config.reward_workers` processes that run the reward of the task `config` names.

    The task is loaded anew in each worker, in the background; a task that does not load there shows as RuntimeError
    from the futures. Threads only wait for workers, so ranks with gloo or NCCL threads are safe.
    """

    def __init__(self, config: TaskConfig, seed: int):
        self._closed = threading.Event()
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        self._workers = [_Worker(config, seed, self._closed) for _ in range(config.reward_workers)]
        self._threads = ThreadPoolExecutor(config.reward_workers, thread_name_prefix="reward")
        for worker in self._workers:
            self._idle.put(worker)
            self._threads.submit(self._run, [])  # starts it

    def __enter__(self) -> "RewardPool":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def submit(self, examples: Sequence[Example], completions: Sequence[str]) -> "Future[Scores]":
        """Scores of the pairs, computed one after the other by one worker; a group is a good size.

        The future raises RuntimeError where no worker can start. ValueError for unequal lengths.
        """
        return self._threads.submit(self._run, list(zip(examples, completions, strict=True)))

    def score(self, examples: Sequence[Example], completions: Sequence[str]) -> Scores:
        """Scores of many pairs, spread over all workers; waits for them."""
        n = len(examples)
        if n != len(completions):
            raise ValueError(f"{n} examples, {len(completions)} completions")
        size = max(1, min(CHUNK, -(-n // len(self._workers))))
        return gather([self.submit(examples[i : i + size], completions[i : i + size]) for i in range(0, n, size)])

    def close(self) -> None:
        """Ends workers and threads within a moment, running rewards included. May be called twice."""
        self._closed.set()
        self._threads.shutdown(wait=True, cancel_futures=True)
        for worker in self._workers:
            worker.stop()

    def _run(self, samples: list[tuple[Example, str]]) -> Scores:
        worker = self._idle.get()  # never waits: there are as many workers as threads
        try:
            outcomes = worker.score(samples)
        finally:
            self._idle.put(worker)
        rewards = np.asarray([np.nan if value is None else value for value, _, _ in outcomes], np.float32)
        kinds = [kind for _, kind, _ in outcomes]
        error = next((message for _, kind, message in outcomes if kind), None)
        return Scores(
            rewards=rewards, failed=kinds.count("failed"), timeouts=kinds.count("timeout"), first_error=error
        )  # fmt: skip


def gather(futures: "Sequence[Future[Scores]]") -> Scores:
    """Waits for the futures and joins their scores in the given order."""
    parts = [future.result() for future in futures]
    return Scores(
        rewards=np.concatenate([np.zeros(0, np.float32), *[part.rewards for part in parts]]),
        failed=sum(part.failed for part in parts),
        timeouts=sum(part.timeouts for part in parts),
        first_error=next((part.first_error for part in parts if part.first_error), None),
    )


# (reward, None, None), or (None, "failed" | "timeout", message)
_Outcome = tuple[float | None, str | None, str | None]


class _Worker:
    """The parent's end of one worker process. One thread uses it at a time; a dead process is replaced on demand."""

    def __init__(self, config: TaskConfig, seed: int, closed: threading.Event):
        self._config, self._seed, self._closed = config, seed, closed
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Connection | None = None

    def score(self, samples: list[tuple[Example, str]]) -> list[_Outcome]:
        """One outcome per sample. RuntimeError where the process does not start or the pool is closed."""
        if self._process is None:
            self._start()  # here too, so that an empty list warms the worker up
        outcomes: list[_Outcome] = []
        while len(outcomes) < len(samples):
            outcomes += self._score_until_it_breaks(samples[len(outcomes) :])
        return outcomes

    def stop(self) -> int | None:
        """Kills the process and whatever it started; returns its exit code, which is its own where it had ended."""
        process, pipe = self._process, self._pipe
        self._process = self._pipe = None
        if process is None or pipe is None:
            return None
        with contextlib.suppress(ProcessLookupError):  # somebody else in this process waited for it
            os.killpg(process.pid, signal.SIGKILL)
        pipe.close()
        return process.wait()

    def _score_until_it_breaks(self, samples: list[tuple[Example, str]]) -> list[_Outcome]:
        """Outcomes of the first samples, at least one, up to the first that breaks the worker."""
        outcomes: list[_Outcome] = []
        if self._process is None:
            self._start()
        assert self._pipe is not None
        try:
            self._pipe.send(samples)
            for _ in samples:
                value, message = self._receive(self._config.reward_timeout_s)
                outcomes.append((value, "failed" if message else None, message))
        except TimeoutError:
            self.stop()
            outcomes.append((None, "timeout", f"no reward within {self._config.reward_timeout_s:g} s"))
        except (EOFError, ConnectionError):
            outcomes.append((None, "failed", f"the reward ended its worker (exit code {self.stop()})"))
        return outcomes

    def _start(self) -> None:
        pipe, theirs = Pipe()
        # The worker finds modules where we do, and leaves the cores to the trainer.
        paths = [path or os.getcwd() for path in sys.path]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-P", "-m", "engine.reward_worker", str(theirs.fileno()), str(os.getpid())]
        self._process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], start_new_session=True
        )
        self._pipe = pipe
        theirs.close()
        try:
            pipe.send((self._config, self._seed))
            problem = self._receive(START_LIMIT_S)
        except TimeoutError:
            problem = f"not ready within {START_LIMIT_S:g} s"
        except (EOFError, ConnectionError):
            problem = f"exit code {self.stop()}"
        except RuntimeError:
            self.stop()
            raise
        if problem is not None:
            self.stop()
            raise RuntimeError(f"reward worker of task {self._config.name!r} does not start: {problem}")

    def _receive(self, limit_s: float) -> Any:
        assert self._pipe is not None
        deadline = time.monotonic() + limit_s
        while not self._pipe.poll(max(0.0, min(CLOSE_CHECK_S, deadline - time.monotonic()))):
            if self._closed.is_set():
                raise RuntimeError("the reward pool is closed")
            if time.monotonic() >= deadline:
                raise TimeoutError
        return self._pipe.recv()
