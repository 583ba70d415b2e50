"""The engine's end of the swap without an engine: the fence, and every message in every state.

The updater here notes what it is told and refuses what SGLang would refuse. The real one is behind the same protocol in
test_engine_host.py.
"""

import asyncio

import pytest

from sync.messages import Attach, Begin, Bucket, Commit, Done, Entry, Failed, Record, Recorded
from sync.receive import Receiver

ENTRIES = [Entry("w", "float32", (2, 2))]
BEGIN, RECORD, ATTACH = Begin(7, True), Record(ENTRIES, True), Attach([["memfd", "x"]], ["a"])
BUCKETS, COMMIT = [Bucket(0, [11]), Bucket(1, [12])], Commit(7, 2, [16])
PLAN = [BEGIN, RECORD, ATTACH]
SWAP = [*BUCKETS, COMMIT]


class Keeper:
    """An updater that notes its calls, and fails at the call named `fail`, once."""

    def __init__(self, fail=""):
        self.calls, self.fail, self.open = [], fail, False

    def _call(self, name, *arguments):
        self.calls.append((name, *arguments))
        if (name == "begin") == self.open and name != "flush":
            raise RuntimeError(f"{name} refused: the session is {'open' if self.open else 'closed'}")  # as SGLang does
        if name == self.fail:
            self.fail = ""
            raise RuntimeError(f"{name} broke")

    async def begin(self, version):
        self._call("begin", version)
        self.open = True

    async def record(self, entries, plan):
        self._call("record", entries, plan)
        return ["r0"]

    async def attach(self, stagings, files):
        self._call("attach", stagings, files)

    async def bucket(self, number, checksums, verify):
        self._call("bucket", number, checksums, verify)

    async def finish(self, nbytes, verify):
        self._call("finish", nbytes, verify)
        return 5

    async def end(self):
        self._call("end")
        self.open = False

    async def flush(self):
        self._call("flush")


def send(receiver, *messages):
    async def all_of_them():
        return [await receiver.handle(message) for message in messages]

    return asyncio.run(all_of_them())


def attached(fail=""):
    receiver = Receiver(keeper := Keeper(fail))
    assert send(receiver, *PLAN, *SWAP)[-1] == Done(verified=5) or fail
    keeper.calls.clear()
    return receiver, keeper


def test_the_first_swap():
    receiver = Receiver(keeper := Keeper())
    assert send(receiver, *PLAN) == [Done(), Recorded(["r0"]), Done()]
    assert receiver.version is None
    assert send(receiver, *SWAP) == [Done(), Done(), Done(verified=5)]
    assert receiver.version == 7
    assert keeper.calls == [
        ("begin", 7), ("record", ENTRIES, True), ("attach", [["memfd", "x"]], ["a"]), ("bucket", 0, [11], True),
        ("bucket", 1, [12], True), ("finish", [16], True), ("end",), ("flush",),
    ]  # fmt: skip


def test_later_swaps_need_no_plan_and_verify_only_when_asked():
    receiver, keeper = attached()
    assert send(receiver, Begin(8, False), *BUCKETS, Commit(8, 2, [16])) == [Done(), Done(), Done(), Done(verified=5)]
    assert ("finish", [16], False) in keeper.calls and receiver.version == 8


@pytest.mark.parametrize("message", [RECORD, ATTACH, BUCKETS[0], COMMIT])
@pytest.mark.parametrize("ready", [False, True])
def test_nothing_happens_outside_a_swap(message, ready):
    receiver, keeper = attached() if ready else (Receiver(k := Keeper()), k)
    version = receiver.version
    assert send(receiver, message) == [Failed("RuntimeError: no swap is open: send Begin first")]
    assert keeper.calls == [] and receiver.version == version


@pytest.mark.parametrize(
    ("before", "message", "reason"),
    [
        ([], BUCKETS[0], "no staging buffer is attached"),
        ([RECORD], BUCKETS[0], "no staging buffer is attached"),
        ([RECORD, ATTACH, RECORD], BUCKETS[0], "no staging buffer is attached"),
        ([RECORD, ATTACH], BUCKETS[1], "bucket 1 came where bucket 0 was due"),
        ([RECORD, ATTACH, BUCKETS[0]], BUCKETS[0], "bucket 0 came where bucket 1 was due"),
        ([RECORD, ATTACH, BUCKETS[0]], RECORD, "Record must come before the first bucket"),
        ([RECORD, ATTACH, BUCKETS[0]], ATTACH, "Attach must come before the first bucket"),
        ([RECORD, ATTACH, BUCKETS[0]], COMMIT, "received 1 buckets; sent 2"),
        ([RECORD, ATTACH, *BUCKETS], Commit(8, 2, [16]), "swap to version 7 cannot be committed as version 8"),
    ],
)
def test_messages_out_of_order_end_the_swap(before, message, reason):
    receiver = Receiver(Keeper())
    *good, last = send(receiver, BEGIN, *before, message)
    assert not any(isinstance(reply, Failed) for reply in good)
    assert isinstance(last, Failed) and reason in last.reason
    for late in (BUCKETS[0], COMMIT):
        assert send(receiver, late) == [Failed("RuntimeError: no swap is open: send Begin first")]
    assert receiver.version is None
    assert send(receiver, *PLAN, *SWAP)[-1] == Done(verified=5)


@pytest.mark.parametrize("step", ["begin", "record", "attach", "bucket", "finish", "end", "flush"])
def test_whatever_breaks_keeps_the_fence_up_until_a_whole_swap(step):
    receiver, keeper = attached()
    keeper.fail = step
    replies = send(receiver, *PLAN, *SWAP)
    assert any(isinstance(r, Failed) and f"{step} broke" in r.reason for r in replies)
    assert isinstance(replies[-1], Failed) and receiver.version is None
    assert send(receiver, *PLAN, *SWAP)[-1] == Done(verified=5)
    assert receiver.version == 7 and not keeper.open


def test_begin_raises_the_fence_and_closes_a_session_that_was_left_open():
    receiver, keeper = attached()
    send(receiver, BEGIN)
    assert receiver.version is None
    assert send(receiver, BEGIN) == [Done()] and keeper.calls == [("begin", 7), ("end",), ("begin", 7)]


def test_a_failed_record_forgets_what_was_attached():
    receiver, keeper = attached()
    keeper.fail = "record"
    send(receiver, BEGIN, RECORD)
    reply = send(receiver, BEGIN, BUCKETS[0])[1]
    assert isinstance(reply, Failed) and "attached" in reply.reason
