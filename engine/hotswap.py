"""Runs inside SGLang's scheduler processes: makes the copy plan, takes the buckets of a swap, proves what was written.

SGLang calls `load` as a custom weight loader, once per command of engine/updater.py. A swap is Take, Take, …, Finish:
each Take checks the bucket's checksum in the staging buffer and copies its strips into the parameters. Tensors that are
not plainly copied ("stock") are put together from the buckets and go through the model's own `load_weights`.

Whatever goes wrong becomes the reply: an exception here would end SGLang's scheduler, and the engine with it.
"""

import os
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from engine.proof import Notes, NoteWrites, compare
from engine.recorder import fingerprint, parameters_of, record, threads_inline
from sync.buckets import checksum
from sync.messages import Entry
from sync.plan import STOCK, Arrivals, Blocks, Recording, arrivals_of, copies, row_form, strips
from sync.staging import HALVES, attach

_STATE = "_hotswap"  # attribute of the model
_NOT_SENT = 0xA5  # fills what a process does not receive of a tensor, to be noticed if the loader takes it after all


class Note(msgspec.Struct, frozen=True, tag=True):
    """Record the plan. The answer also has the fields of `sync.plan.Recording`."""

    reply: str  # path of the file that answers
    entries: list[Entry]
    plan: bool


class Open(msgspec.Struct, frozen=True, tag=True):
    reply: str
    handle: list[Any]  # of the staging buffer
    arrivals: str  # path of a `sync.plan.Arrivals`


class Take(msgspec.Struct, frozen=True, tag=True):
    """Copy bucket `number` out of half `number % 2`. Bucket 0 begins a swap."""

    reply: str
    number: int
    checksum: int
    verify: bool


class Finish(msgspec.Struct, frozen=True, tag=True):
    reply: str
    nbytes: int  # of all blocks that arrived
    verify: bool


class Reply(msgspec.Struct, frozen=True):
    """The answer to a command."""

    error: str | None = None
    verified: int = 0  # Finish: parameters that hold what SGLang's own loader would have written
    wrong: list[str] = []  # ... and those that do not
    unwritten: list[str] = []  # ... and those with bytes that nobody sent
    copy_s: float = 0.0  # Take: seconds of the copies alone


Command = Note | Open | Take | Finish
NamedTensors = list[tuple[str, Tensor]]


def encode(command: Command) -> NamedTensors:
    """A command as SGLang hands it to `load`: in the name of an empty tensor, which needs no shared memory."""
    return [(msgspec.msgpack.encode(command).decode("latin-1"), torch.empty(0))]


def load(model: torch.nn.Module, named_tensors: NamedTensors) -> None:
    """SGLang's custom weight loader `engine.hotswap.load`."""
    ((text, _),) = named_tensors
    command = msgspec.msgpack.decode(text.encode("latin-1"), type=Command)
    swap = model.__dict__.setdefault(_STATE, Swap(model))
    try:
        with torch.no_grad():
            answer = swap.handle(command)
    except Exception as error:  # the child raises it for the rank
        answer = Reply(error=f"{type(error).__name__}: {error}")
    path = Path(command.reply)
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    partial.write_bytes(msgspec.msgpack.encode(answer))
    partial.rename(path)  # never seen half written


class Swap:
    """What one process knows between commands."""

    def __init__(self, model: torch.nn.Module):
        self.model = model
        self.layout = ""  # fingerprint of the parameters that were recorded
        self.entries: list[Entry] = []
        self.halves: tuple[Tensor, ...] = ()
        self.buckets: list[_Bucket] = []
        self.addresses: list[int] = []  # of the storages that the buckets' copies are bound to
        self.assembly: _Assembly | None = None  # of the open swap
        self.nbytes = 0  # taken in the open swap
        self.notes: Notes = {}

    def handle(self, command: Command) -> Reply | dict[str, Any]:
        match command:
            case Note():
                return {"error": None} | msgspec.structs.asdict(self.note(command.entries, command.plan))
            case Open():
                self.open(command.handle, Path(command.arrivals))
            case Take():
                return self.take(command.number, command.checksum, command.verify)
            case Finish():
                return self.finish(command.nbytes, command.verify)
        return Reply()

    def note(self, entries: list[Entry], plan: bool) -> Recording:
        self.halves, self.buckets = (), []
        recording = record(self.model, entries, plan)
        self.entries, self.layout = entries, recording.layout
        return recording

    def open(self, handle: list[Any], path: Path) -> None:
        arrivals = msgspec.msgpack.decode(path.read_bytes(), type=Arrivals)
        self.halves, self.buckets = (), []  # lets go of the buffer that was attached before
        if torch.cuda.is_available():
            torch.cuda.ipc_collect()
        halves = attach(handle)
        if max(arrivals.nbytes, default=0) > len(halves[0]):
            raise ValueError(f"a bucket has {max(arrivals.nbytes)} bytes, half of the staging {len(halves[0])}")
        self.blocks = arrivals_of(arrivals.blocks)
        self.halves = halves
        self.buckets = [
            _Bucket(self.blocks[self.blocks["bucket"] == number], nbytes, halves[number % HALVES])
            for number, nbytes in enumerate(arrivals.nbytes)
        ]
        self.addresses = []

    def take(self, number: int, digest: int, verify: bool) -> Reply:
        if number == 0:
            self._begin(verify)
        if self.assembly is None:
            raise RuntimeError("no swap has begun")
        bucket = self.buckets[number]
        if checksum(bucket.data) != digest:
            raise ValueError(f"bucket {number} was damaged: its checksum differs over {len(bucket.data)} bytes")
        began = time.perf_counter()
        for targets, sources in bucket.copies:
            torch._foreach_copy_(targets, sources)  # type: ignore[reportPrivateImportUsage]
        copy_s = time.perf_counter() - began
        self.nbytes += bucket.arrived
        complete = self.assembly.add(bucket.blocks, bucket.data)
        named = {number: (self.entries[number].name, complete[number]) for number in sorted(complete)}
        self._load(list(named.values()), [named[n] for n in named if n in self.assembly.stock], verify)
        if bucket.data.is_cuda:
            torch.cuda.synchronize()  # the rank may overwrite the bucket once it has the reply
        return Reply(copy_s=copy_s)

    def finish(self, nbytes: int, verify: bool) -> Reply:
        if self.assembly is None or nbytes != self.nbytes:
            raise ValueError(f"took {self.nbytes} bytes, but {nbytes} were sent")
        self.assembly = None
        if hasattr(self.model, "post_load_weights"):  # what `load_weights` does last: weights made of other weights
            self.model.post_load_weights()  # type: ignore[operator]
        if not verify:
            return Reply()
        notes, self.notes = self.notes, {}
        return Reply(None, *compare(self.model, notes))

    def _begin(self, verify: bool) -> None:
        self.assembly = None
        parameters = parameters_of(self.model)
        if not self.halves or fingerprint(parameters) != self.layout:
            raise RuntimeError("the engine's parameters have another layout than when the plan was recorded")
        addresses = [tensor.untyped_storage().data_ptr() for tensor in parameters.values()]
        if addresses != self.addresses:
            storages = list(map(_storage_bytes, parameters.values()))
            for bucket in self.buckets:
                bucket.bind(storages)
            self.addresses = addresses
        self.assembly = _Assembly(self.entries, self.blocks if verify else self.blocks[self.blocks["param"] == STOCK])
        self.nbytes, self.notes = 0, {}

    def _load(self, named: NamedTensors, stock: NamedTensors, verify: bool) -> None:
        """Gives stock tensors to the model's own loader; with `verify` notes what all should have become."""
        if stock:
            self.model.load_weights(stock)  # type: ignore[operator]
        if verify and named:
            with NoteWrites(self.model, self.notes), threads_inline():
                self.model.load_weights(named)  # type: ignore[operator]


class _Bucket:
    """The copies of one bucket. They stay the same while the parameters stay where they are."""

    def __init__(self, blocks: Blocks, nbytes: int, half: Tensor):
        self.blocks, self.data, self.strips = blocks, half[:nbytes], strips(blocks)
        self.arrived = int((blocks["rows"] * blocks["width"]).sum())
        self.copies: list[tuple[list[Tensor], list[Tensor]]] = []

    def bind(self, storages: list[Tensor]) -> None:
        """`storages`: of every parameter, as uint8. Raises RuntimeError for a strip that leaves its parameter."""
        sources, targets = copies(self.strips, self.data, storages)
        several_rows = (self.strips.rows > 1).tolist()
        self.copies = []
        for kind in (False, True):  # apart: one copy that is not a single run makes torch copy all of a list one by one
            chosen = [i for i, several in enumerate(several_rows) if several == kind]
            if chosen:
                self.copies.append(([targets[i] for i in chosen], [sources[i] for i in chosen]))


class _Assembly:
    """Puts tensors together from the blocks that arrive, in one bucket or several."""

    def __init__(self, entries: list[Entry], blocks: Blocks):
        """`blocks`: all that will arrive of the tensors that are wanted."""
        self.entries = entries
        self.stock = set(blocks["tensor"][blocks["param"] == STOCK].tolist())
        self.missing = np.bincount(blocks["tensor"], minlength=len(entries))  # blocks
        self.nbytes = np.bincount(blocks["tensor"], blocks["rows"] * blocks["width"], minlength=len(entries))
        self.parts: dict[int, Tensor] = {}  # uint8 [rows, bytes] of tensors of which something has arrived

    def add(self, blocks: Blocks, data: Tensor) -> dict[int, Tensor]:
        """Takes the blocks of a bucket; returns the tensors that are complete with it, by their numbers."""
        complete = {}
        wanted = blocks[self.missing[blocks["tensor"]] > 0]
        names = ("tensor", "row", "rows", "column", "width", "offset")
        for number, row, rows, column, width, offset in zip(*(wanted[name].tolist() for name in names)):
            if number not in self.parts:
                self.parts[number] = self._empty(number, data.device)
            target = self.parts[number][row : row + rows, column : column + width]
            target.copy_(data.narrow(0, offset, rows * width).view(rows, width))
            self.missing[number] -= 1
            if not self.missing[number]:
                entry = self.entries[number]
                whole = self.parts.pop(number).view(-1)
                complete[number] = whole.view(getattr(torch, entry.dtype)).view(entry.shape)
        return complete

    def _empty(self, number: int, device: torch.device) -> Tensor:
        rows, width = row_form(self.entries[number])
        part = torch.empty(rows, width, dtype=torch.uint8, device=device)
        return part if self.nbytes[number] == rows * width else part.fill_(_NOT_SENT)


def _storage_bytes(tensor: Tensor) -> Tensor:
    """All bytes of the storage that `tensor` lies in."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())  # type: ignore
