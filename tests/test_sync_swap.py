"""The swap protocol without an engine behind it: buckets, the fence, retries, and agreement between ranks.

The updater here keeps what it is given, so that a test can ask what arrived and break one step at a time. The real
engine is behind the same protocol in test_engine_host.py.
"""

import asyncio
import os
import socket
import threading

import pytest
import torch

from sync.buckets import views
from sync.channel import Channel
from sync.messages import Begin, Bucket, Commit, Done, Entry, Failed
from sync.push import SwapError, SyncConfig, Wire, push
from sync.quantize import Fp8Config, dequantize
from sync.receive import Receiver
from sync.shm import SharedBytes, layout

WEIGHTS = {
    "model.embed_tokens.weight": torch.randn(50, 128),
    "model.layers.0.self_attn.q_proj.weight": torch.randn(256, 128),
    "model.layers.0.mlp.down_proj.weight": torch.randn(128, 300),
    "model.norm.weight": torch.randn(128),
}
BF16 = Wire(Fp8Config(enabled=False), 1, torch.bfloat16)
FP8 = Wire(Fp8Config(), 1, torch.float32)


class Keeper:
    """An updater that stores the tensors of the open session."""

    def __init__(self):
        self.loaded: dict[str, torch.Tensor] = {}
        self.calls: list[str] = []
        self.fail_on = ""
        self.open = False

    def _call(self, name):
        self.calls.append(name)
        if (name == "begin") == self.open and name != "flush":
            raise RuntimeError(f"{name} refused: the session is {'open' if self.open else 'closed'}")  # as SGLang does
        if name == self.fail_on:
            self.fail_on = ""
            raise RuntimeError(f"{name} broke")

    async def begin(self, version):
        self._call("begin")
        self.open = True

    async def load(self, staging, entries, verify):
        self._call("load")
        self.loaded |= {name: tensor.clone() for name, tensor in views(staging, entries)}

    async def end(self):
        self._call("end")
        self.open = False

    async def verified(self):
        self._call("verified")
        return len(self.loaded)

    async def flush(self):
        self._call("flush")


class Link:
    """Rank and engine in one process: every request goes straight to the receiver, past a `damage` function."""

    def __init__(self, nbytes=1 << 20):
        self.staging = SharedBytes(nbytes)
        self.keeper = Keeper()
        self.receiver = Receiver(self.staging, self.keeper)
        self.damage = lambda message: message
        self.sent: list[object] = []

    def request(self, message, timeout):
        self.sent.append(message)
        message = self.damage(message)
        return Done() if message is None else asyncio.run(self.receiver.handle(message))


def swap(link, wire=FP8, version=1, agree=lambda ok: ok, weights=None, **config):
    return push(lambda: (weights or WEIGHTS).items(), link, version, wire, SyncConfig(**config), agree, verify=True)


def test_every_tensor_arrives_and_is_counted():
    link = Link()
    stats = swap(link)
    q = "model.layers.0.self_attn.q_proj.weight"
    assert set(link.keeper.loaded) == {*WEIGHTS, q + "_scale_inv", "model.layers.0.mlp.down_proj.weight_scale_inv"}
    torch.testing.assert_close(
        dequantize(link.keeper.loaded[q], link.keeper.loaded[q + "_scale_inv"], "block"),
        WEIGHTS[q],
        rtol=0.07,
        atol=0.02,
    )
    assert torch.equal(link.keeper.loaded["model.norm.weight"], WEIGHTS["model.norm.weight"])
    assert stats["sync/tensors"] == 6 and stats["sync/version"] == 1 == link.receiver.version
    assert stats["sync/bytes"] == sum(t.nbytes for t in link.keeper.loaded.values())
    assert stats["sync/verified_params"] == 6


def test_bf16_wire_sends_the_cast_and_nothing_else():
    link = Link()
    swap(link, BF16)
    assert {n: torch.equal(t, WEIGHTS[n].bfloat16()) for n, t in link.keeper.loaded.items()} == dict.fromkeys(
        WEIGHTS, True
    )


def test_small_staging_makes_many_buckets_with_the_same_result():
    large, small = Link(), Link(nbytes=90_000)
    swap(large)
    swap(small)
    assert sum(isinstance(m, Bucket) for m in large.sent) == 1 < sum(isinstance(m, Bucket) for m in small.sent)
    for name, tensor in large.keeper.loaded.items():
        assert torch.equal(tensor.view(torch.uint8), small.keeper.loaded[name].view(torch.uint8)), name


def test_a_tensor_larger_than_the_staging_names_the_remedy():
    with pytest.raises(ValueError, match=r"q_proj.*raise sync\.bucket_mb"):
        swap(Link(nbytes=30_000))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.0.mlp.down_proj.weight"])
def test_a_nan_is_never_shipped(bad, name):
    weights = {k: v.clone() for k, v in WEIGHTS.items()}
    weights[name].view(-1)[3] = bad
    link = Link()
    with pytest.raises(ValueError, match=name):
        swap(link, weights=weights)
    assert link.receiver.version is None


def flip_a_byte(link):
    def damage(message):
        if isinstance(message, Bucket):
            link.staging.array(0, "uint8", (4,))[1] ^= 1
        return message

    return damage


@pytest.mark.parametrize("step", ["begin", "load", "end", "verified", "flush"])
def test_a_step_that_fails_once_is_retried_whole(step):
    link = Link()
    swap(link, version=1)
    link.keeper.fail_on, link.keeper.loaded, link.sent = step, {}, []
    stats = swap(link, version=2)
    assert stats["sync/retries"] == 1 and link.receiver.version == 2
    assert len(link.keeper.loaded) == 6 and sum(isinstance(m, Begin) for m in link.sent) == 2


def test_damage_that_stays_keeps_the_fence_up():
    for damage, reason in [
        (flip_a_byte, "checksum differs"),
        (lambda _: lambda m: None if isinstance(m, Bucket) else m, "received 0 tensors, 0 bytes; sent 6"),
    ]:
        link = Link()
        swap(link, version=1)
        link.damage = damage(link)
        with pytest.raises(SwapError, match=rf"version 2 failed 3 times.*{reason}"):
            swap(link, version=2, attempts=3)
        assert link.receiver.version is None, "an engine that may hold mixed weights must stay fenced"


def test_no_rank_commits_when_another_one_failed():
    link = Link()
    with pytest.raises(SwapError, match="another rank"):
        swap(link, agree=lambda ok: False)
    assert link.receiver.version is None and not any(isinstance(m, Commit) for m in link.sent)


def test_weights_are_walked_to_the_end_after_a_failure():
    link, walked = Link(), []
    link.keeper.fail_on = "begin"

    def weights():
        for item in WEIGHTS.items():
            walked.append(item[0])
            yield item

    push(weights, link, 1, FP8, SyncConfig(), lambda ok: ok, verify=False)
    assert walked == 2 * list(WEIGHTS)  # else the other ranks would wait in a collective for ever


def test_messages_out_of_order_are_refused():
    link = Link()
    for message in (Bucket([], 0, 0), Commit(1, 0, 0)):
        reply = link.request(message, 1)
        assert isinstance(reply, Failed) and "send Begin first" in reply.reason


def test_channel_carries_messages_and_descriptors():
    left, right = socket.socketpair()
    a, b = Channel(left, Begin | Done), Channel(right, Begin | Bucket)
    memory = SharedBytes(1000)
    memory.array(0, "uint8", (3,))[:] = [1, 2, 3]
    a.send(Begin(7, True), (memory.fd,))
    message, fds = b.receive(1)
    assert message == Begin(7, True)
    assert SharedBytes.attach(fds[0]).array(0, "uint8", (3,)).tolist() == [1, 2, 3]
    large = Bucket([Entry(f"layer.{i}.weight", "bfloat16", (i, 128), i * 16) for i in range(20_000)], 5, 1 << 63)
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
