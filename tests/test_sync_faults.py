"""kill -9 and SIGSTOP of the engine at every step of a swap: it never serves mixed weights, and a new one is filled.

The child is forked: our channel, receiver and hotswap code around a small model in shared memory, so that the test sees
its parameters and its version whatever happens to it. The rank's end is the real EngineHost.
"""

import asyncio
import multiprocessing
import os
import signal
import socket
import subprocess

import pytest
import torch
from sync_engine import FP8, LocalUpdater, Model, on_the_wire, shards

from engine.host import EngineConfig, EngineHost
from engine.protocol import FromChild, Ready, Start, ToChild
from sync.channel import Channel
from sync.messages import Attach, Begin, Bucket, Commit, Record
from sync.push import Pusher, SwapError, SyncConfig
from sync.receive import Receiver
from sync.staging import Staging
from trainer.presets import write_preset

FORK = multiprocessing.get_context("fork")
FENCED = -1
STEPS = {
    "begin": lambda m: isinstance(m, Begin),
    "record": lambda m: isinstance(m, Record),
    "attach": lambda m: isinstance(m, Attach),
    "first bucket": lambda m: isinstance(m, Bucket) and m.number == 0,
    "second bucket": lambda m: isinstance(m, Bucket) and m.number == 1,
    "commit": lambda m: isinstance(m, Commit),
}


pytestmark = pytest.mark.usefixtures("group")


class Forked:
    """A forked process with the interface of Popen that EngineHost uses."""

    def __init__(self, target, *arguments):
        self.process = FORK.Process(target=target, args=arguments)
        self.process.start()
        self.pid, self.kill = self.process.pid, self.process.kill

    @property
    def returncode(self):
        return self.process.exitcode

    def poll(self):
        self.process.join(0)
        return self.process.exitcode

    def wait(self, timeout=None):
        self.process.join(timeout)
        if self.process.exitcode is None:
            raise subprocess.TimeoutExpired("child", timeout)


class Host(EngineHost):
    """EngineHost with a forked child. `fault` = (step, before or after it is handled, signal), for the next process."""

    fault = None

    def spawn(self):
        ours, theirs = socket.socketpair()
        self.model, self.version = Model().share_memory(), FORK.Value("q", FENCED)
        self.reports.mkdir(exist_ok=True)
        self.process = Forked(serve, theirs, ours, self.model, self.version, self.reports, self.fault)
        self.fault = None
        theirs.close()
        self.channel = Channel(ours, FromChild)
        self.starts += 1
        self.unplanned = self.unverified = True
        self._send(Start({}, 0, str(self.reports)))

    def differs(self, seed):
        wanted = Model()
        wanted.load_weights(on_the_wire(FP8, seed))
        have, want = self.model.bytes(), wanted.bytes()
        return [name for name in want if not torch.equal(have[name], want[name])]


def serve(sock, other, model, version, reports, fault):
    other.close()
    torch.set_num_threads(1)
    channel, receiver = Channel(sock, ToChild), Receiver(LocalUpdater(model, reports))
    step, when, number, swap = fault or ("", "", 0, 0)
    while (message := channel.receive()[0]) is not None:
        if isinstance(message, Start):
            channel.send(Ready("forked"))
            continue
        if isinstance(message, Begin):
            swap -= 1
        hit = step and swap < 0 and STEPS[step](message)
        if hit and when == "before":
            os.kill(os.getpid(), number)
        reply = asyncio.run(receiver.handle(message))
        version.value = FENCED if receiver.version is None else receiver.version
        if hit and when == "after":
            os.kill(os.getpid(), number)
        channel.send(reply)


def start(tmp_path, fault):
    write_preset("tiny-qwen3", 0.02, 0, tmp_path)
    host = Host(EngineConfig(), tmp_path, None, tmp_path / "engine.log", 0, torch.device("cpu"))
    host.log_path.touch()
    host.fault = fault
    host.start()
    config = SyncConfig(bucket_mb=1, timeout_s=0.5 if fault and fault[2] == signal.SIGSTOP else 60)
    pusher = Pusher(host, FP8, config, host.reports, torch.device("cpu"), None, str)
    pusher.staging = Staging(200_000, torch.device("cpu"))  # several buckets
    return host, pusher


def swap(pusher, version, seed):
    return pusher.push(lambda: shards(0, 1, seed), version, verify=True)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("step", STEPS)
def test_an_engine_lost_at_any_step(tmp_path, step, when, number):
    first = step in ("record", "attach")  # these come in the first swap only
    host, pusher = start(tmp_path, (step, when, number, 0 if first else 1))
    try:
        if not first:
            swap(pusher, 1, seed=1)
            assert host.version.value == 1 and not host.differs(1)
        with pytest.raises(SwapError, match="SIGKILL"):
            swap(pusher, 2, seed=2)
        assert not host.alive
        whole = step == "commit" and when == "after"  # it had committed: all of it is new
        assert host.version.value == (
            2 if whole else 1 if step == "begin" and when == "before" and not first else FENCED
        )
        if host.version.value != FENCED:
            assert not host.differs(host.version.value), "a version stands for exactly its weights"
        host.restart()
        assert host.version.value == FENCED and host.differs(2)
        stats = swap(pusher, 2, seed=2)
        assert host.version.value == 2 and not host.differs(2) and stats["sync/verified_params"]
    finally:
        host.close()


def test_the_rank_that_is_gone_takes_its_engine_along(tmp_path):
    host, pusher = start(tmp_path, None)
    swap(pusher, 1, seed=1)
    host.post(Begin(2, False))
    host.channel.close()  # as the kernel does when the rank dies in the middle of a swap
    assert host.process.wait(10) is None and host.version.value == FENCED
    host.process = None
