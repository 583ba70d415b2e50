"""The child process that runs reward code: `python -m engine.reward_worker FD PARENT`, started by engine/rewards.py.

A plain subprocess and not multiprocessing, whose spawn would import the main script again, and torch with it, in every
worker. It imports nothing heavier than the task.

Over the connection FD: first `(TaskConfig, seed)`, answered by None or a message saying why the task does not load.
Then lists of `(example, completion)`, each member answered at once by `(reward, None)` or `(None, message)`. One
answer per member is what lets the parent keep a time limit per sample and know which one broke the worker.
"""

import ctypes
import os
import resource
import signal
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection

import numpy as np

from engine.tasks import load_reward
from engine.tasks.base import Example

MAX_MESSAGE = 500  # characters of an error message
PR_SET_PDEATHSIG = 1


def run(fd: int, parent: int) -> None:
    """Serves until the parent closes the connection."""
    os.set_inheritable(fd, False)  # else a program that the reward starts would hold the connection open
    die_with_parent(parent)
    pipe = Connection(fd)
    config, seed = pipe.recv()
    limit_memory(config.reward_memory_mib)
    try:
        reward = load_reward(config, seed)
    except Exception as error:
        return pipe.send(describe(error))
    pipe.send(None)
    while True:
        try:
            samples = pipe.recv()
        except EOFError:
            return
        for example, completion in samples:
            pipe.send(score(reward, example, completion))


def score(
    reward: Callable[[Example, str], float], example: Example, completion: str
) -> tuple[float | None, str | None]:
    """`(reward, None)`, or `(None, message)` where the code raised or gave no finite number."""
    try:
        value = reward(example, completion)
        if value is None or isinstance(value, str | bytes):
            raise TypeError(f"the reward is {value!r}, not a number")
        value = float(value)
        if not np.isfinite(value):
            raise ValueError(f"the reward is {value}")
        return value, None
    except (Exception, SystemExit) as error:  # user code: whatever it raises costs this sample, and the log has it
        return None, describe(error)


def describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:MAX_MESSAGE]


def limit_memory(mib: int) -> None:
    """Heap and private mappings of this process; beyond, an allocation raises MemoryError."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = mib << 20 if hard == resource.RLIM_INFINITY else min(mib << 20, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))


def die_with_parent(parent: int) -> None:
    """Even a reward that hangs must not outlive a killed rank (Linux; elsewhere the closed connection ends it)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("the rank is gone")


if __name__ == "__main__":
    run(int(sys.argv[1]), int(sys.argv[2]))
