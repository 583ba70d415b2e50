"""Two ranks that share one engine: the real child process and both hosts, around a stub of SGLang (stub_sglang.py)."""

import contextlib
import json
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import stub_sglang
import torch

from engine.host import EngineConfig, EngineDied, EngineError, EngineHost, server_args
from engine.protocol import Sampling, Skip, Sleep, Wake
from engine.team import Seat, merge, split
from sync.messages import Attach, Begin, Bucket, Commit, Done, Entry, Failed, Record, Recorded

CPU = torch.device("cpu")
RECORD = Record([Entry("w", "float32", (1,))], True)
CONFIG = EngineConfig(tensor_parallel=2, start_timeout_s=60.0, stall_timeout_s=30.0, max_restarts=4)


def ask(host, timeout):
    """The answer to a message of a swap."""
    host.post(Begin(3, False))
    return host.reply(timeout)


def model_dir(path):
    (path / "config.json").write_text(json.dumps({"num_hidden_layers": 1}))
    return path


class Pair:
    """Two ranks of one engine, both in this process; `both` acts for them at the same time."""

    def __init__(self, path, config=CONFIG):
        self.path = path
        self.hosts = [
            EngineHost(config, model_dir(path), None, path / "engine.log", 5, CPU, Seat(place, 2, path))
            for place in (0, 1)
        ]
        self.threads = ThreadPoolExecutor(2)

    def both(self, act):
        return list(self.threads.map(act, self.hosts))

    def round(self, *messages):
        """The answers to one message of each rank; one message may be both ranks'."""
        for host, message in zip(self.hosts, messages * (2 // len(messages)), strict=True):
            host.post(message)
        return [host.reply(30.0) for host in self.hosts]

    def swap(self, version):
        """All messages of a swap, and the answers to the last."""
        for message in (Begin(version, True), RECORD, Attach([["memfd", "x"]], ["f"]), Bucket(0, [1])):
            assert not any(isinstance(reply, Failed) for reply in self.round(message))
        return self.round(Commit(version, 1, [4]))

    def close(self):
        self.both(EngineHost.close)
        self.threads.shutdown()


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        path = tmp_path_factory.mktemp("team")
        log = stub_sglang.install(path, patch)
        pair = Pair(path)
        pair.both(EngineHost.spawn)
        pair.both(EngineHost.start)
        pair.told = lambda: stub_sglang.told(log)
        yield pair
        pair.close()
        assert pair.told()[-1] == ["shutdown"]


def prompts(*hundredths):
    return [np.array([n], np.int32) for n in hundredths]


def sample(host, *hundredths):
    """What each sample says, in order, and the versions."""
    arena = None
    for _, arena in host.generate(prompts(*hundredths), Sampling(4)):  # noqa: B007
        pass
    assert arena is not None
    return arena.tokens[:, 0].tolist(), set(arena.versions.tolist())


def test_one_child_serves_both(pair):
    assert pair.told()[0] == ["start", 2] and len(pair.told()) == 1
    leader, member = pair.hosts
    assert leader.process is not None and member.process is None and leader.alive and member.alive
    assert leader.sglang == member.sglang == "stub" and leader.starts == member.starts == 1
    with pytest.raises(EngineError, match="fenced"):
        sample(member, 1)


def test_a_round_puts_together_what_the_ranks_send(pair):
    before = len(pair.told())
    assert pair.round(Begin(3, True)) == [Done(), Done()]
    own, other = pair.round(RECORD)
    assert [reply.files[0].rpartition("-")[2] for reply in (own, other)] == ["0", "1"] and len(own.files) == 1
    assert pair.round(Attach([["memfd", "a"]], ["fa"]), Attach([["memfd", "b"]], ["fb"])) == [Done(), Done()]
    for host, checksum in zip(pair.hosts, (11, 12)):  # several may be on their way
        host.post(Bucket(0, [checksum]))
        host.post(Bucket(1, [checksum + 10]))
    assert [host.reply(30.0) for host in pair.hosts for _ in range(2)] == [Done()] * 4
    assert pair.round(Commit(3, 2, [5]), Commit(3, 2, [6])) == [Done(verified=7)] * 2
    told = [line for line in pair.told()[before:] if len(line) == 3]
    attached = [("Open", 0, {"handle": ["memfd", "a"], "arrivals": "fa"})]
    attached += [("Open", 1, {"handle": ["memfd", "b"], "arrivals": "fb"})]
    assert [line for line in told if line[0] == "Open"] == list(map(list, attached))
    taken = [(process, fields["number"], fields["checksum"]) for kind, process, fields in told if kind == "Take"]
    assert taken == [(0, 0, 11), (1, 0, 12), (0, 1, 21), (1, 1, 22)]
    assert [(p, fields["nbytes"]) for kind, p, fields in told if kind == "Finish"] == [(0, 5), (1, 6)]


def test_both_generate_at_the_same_time(pair):
    pair.swap(4)
    (first, versions), (second, _) = pair.both(lambda host: sample(host, 30, 30))
    assert max(first + second) == 4, "the requests of both ranks must run together"
    assert versions == {4}


def test_a_round_waits_for_generations_and_generations_wait_for_it(pair):
    pair.swap(5)
    leader, member = pair.hosts
    leader.post(Begin(6, False))
    sampling = pair.threads.submit(sample, leader, 40)
    time.sleep(0.1)
    before = len(pair.told())
    member.post(Begin(6, False))
    assert sampling.result() == ([1], {5})
    assert [host.reply(30.0) for host in pair.hosts] == [Done(), Done()]
    assert [line[0] for line in pair.told()[before:]] == ["generated", "begin"]
    pair.round(Begin(6, False), None)  # leave no swap open


@pytest.mark.parametrize("place", [0, 1])
def test_a_rank_with_nothing_to_send_fails_the_swap_of_all(pair, place):
    pair.swap(7)
    pair.round(Begin(8, False))
    messages = [Bucket(0, [1]), None] if place else [None, Bucket(0, [1])]
    expected = Failed(f"rank {place} of the engine's 2 has a problem and sent nothing")
    assert pair.round(*messages) == [expected] * 2
    for reply in pair.round(Commit(8, 1, [4])):
        assert isinstance(reply, Failed) and "no swap is open" in reply.reason
    for host in pair.hosts:
        with pytest.raises(EngineError, match="fenced"):
            sample(host, 1)
    assert pair.swap(9) == [Done(verified=7)] * 2 and sample(pair.hosts[1], 1)[1] == {9}


@pytest.mark.parametrize(
    ("messages", "text"),
    [
        ((Begin(3, True), Begin(4, True)), "Begin 3, Begin 4"),
        ((Begin(3, True), Begin(3, False)), "Begin 3, Begin 3"),
        ((Begin(3, True), RECORD), "Begin 3, Record"),
        ((Bucket(0, [1]), Bucket(1, [1])), "Bucket 0, Bucket 1"),
        ((Commit(3, 1, [4]), Commit(3, 2, [4])), "Commit 3, Commit 3"),
        ((RECORD, Record([], True)), "Record, Record"),
        ((Sleep(("weights",)), Wake(("weights",))), "Sleep, Wake"),
    ],
)
def test_ranks_out_of_step_fail_together(pair, messages, text):
    pair.swap(10)
    assert pair.round(*messages) == [Failed(f"the engine's 2 ranks are out of step: {text}")] * 2
    with pytest.raises(EngineError, match="fenced"):
        sample(pair.hosts[0], 1)


def test_the_engine_sleeps_and_wakes_once(pair):
    pair.swap(11)
    before = len(pair.told())
    assert pair.both(lambda host: host.sleep(("kv_cache",))) == [Done(), Done()]
    with pytest.raises(EngineError, match="sleeps: kv_cache"):
        sample(pair.hosts[1], 1)
    assert pair.both(lambda host: host.wake(("kv_cache",))) == [Done(), Done()]
    assert pair.told()[before:] == [["release", ["kv_cache"]], ["resume", ["kv_cache"]]]
    assert sample(pair.hosts[1], 1)[1] == {11}


def test_a_refused_request_is_the_error_of_its_rank_alone(pair):
    pair.swap(12)
    with pytest.raises(EngineError, match="IndexError"):
        list(pair.hosts[1].generate([np.zeros(0, np.int32)], Sampling(4)))
    assert all(host.alive for host in pair.hosts) and sample(pair.hosts[0], 1)[1] == {12}


# ---------------------------------------------------------------- ends; the child starts anew


def test_a_killed_and_a_stuck_child_are_found_by_both_and_started_again(pair):
    leader, member = pair.hosts
    os.kill(leader.process.pid, signal.SIGKILL)
    first, second = pair.round(Begin(1, False))
    assert isinstance(first, Failed) and "SIGKILL" in first.reason
    assert isinstance(second, Failed) and "shared by 2 ranks" in second.reason and "engine.log" in second.reason
    assert not leader.alive and not member.alive
    with pytest.raises(EngineDied, match=r"ended while generating|closed its channel"):
        sample(member, 1)
    member.unplanned = leader.unplanned = False
    pair.both(EngineHost.restart)
    assert leader.starts == member.starts == 2 and leader.unplanned and member.unplanned
    assert leader.alive and member.alive and not member.channel.closed
    with pytest.raises(EngineError, match="fenced"):
        sample(member, 1)
    assert pair.swap(2) == [Done(verified=7)] * 2

    os.kill(leader.process.pid, signal.SIGSTOP)
    assert "gave no sign for 0 s" in ask(member, 0.2).reason
    assert not member.alive and leader.alive, "the leader has not asked yet"
    stuck = leader.process
    assert "gave no sign" in ask(leader, 0.2).reason and stuck.poll() == -signal.SIGKILL
    pair.both(EngineHost.restart)
    assert leader.starts == member.starts == 3 and pair.swap(4) == [Done(verified=7)] * 2


def test_a_rank_that_leaves_ends_the_child(pair):
    leader, member = pair.hosts
    member.channel.close()  # as the kernel does when the rank dies
    assert leader.process.wait(30) == 0 and not leader.alive
    assert "exit status 0" in ask(leader, 5.0).reason
    pair.both(EngineHost.restart)
    member.close()  # as at the end of a run
    assert leader.process.wait(30) == 0
    pair.both(EngineHost.restart)
    assert pair.swap(5) == [Done(verified=7)] * 2


def test_both_give_up_after_too_many_starts(pair):
    assert all(host.starts > CONFIG.max_restarts for host in pair.hosts)

    def refused(host):
        with pytest.raises(EngineDied, match=r"engine\.max_restarts = 4"):
            host.restart()
        return host.alive

    assert pair.both(refused) == [False, False]


def test_a_rank_that_nobody_waits_for_says_so(tmp_path):
    config = EngineConfig(tensor_parallel=2, start_timeout_s=0.2)
    member = EngineHost(config, model_dir(tmp_path), None, tmp_path / "log", 0, CPU, Seat(1, 2, tmp_path))
    with pytest.raises(EngineDied, match="could not be reached for 0 s"):
        member.start()
    member.close()


# ---------------------------------------------------------------- without a child


def test_merge_and_split():
    attach = merge([Attach([["a"]], ["f"]), Attach([["b"]], ["g"]), Attach([["c"]], ["h"])])
    assert attach == Attach([["a"], ["b"], ["c"]], ["f", "g", "h"])
    assert merge([Commit(1, 2, [3]), Commit(1, 2, [4])]) == Commit(1, 2, [3, 4])
    assert merge([Begin(1, True)] * 2) == Begin(1, True) and merge([RECORD]) == RECORD
    with pytest.raises(ValueError, match="rank 1 of the engine's 2"):
        merge([Begin(1, True), Skip()])
    assert split(Recorded(["a", "b"]), 2) == [Recorded(["a"]), Recorded(["b"])]
    assert split(Done(verified=3), 2) == [Done(verified=3)] * 2


def test_the_child_sees_the_devices_of_all_its_ranks(tmp_path, monkeypatch):
    def environment(visible, device, ranks):
        with contextlib.ExitStack() as stack:
            patch = stack.enter_context(pytest.MonkeyPatch.context())
            patch.delenv("SGLANG_CPU_OMP_THREADS_BIND", raising=False)
            patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
            if visible is not None:
                patch.setenv("CUDA_VISIBLE_DEVICES", visible)
            config = EngineConfig(tensor_parallel=ranks)
            seat = Seat(0, ranks, tmp_path if ranks > 1 else None)
            host = EngineHost(config, model_dir(tmp_path), None, tmp_path / "log", 0, torch.device(device), seat)
            environment = host._environment()
        return environment["CUDA_VISIBLE_DEVICES"], environment.get("SGLANG_CPU_OMP_THREADS_BIND")

    assert environment(None, "cuda:2", 2) == ("2,3", None)
    assert environment("7,6,5,4", "cuda:2", 2) == ("5,4", None)
    assert environment("7,6,5,4", "cuda:3", 1) == ("4", None)
    assert environment(None, "cuda:0", 4) == ("0,1,2,3", None)
    assert environment("0", "cpu", 1) == ("", None)
    assert environment("0", "cpu", 3) == ("", "0|1|2")
    assert server_args(CONFIG, model_dir(tmp_path), None, CPU)["tp_size"] == 2
    with pytest.raises(ValueError, match=r"engine\.tensor_parallel"):
        EngineConfig(sglang={"tp_size": 2})
