"""The trainer's end of the swap: quantize on the shard, send every engine process what its plan names, commit together.

    per bucket:  quantize this rank's shares ─► pack a segment per engine process ─► send and receive ─► Bucket

Each rank fills the staging buffer of the one engine process that shares its GPU. While that process copies bucket k out
of one half, bucket k + 1 is quantized and gathered into the other.
"""

import hashlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from sync.buckets import checksum
from sync.encode import Edges, Wire, encode, exchange_edges
from sync.fields import doc
from sync.layout import Bucket as BucketPlan
from sync.layout import Form, Layout, build, entries_of
from sync.messages import Attach, Begin, Bucket, Commit, Done, Failed, FromEngine, Record, Recorded, ToEngine
from sync.plan import Arrivals, Recording, copies, final_plans
from sync.shards import Shard
from sync.staging import HALVES, Staging

_UNFIT = "unfit: "  # begins a problem that no retry can mend


class SyncConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How weights travel from the trainer to the engine."""

    method: Annotated[
        Literal["plan", "stock"],
        doc("plan: replay the copies that SGLang's loader was seen to make. stock: run its loader in every swap."),
    ] = "plan"
    bucket_mb: Annotated[
        int,
        doc("Largest bucket. A rank holds two in its staging buffer, and a third where it packs.", unit="MiB", ge=1),
    ] = 512
    verify: Annotated[
        Literal["always", "first", "off"],
        doc(
            "Compare every engine parameter with what SGLang's own loader would have written: after each swap, after"
            " the first of an engine process, never. Transport checksums are always compared."
        ),
    ] = "first"
    attempts: Annotated[int, doc("Whole swaps tried before the run stops.", unit="swaps", ge=1)] = 2
    timeout_s: Annotated[float, doc("Longest wait for the engine to take one bucket or commit.", unit="s", gt=0)] = (
        600.0
    )


class SwapError(RuntimeError):
    """No attempt succeeded: some engine is fenced and must be restarted or the run stopped."""


class Engine(Protocol):
    """The engine as the swap sees it."""

    unplanned: bool  # a fresh process, which has recorded nothing yet
    team: int  # ranks that this engine's processes share GPUs with; all of them post and wait together

    def post(self, message: ToEngine | None) -> None:
        """Sends. An engine that died or hangs answers `Failed` to the next `reply`, and so does one of several ranks
        that was sent None: one of them has a problem."""
        ...

    def reply(self, timeout: float) -> FromEngine: ...


class Pusher:
    """One rank's end. It owns the staging buffer and the layout, which live as long as the run."""

    def __init__(
        self,
        engine: Engine,
        wire: Wire,
        config: SyncConfig,
        directory: Path,
        device: torch.device,
        group: dist.ProcessGroup | None,
        agree: Callable[[str], str],
    ):
        """`group`: the ranks that hold one copy of the model together (None: all). `agree(problem)` returns the first
        problem of any rank of the run, "" if none has one. Arrays for the engine are written to `directory`."""
        self.engine, self.wire, self.config, self.directory = engine, wire, config, directory
        self.group, self.agree = group, agree
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        self.staging = Staging(config.bucket_mb * 2**20, device)
        self.workspace = torch.empty(0, dtype=torch.uint8, device=device)
        self.recording: Recording | None = None
        self.forms: list[Form] = []
        self.layout: Layout | None = None
        self.stock: dict[str, str] = {}  # tensors that go through SGLang's own loader in every swap, and why

    def push(self, shards: Callable[[], Sequence[Shard]], version: int, verify: bool) -> dict[str, float]:
        """All ranks. Replaces all weights of the engines by `shards()` and returns the `sync/…` metrics.

        Raises SwapError after the last attempt, and ValueError, on all ranks, for a parameter that cannot be shipped.
        """
        began, problem = time.perf_counter(), ""
        for attempt in range(self.config.attempts):
            swap = _Swap(self, version, verify)
            swap.run(shards())
            problem = self.agree(swap.problem)
            if not problem:
                swap.commit()
                problem = self.agree(swap.problem)
            if not problem:
                times = {"sync/swap_s": time.perf_counter() - began, "sync/retries": attempt}
                return times | swap.metrics()
            if _UNFIT in problem:
                raise ValueError(problem.replace(_UNFIT, ""))
            self.engine.unplanned = True  # begin from nothing: the engine's parameters may have changed their layout
        raise SwapError(f"swap to version {version} failed {self.config.attempts} times, last: {problem}")

    def make_plan(self, shards: Sequence[Shard], request: Callable[[ToEngine], FromEngine | None]) -> None:
        """All ranks of the group. Records what is not recorded yet, and lays out every later swap.

        `layout` is None afterwards if an engine could not record.
        """
        self.layout = None
        self.forms = [self.wire.form(shard) for shard in shards]
        entries = entries_of(self.forms)
        if self.engine.unplanned:
            self.recording = None
            reply = request(Record(entries, self.config.method == "plan"))
            if isinstance(reply, Recorded):
                self.recording = msgspec.msgpack.decode(Path(reply.files[0]).read_bytes(), type=Recording)
        recordings = _share(self.recording, self.group)
        if recordings is None:
            return
        plans, self.stock = final_plans(entries, recordings, self.engine.team)
        layout = build(self.forms, plans, self.staging.half, self.rank)
        self.workspace.resize_(max((bucket.scratch(self.rank) for bucket in layout.buckets), default=0))
        self.directory.mkdir(parents=True, exist_ok=True)
        file = (self.directory / f"arrivals-rank{dist.get_rank()}.msgpack").absolute()
        arrivals = Arrivals(layout.arrivals.tobytes(), [bucket.nbytes for bucket in layout.buckets])
        file.write_bytes(msgspec.msgpack.encode(arrivals))
        if isinstance(request(Attach([self.staging.handle], [str(file)])), Done):
            self.engine.unplanned = False
            self.layout = layout


class _Swap:
    """One attempt on one rank. After a problem only the collectives go on; the engine stays fenced."""

    def __init__(self, pusher: Pusher, version: int, verify: bool):
        self.p, self.version, self.verify = pusher, version, verify
        self.problem = ""
        self.unanswered = self.verified = 0
        self.quantize_s = self.exchange_s = self.engine_s = self.plan_s = 0.0

    def run(self, shards: Sequence[Shard]) -> None:
        p = self.p
        self.request(Begin(self.version, self.verify))
        began = time.perf_counter()
        if p.agree("some engine has no plan" if p.engine.unplanned or p.layout is None else ""):
            p.make_plan(shards, self.request)
            self.plan_s = time.perf_counter() - began
            if p.agree(self.problem):
                p.layout = None  # on every rank: the next attempt begins with a plan
                return
        assert p.layout is not None
        edges = exchange_edges(p.wire, p.forms, shards, p.rank, p.group)
        for number, bucket in enumerate(p.layout.buckets):
            self.settle(HALVES - 1)  # the engine has taken the bucket that lay in this half before
            half = p.staging.halves[number % HALVES]
            self.fill(half, bucket, shards, edges)
            p.staging.ready()
            self.post(Bucket(number, [checksum(half[: bucket.nbytes])]))
        self.settle(0)

    def commit(self) -> None:
        assert self.p.layout is not None
        buckets = self.p.layout.buckets
        received = sum(nbytes for bucket in buckets for _, nbytes in bucket.receive)
        reply = self.request(Commit(self.version, len(buckets), [received]))
        self.verified = reply.verified if isinstance(reply, Done) else 0

    def metrics(self) -> dict[str, float]:
        layout = self.p.layout
        assert layout is not None
        return {
            "sync/version": self.version,
            "sync/bytes": sum(nbytes for bucket in layout.buckets for _, nbytes in bucket.receive),
            "sync/bytes_sent": layout.bytes_sent,
            "sync/bytes_received": layout.bytes_received,
            "sync/buckets": len(layout.buckets),
            "sync/tensors": sum(len(form.codes) + len(form.scales) for form in self.p.forms),
            "sync/stock_tensors": len(self.p.stock),
            "sync/verified_params": self.verified,
            "sync/plan_s": self.plan_s,
            "sync/quantize_s": self.quantize_s,
            "sync/exchange_s": self.exchange_s,
            "sync/engine_s": self.engine_s,
        }

    # ---------------------------------------------------------------- one bucket

    def fill(self, half: Tensor, bucket: BucketPlan, shards: Sequence[Shard], edges: Edges) -> None:
        """All ranks of the group. Quantizes this rank's shares, and makes `half` this rank's whole bucket."""
        p = self.p
        start, nbytes = bucket.receive[p.rank]
        mine = half[start : start + nbytes]
        space, end = (mine, 0) if bucket.is_identity(p.rank) else (p.workspace[: bucket.workspace], bucket.workspace)
        began = time.perf_counter()
        for share in bucket.shares:
            form, shard = p.forms[share.form], shards[share.form]
            try:
                encode(p.wire, share, form, shard, p.rank, edges, space)
            except ValueError as error:
                self.problem = self.problem or _UNFIT + str(error)
        segments: dict[int, Tensor] = {}  # by packing: engine processes with the same plan get the same bytes
        for process in sorted(range(p.ranks), key=lambda process: process != p.rank):
            strips, size = bucket.pack[process], bucket.send[process]
            if id(strips) in segments:
                continue
            segments[id(strips)] = segment = mine if process == p.rank else p.workspace[end : end + size]
            end += 0 if process == p.rank else size
            if segment is not space and size:
                there, here = copies(strips, segment, [space])
                torch._foreach_copy_(there, here)  # type: ignore[reportPrivateImportUsage]
        self.quantize_s += time.perf_counter() - began
        began = time.perf_counter()
        self.exchange(half, bucket, [segments[id(strips)] for strips in bucket.pack])
        self.exchange_s += time.perf_counter() - began

    def exchange(self, half: Tensor, bucket: BucketPlan, segments: list[Tensor]) -> None:
        """All ranks of the group. Every segment goes from the rank that made it to the rank that needs it."""
        p, operations = self.p, []
        for other in range(p.ranks):
            if other == p.rank:
                continue
            peer = other if p.group is None else dist.get_global_rank(p.group, other)
            start, nbytes = bucket.receive[other]
            if nbytes:
                operations.append(dist.P2POp(dist.irecv, half[start : start + nbytes], peer, p.group))
            if bucket.send[other]:
                operations.append(dist.P2POp(dist.isend, segments[other], peer, p.group))
        if operations:
            for work in dist.batch_isend_irecv(operations):
                work.wait()

    # ---------------------------------------------------------------- the engine

    def request(self, message: ToEngine) -> FromEngine | None:
        """Sends and waits; None after a problem."""
        self.post(message)
        return self.settle(0)

    def post(self, message: ToEngine) -> None:
        if not self.problem or self.p.engine.team > 1:
            self.p.engine.post(None if self.problem else message)
            self.unanswered += 1

    def settle(self, unanswered: int) -> FromEngine | None:
        """Waits until at most so many messages have no reply; the last reply."""
        reply, began = None, time.perf_counter()
        while self.unanswered > unanswered:
            reply = self.p.engine.reply(self.p.config.timeout_s)
            self.unanswered -= 1
            if isinstance(reply, Failed):
                self.problem, reply = self.problem or reply.reason, None
        self.engine_s += time.perf_counter() - began
        return reply


def _share(recording: Recording | None, group: dist.ProcessGroup | None) -> list[Recording] | None:
    """The recordings of all ranks of the group; equal ones are the same object. None if any rank has none.

    Only one of each kind travels: without tensor parallelism all engines have the same.
    """
    ranks = dist.get_world_size(group)
    key = None if recording is None else hashlib.blake2b(msgspec.msgpack.encode(recording)).hexdigest()
    keys: list[Any] = [None] * ranks
    dist.all_gather_object(keys, key, group)
    if None in keys:
        return None
    kinds: dict[str, Any] = {}
    for rank, kind in enumerate(keys):
        if kind not in kinds:
            box = [recording if kind == key else None]
            dist.broadcast_object_list(box, dist.get_global_rank(group, rank) if group else rank, group)
            kinds[kind] = box[0]
    return [kinds[kind] for kind in keys]
