"""The rank's end of a swap against a child that is no engine: order of answers, what a dead or stuck one becomes."""

import json
import os
import socket
import subprocess
import threading

import pytest
import torch

from engine.host import EngineConfig, EngineHost
from sync.channel import Channel
from sync.messages import Begin, Bucket, Commit, Done, Entry, Failed, Record, Recorded, ToEngine


@pytest.fixture
def pair(tmp_path):
    """A host with `sleep` for a child, and the child's end of its channel."""
    (tmp_path / "config.json").write_text(json.dumps({"num_hidden_layers": 1}))
    host = EngineHost(EngineConfig(), tmp_path, None, tmp_path / "engine.log", 0, torch.device("cpu"))
    ours, theirs = socket.socketpair()
    host.log_path.write_text("a last word\n")
    host.process = subprocess.Popen(["sleep", "60"])
    host.channel = Channel(ours, Done | Recorded | Failed)
    yield host, Channel(theirs, ToEngine)
    host.process.kill()
    host.process.wait()


def test_several_messages_may_be_on_their_way(pair):
    host, child = pair
    for message in (Bucket(0, [1]), Bucket(1, [2]), Commit(3, 2, [9])):
        host.post(message)
    assert [child.receive()[0] for _ in range(3)] == [Bucket(0, [1]), Bucket(1, [2]), Commit(3, 2, [9])]
    for reply in (Done(), Failed("no"), Done(verified=4)):
        child.send(reply)
    assert [host.reply(5.0) for _ in range(3)] == [Done(), Failed("no"), Done(verified=4)]


def test_a_request_is_a_message_and_its_reply(pair):
    host, child = pair
    child.send(Recorded(["file"]))
    host.post(Record([Entry("w", "float32", (1,))], True))
    assert host.reply(5.0) == Recorded(["file"])
    assert child.receive()[0] == Record([Entry("w", "float32", (1,))], True)


def test_a_dead_child_is_a_failure_whether_found_by_post_or_by_reply(pair):
    host, child = pair
    child.close()
    host.process.kill()
    host.post(Begin(1, False))
    for _ in range(2):
        reply = host.reply(5.0)
        assert isinstance(reply, Failed) and "SIGKILL" in reply.reason and "a last word" in reply.reason


def test_a_stuck_child_is_killed_and_a_failure(pair):
    host, _ = pair
    host.post(Begin(1, False))
    reply = host.reply(0.1)
    assert isinstance(reply, Failed) and "gave no sign for 0 s while changing its weights" in reply.reason
    assert not host.alive


def test_a_child_that_reads_nothing_does_not_block_for_ever(pair):
    host, _ = pair
    host.channel.socket.settimeout(0.1)
    entries = [Entry("w" * 1000, "float32", (1,))] * 2000  # more than a socket holds
    posting = threading.Thread(target=host.post, args=(Record(entries, True),))
    posting.start()
    posting.join(10)
    assert not posting.is_alive() and isinstance(host.reply(0.1), Failed)


def test_a_new_process_has_no_plan(pair, monkeypatch):
    host, _ = pair
    host.unplanned = host.unverified = False
    old, kept = host.process, []

    def popen(command, **_):
        kept.append(os.dup(int(command[3])))  # as a child would
        return old

    monkeypatch.setattr(subprocess, "Popen", popen)
    host.spawn()
    os.close(kept[0])
    assert host.unplanned and host.unverified and host.reports.is_dir()
