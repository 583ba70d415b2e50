"""Runs inside SGLang's scheduler processes: notes what `load_weights` would copy where, without moving a byte.

The loader gets phantom tensors: address ranges that hold nothing. A dispatch mode sees every operation on them. Views
pass; a copy into a parameter is swallowed and noted as blocks of the copy plan (sync/plan.py); whatever else touches a
phantom computes with its bytes, so that tensor cannot be planned and stays with SGLang's own loader ("stock"). The
engine's parameters and buffers are never written: it may hold good weights.
"""

import hashlib
import itertools
import math
import mmap
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from sync.messages import Entry
from sync.plan import BLOCK, Blocks, Recording, row_form

_ALIGN = 64  # bytes; phantoms start there
_MAP_NORESERVE = 0x4000  # missing in Python's mmap before 3.13
_MOST_BLOCKS = 4096  # of one copy; more is no plan but a loop
_COPY = torch.ops.aten.copy_.default


def parameters_of(model: torch.nn.Module) -> dict[str, Tensor]:
    """The model's parameters by name. Their numbers in the plan are their positions here."""
    return {name: parameter.data for name, parameter in model.named_parameters()}


def numbers_by_storage(parameters: dict[str, Tensor]) -> dict[int, int]:
    """Address of a storage → number of the first parameter that lies in it. Tied parameters share one."""
    numbers: dict[int, int] = {}
    for number, tensor in enumerate(parameters.values()):
        if tensor.numel():
            numbers.setdefault(tensor.untyped_storage().data_ptr(), number)
    return numbers


def fingerprint(parameters: dict[str, Tensor]) -> str:
    """Of everything about the parameters that a plan depends on. Their addresses may change."""
    number = numbers_by_storage(parameters)
    layout = [
        (name, str(t.dtype), tuple(t.shape), t.stride(), t.storage_offset(), number.get(t.untyped_storage().data_ptr()))
        for name, t in parameters.items()
    ]
    return hashlib.sha256(repr(layout).encode()).hexdigest()[:16]


def record(model: torch.nn.Module, entries: list[Entry], plan: bool) -> Recording:
    """Runs `model.load_weights` on phantoms of `entries`. `plan` False: every tensor is stock, nothing is run."""
    parameters = parameters_of(model)
    layout = fingerprint(parameters)
    if not plan:
        return Recording(b"", dict.fromkeys(range(len(entries)), "sync.method = stock"), layout)
    recorder = _Recorder(model, parameters, entries)
    phantoms = recorder.phantoms()
    with recorder, threads_inline():
        model.load_weights(phantoms)  # type: ignore[operator]
    recorder.put_back()
    blocks = recorder.plan()
    return Recording(blocks.tobytes(), dict(sorted(recorder.stock.items())), layout)


@contextmanager
def threads_inline() -> Iterator[None]:
    """Thread pools run what they are given at once: a dispatch mode sees the operations of its own thread only.

    Some loaders (DeepSeek, LongCat) hand the copies of CPU tensors to a pool.
    """

    def submit(_: ThreadPoolExecutor, run: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "Future[Any]":
        future: Future[Any] = Future()
        try:
            future.set_result(run(*args, **kwargs))
        except BaseException as error:  # the loader gets it where it expects it: from the future
            future.set_exception(error)
        return future

    with mock.patch.object(ThreadPoolExecutor, "submit", submit):
        yield


class _Recorder(TorchDispatchMode):
    def __init__(self, model: torch.nn.Module, parameters: dict[str, Tensor], entries: list[Entry]):
        super().__init__()
        self.model, self.parameters, self.entries = model, parameters, entries
        self.numbers = numbers_by_storage(parameters)
        self.buffers = {t.untyped_storage().data_ptr() for _, t in model.named_buffers() if t.numel()}
        self.forms = [row_form(entry) for entry in entries]
        sizes = np.array([-(-rows * width // _ALIGN) * _ALIGN for rows, width in self.forms], np.int64)
        self.starts = (np.cumsum(sizes) - sizes).tolist()
        self.phantom = _phantom(int(sizes.sum()), next(iter(parameters.values())).device)
        self.base = self.phantom.untyped_storage().data_ptr()
        self.noted: list[tuple[int, ...]] = []  # rows of sync.plan.BLOCK
        self.stock: dict[int, str] = {}  # entry → why
        self.computed: dict[int, str] = {}  # parameter that is written otherwise than by copies → the operation

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing here is compiled; torch's guard costs a quarter of the recording

    def phantoms(self) -> list[tuple[str, Tensor]]:
        typed = {dtype: self.phantom.view(getattr(torch, dtype)) for dtype in {entry.dtype for entry in self.entries}}
        named = []
        for entry, start in zip(self.entries, self.starts):
            phantom = typed[entry.dtype]
            strides = [math.prod(entry.shape[i + 1 :]) for i in range(len(entry.shape))]
            named.append((entry.name, phantom.as_strided(entry.shape, strides, start // phantom.itemsize)))
        return named

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _COPY and self._copy(args[0], args[1]):
            return args[0]
        if func.is_view:
            return func(*args, **(kwargs or {}))
        return self._compute(func, args, kwargs or {})

    def _entry(self, tensor: Tensor) -> int | None:
        """Number of the entry whose phantom this is a view of."""
        if tensor.untyped_storage().data_ptr() != self.base:
            return None
        return bisect_right(self.starts, tensor.data_ptr() - self.base) - 1

    def _copy(self, target: Tensor, source: Tensor) -> bool:
        """Notes a plain copy of a phantom into a parameter; False for every other copy."""
        if not target.numel():
            return True
        number = self.numbers.get(target.untyped_storage().data_ptr())
        entry = None if number is None else self._entry(source)
        if number is None or entry is None:
            return False
        if source.dtype != target.dtype:
            self._keep(entry, f"converted from {source.dtype} to {target.dtype}")
            self.computed.setdefault(number, "aten.copy_ with a conversion")
            return True
        offset = source.data_ptr() - self.base - self.starts[entry]
        at = int(target.storage_offset()) * target.itemsize
        try:
            rectangles = _rectangles(_moves(target, source), self.forms[entry][1], offset, at)
        except ValueError as error:
            self._keep(entry, str(error))
            self.computed.setdefault(number, f"aten.copy_ that is {error}")
            return True
        self.noted += [(entry, number, *rectangle) for rectangle in rectangles]
        return True

    def _compute(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Runs an operation that is no view, on zeros in place of phantoms, unless it writes into the model."""

        def replace(value: Any) -> Any:
            if isinstance(value, list | tuple):
                return type(value)(map(replace, value))
            if not isinstance(value, Tensor) or (entry := self._entry(value)) is None:
                return value
            self._keep(entry, f"computed with: {func}")
            return torch.zeros(value.shape, dtype=value.dtype, device=value.device)

        targets = [t for t in written(func, args, kwargs) if t.numel()]
        args, kwargs = replace(args), {key: replace(value) for key, value in kwargs.items()}
        storages = [t.untyped_storage().data_ptr() for t in targets]
        self.computed |= {self.numbers[s]: str(func) for s in storages if s in self.numbers}
        if not any(s in self.numbers or s in self.buffers for s in storages):
            return func(*args, **kwargs)
        results = len(func._schema.returns)
        return None if not results else targets[0] if results == 1 else tuple(targets)

    def _keep(self, entry: int, why: str) -> None:
        self.stock.setdefault(entry, why)

    def put_back(self) -> None:
        """Undoes `parameter.data = tensor`, which no dispatch mode sees."""
        for (name, parameter), before in zip(self.model.named_parameters(), self.parameters.values(), strict=True):
            if parameter.data_ptr() != before.data_ptr():
                if (entry := self._entry(parameter.data)) is not None:
                    self._keep(entry, f"becomes the data of {name}")
                self.computed[list(self.parameters).index(name)] = "an exchange of its data"
                parameter.data = before

    def plan(self) -> Blocks:
        """The noted blocks of all entries that are plainly copied. Completes `stock`."""
        blocks, names = np.array(list(dict.fromkeys(self.noted)), BLOCK), list(self.parameters)
        for entry, number in blocks[["tensor", "param"]].tolist():
            if number in self.computed:
                self._keep(entry, f"{names[number]} is also written by {self.computed[number]}")
        for what, groups in (("reads", _by(blocks, "tensor")), ("writes", _by(blocks, "param"))):
            for group in groups:
                for entry in _overlapping(group, what):
                    self._keep(entry, f"the loader {what} some of the same bytes twice")
        return blocks[~np.isin(blocks["tensor"], list(self.stock))]


def _phantom(nbytes: int, device: torch.device) -> Tensor:
    """uint8 tensor over addresses that hold nothing: untouched pages cost no memory."""
    assert device.type in ("cpu", "cuda"), device
    memory = mmap.mmap(-1, max(nbytes, _ALIGN), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
    return torch.frombuffer(memory, dtype=torch.uint8)  # keeps `memory`


def written(func: Any, args: Any, kwargs: dict[str, Any]) -> Iterable[Tensor]:
    """The tensors among the arguments that an operation writes."""
    if not func._schema.is_mutable:
        return
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            yield from value if isinstance(value, list | tuple) else () if value is None else (value,)


Move = tuple[int, int, int]  # elements along a dimension, bytes between them in the source and in the target


def _moves(target: Tensor, source: Tensor) -> list[Move]:
    """The dimensions of a copy, outermost first, joined where both sides allow; (bytes, 1, 1) is the last.

    Raises ValueError for a copy that is not made of runs of bytes.
    """
    size = target.itemsize
    if target.shape == source.shape and target.is_contiguous() and source.is_contiguous():
        return [(target.numel() * size, 1, 1)]
    moves = [
        (n, s * size, t * size) for n, s, t in zip(target.shape, source.expand_as(target).stride(), target.stride())
    ]
    moves = sorted((move for move in moves if move[0] > 1), key=lambda move: move[1:], reverse=True)
    if any(s == 0 for _, s, _ in moves):
        raise ValueError("broadcast")
    joined: list[Move] = []
    for n, s, t in [*moves, (size, 1, 1)]:
        if joined and joined[-1][1:] == (n * s, n * t):
            joined[-1] = (joined[-1][0] * n, s, t)
        else:
            joined.append((n, s, t))
    return joined


def _rectangles(moves: list[Move], row: int, source: int, target: int) -> list[tuple[int, ...]]:
    """(row, rows, column, width, target, step) of a copy from byte `source` of a tensor with `row` bytes per row.

    Raises ValueError if it takes too many, or moves single elements of a row to places that do not follow each other.
    """
    *outer, (run, _, _) = moves
    if outer and outer[-1][1] == run < row:
        raise ValueError("transposed or strided")
    rows, step = 1, run
    if outer and outer[-1][1] == row and source % row + run <= row:  # one run in each of consecutive rows
        rows, _, step = outer.pop()
    if (count := math.prod(n for n, _, _ in outer)) > _MOST_BLOCKS:
        raise ValueError(f"scattered over {count} places")
    found = []
    for index in itertools.product(*(range(n) for n, _, _ in outer)):
        s = source + sum(i * move[1] for i, move in zip(index, outer))
        t = target + sum(i * move[2] for i, move in zip(index, outer))
        if s % row + run <= row:
            found.append((s // row, rows, s % row, run, t, step))
        else:
            found += _split(s, s + run, row, t)
    return found


def _split(begin: int, end: int, row: int, target: int) -> Iterator[tuple[int, ...]]:
    """The same of one run of bytes over several rows: the end of a row, whole rows, the start of a row."""
    first, last = -(-begin // row) * row, end // row * row  # what whole rows there are
    for low, high in ((begin, first), (first, last), (last, end)):
        if high > low:
            rows, width = ((high - low) // row, row) if low == first else (1, high - low)
            yield low // row, rows, low % row, width, target + low - begin, width


def _by(blocks: Blocks, field: str) -> list[Blocks]:
    """Blocks grouped by a field, without groups of one."""
    ordered = blocks[np.argsort(blocks[field], kind="stable")]
    groups = np.split(ordered, np.flatnonzero(np.diff(ordered[field])) + 1)
    return [group for group in groups if len(group) > 1]


def _overlapping(group: Blocks, what: str) -> set[int]:
    """Entries whose blocks read some byte that another block reads, or write one that another writes.

    Blocks that read exactly the same bytes are fine: that tensor has several targets.
    """
    rectangles: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for b in group.tolist():
        tensor, _, row, rows, column, width, target, step = b
        if what == "reads":
            rectangles[row, row + rows, column, column + width].append(tensor)
        else:
            step = step if rows > 1 else 0
            rectangles[target, target + (rows - 1) * step + width, step, width].append(tensor)
    found: set[int] = set()
    active: list[tuple[int, ...]] = []
    for here in sorted(rectangles):
        active = [other for other in active if other[1] > here[0]]
        if what == "writes" and len(rectangles[here]) > 1:
            found.update(rectangles[here])
        for other in active:
            collide = _columns_meet if what == "reads" else _strided_meet
            if collide(other, here):
                found.update(rectangles[other], rectangles[here])
        active.append(here)
    return found


def _columns_meet(a: tuple[int, ...], b: tuple[int, ...]) -> bool:
    return a[2] < b[3] and b[2] < a[3]


def _strided_meet(a: tuple[int, ...], b: tuple[int, ...]) -> bool:
    """`a` starts no later than `b`, and ends after b's start: do their rows meet?"""
    (start, _, step, width), (other_start, _, other_step, other_width) = a, b
    if step != other_step and other_step:
        return True  # rows at different steps: say so to be safe
    if not step:
        return True
    shift = (other_start - start) % step
    return shift < width or shift + other_width > step
