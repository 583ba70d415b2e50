"""The swap from end to end but for SGLang, on one rank: the protocol, the fence, retries, what is never shipped.

The engine process here is our own receiver and hotswap code around a model that loads as SGLang's do (sync_engine.py);
what its parameters must hold is what that model's loader makes of whole quantized tensors. The real engine is behind
the same protocol in test_engine_host.py.
"""

import gc
import os
import socket
import threading

import pytest
import sync_engine
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sync_engine import FP8, PLAIN, Side, count, lose, on_the_wire

from sync.channel import Channel
from sync.encode import Wire
from sync.messages import Attach, Begin, Bucket, Commit, Done, Entry, Record
from sync.push import SwapError
from sync.quantize import Fp8Config
from sync.shards import whole
from sync.shm import SharedBytes, layout

pytestmark = pytest.mark.usefixtures("group")


@pytest.mark.parametrize("method", ["plan", "stock"])
@pytest.mark.parametrize("wire", [FP8, PLAIN], ids=["fp8", "plain"])
def test_one_rank(tmp_path, wire, method):
    side = Side(tmp_path, wire=wire, method=method)
    for version, seed in ((1, 0), (2, 5)):
        stats = side.swap(version, seed)
        assert not side.differs(seed) and side.engine.receiver.version == version == stats["sync/version"]
        assert stats["sync/verified_params"] == len(side.model.bytes())
        assert count(side, Record) == count(side, Attach) == (version == 1), "the plan is made once"
        entries = [*on_the_wire(wire, seed)]
        assert stats["sync/bytes"] == sum(t.nbytes for _, t in entries) and stats["sync/tensors"] == len(entries)
        assert stats["sync/bytes_sent"] == stats["sync/bytes_received"] == 0
        # the router is kept in another dtype, so its loader computes; nothing else goes through a loader
        assert stats["sync/stock_tensors"] == (1 if method == "plan" else len(entries))


@settings(max_examples=10, deadline=None)
@given(half=st.integers(150_000, 500_000), seed=st.integers(0, 99), pow2=st.booleans())
def test_any_bucket_size(tmp_path_factory, half, seed, pow2):
    wire = Wire(Fp8Config(scales="pow2" if pow2 else "fp32"), 1, torch.float32)
    side = Side(tmp_path_factory.mktemp("swap"), wire=wire, half=half)
    assert side.swap(1, seed)["sync/buckets"] >= 2 and not side.differs(seed)


def test_a_tensor_that_the_loader_leaves_out_is_sent_to_it_whole(tmp_path):
    def more(shards):
        return [*shards, whole("unused.weight", torch.randn(5, 7))]

    side = Side(tmp_path)
    stats = side.swap(1, change=more)
    assert side.pusher.stock["unused.weight"] == "SGLang's loader did not read all of it"
    assert stats["sync/stock_tensors"] == 2 and not side.differs()


def test_a_tensor_larger_than_a_bucket_names_the_remedy(tmp_path):
    with pytest.raises(ValueError, match=r"sync\.bucket_mb is too small.*weight"):
        Side(tmp_path, half=10_000).swap()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("number", [0, 4, 7])
def test_a_nan_is_never_shipped(tmp_path, bad, number):
    def change(shards):
        shards[number].local.view(-1)[3] = bad
        return shards

    side = Side(tmp_path)
    side.swap(1)
    with pytest.raises(ValueError, match=sync_engine.shards(0, 1)[number].pieces[0].name):
        side.swap(2, change=change)
    assert side.engine.receiver.version is None and not count(side, Commit)
    side.swap(3, seed=4)
    assert not side.differs(4), "the next swap mends it"


@pytest.mark.parametrize("step", ["begin", "bucket", "finish", "end", "flush"])
def test_a_step_that_fails_once_is_retried_whole(tmp_path, step):
    side = Side(tmp_path, half=150_000)
    side.swap(1)
    side.engine.updater.fail_on = step
    stats = side.swap(2, seed=3)
    assert stats["sync/retries"] == 1 and side.engine.receiver.version == 2 and not side.differs(3)
    assert count(side, Begin) == 2 and count(side, Record) == 1, "a plan is made anew after a failure"


@pytest.mark.parametrize("step", ["record", "attach"])
def test_so_is_the_making_of_the_plan(tmp_path, step):
    side = Side(tmp_path)
    side.engine.updater.fail_on = step
    assert side.swap(1)["sync/retries"] == 1 and not side.differs()


def flip_a_byte(side):
    def damage(message):
        if isinstance(message, Bucket):
            side.pusher.staging.halves[message.number % 2][1] ^= 1
        return message

    return damage


def swapped(side):
    """The second bucket arrives first."""
    held = []

    def damage(message):
        if isinstance(message, Bucket) and message.number == 0:
            held.append(message)
            return Bucket(1, message.checksums)
        return message

    return damage


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (flip_a_byte, "bucket 0 was damaged"),
        (lose(Bucket), "nothing was sent"),
        (lose(Commit), "nothing was sent"),
        (swapped, "bucket 1 came where bucket 0 was due"),
    ],
)
def test_damage_that_stays_keeps_the_fence_up(tmp_path, damage, reason):
    side = Side(tmp_path, attempts=3, half=150_000)
    side.swap(1)
    side.engine.damage = damage(side)
    with pytest.raises(SwapError, match=rf"version 2 failed 3 times.*{reason}"):
        side.swap(2, seed=3)
    assert side.engine.receiver.version is None, "an engine that may hold mixed weights must stay fenced"


def test_a_layout_that_changed_is_recorded_again(tmp_path):
    side = Side(tmp_path)
    side.swap(1)
    side.model.register_parameter("extra", torch.nn.Parameter(torch.zeros(3), requires_grad=False))
    with pytest.raises(SwapError, match="extra"):  # nobody sends it: the verifier says so
        side.swap(2)
    del side.model.extra
    side.model.norm.data = torch.zeros(1000)[100:228]  # another place is no other layout but for its offset
    assert side.swap(3, seed=8)["sync/retries"] == 0 and not side.differs(8)
    stats = side.swap(4, seed=9)
    assert stats["sync/plan_s"] == 0 and not side.differs(9)


def test_parameters_may_move_without_a_new_plan(tmp_path):
    side = Side(tmp_path)
    side.swap(1)
    for parameter in side.model.parameters():
        parameter.data = parameter.data.clone()
    assert side.swap(2, seed=8)["sync/plan_s"] == 0 and count(side, Record) == 0 and not side.differs(8)


def test_messages_out_of_order_are_refused(tmp_path):
    side = Side(tmp_path)
    for message in (Bucket(0, [0]), Commit(1, 0, [0]), Record([], True)):
        side.engine.post(message)
        assert "send Begin first" in side.engine.reply(1).reason


def test_many_swaps_leave_nothing_behind(tmp_path):
    side = Side(tmp_path, half=150_000)

    def held():
        gc.collect()
        descriptors = len(os.listdir("/proc/self/fd"))
        with open("/proc/self/statm") as file:
            return descriptors, int(file.read().split()[1])

    for version in range(30):
        side.swap(version, verify=False)
    before = held()
    for version in range(200):
        side.swap(version, verify=False)
    descriptors, pages = held()
    assert descriptors == before[0] and pages - before[1] < 500, "2 MB in 200 swaps"
    assert len(list(tmp_path.rglob("*"))) < 10


def test_channel_carries_messages_and_descriptors():
    left, right = socket.socketpair()
    a, b = Channel(left, Begin | Done), Channel(right, Begin | Record)
    memory = SharedBytes(1000)
    memory.array(0, "uint8", (3,))[:] = [1, 2, 3]
    a.send(Begin(7, True), (memory.fd,))
    message, fds = b.receive(1)
    assert message == Begin(7, True)
    assert SharedBytes.attach(fds[0]).array(0, "uint8", (3,)).tolist() == [1, 2, 3]
    large = Record([Entry(f"layer.{i}.weight", "bfloat16", (i, 128)) for i in range(20_000)], True)
    thread = threading.Thread(target=a.send, args=(large,))  # more than a socket buffer
    thread.start()
    assert b.receive(5) == (large, [])
    thread.join()
    with pytest.raises(TimeoutError):
        b.receive(0.05)
    a.close()
    assert b.receive(1) == (None, [])


def test_shared_memory_has_no_name_and_costs_nothing_until_written():
    memory = SharedBytes(64 << 30)
    assert os.fstat(memory.fd).st_blocks == 0
    memory.array(32 << 30, "uint8", (10,))[:] = 1
    assert os.fstat(memory.fd).st_blocks * 512 <= 1 << 21
    memory.close()


def test_layout_aligns_columns():
    offsets, size = layout({"a": ("uint8", (3,)), "b": ("float64", (2, 2)), "c": ("int32", (0, 5))})
    assert offsets == {"a": 0, "b": 64, "c": 128} and size == 128
