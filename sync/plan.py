"""The copy plan: which bytes of which tensor go where in an engine process.

SGLang's `load_weights` decides where a tensor goes (fused qkv, `w13`, tensor-parallel slices, experts). It is a Python
loop over every name, and its answer is always the same; so it is asked once, under a recorder (engine/recorder.py), and
every later swap copies the recorded blocks.

A block is a rectangle of a tensor in its row form: [..., K] has prod(...) rows of K elements, a vector [N] has N rows
of one element, a scalar one. In the parameter the rows of a block lie `step` bytes apart. All numbers are bytes, but
for rows. An engine process that reads only its slice of a tensor has only that slice in its plan, so nothing else is
sent.
"""

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from sync.messages import Entry

STOCK = -1  # `param` of a block whose tensor goes through SGLang's own loader: it is delivered whole

BLOCK = np.dtype(
    [
        ("tensor", "i4"),  # number of the entry
        ("param", "i4"),  # number of the engine's parameter, or STOCK
        ("row", "i8"),  # first row in the tensor
        ("rows", "i8"),
        ("column", "i8"),  # first byte in each row of the tensor
        ("width", "i8"),  # bytes taken from each row
        ("target", "i8"),  # byte of the parameter's storage where the first row goes
        ("step", "i8"),  # bytes from one row to the next there
    ]
)
ARRIVAL = np.dtype([*BLOCK.descr, ("bucket", "i4"), ("offset", "i8")])  # bytes from the start of the bucket
Blocks = NDArray[np.void]


class Recording(msgspec.Struct, frozen=True):
    """What one engine process needs."""

    blocks: bytes  # of dtype BLOCK
    stock: dict[int, str]  # entries that are not plainly copied, and why
    layout: str  # fingerprint of the parameters' shapes, strides and dtypes


class Arrivals(msgspec.Struct, frozen=True):
    """What one engine process receives in each swap: its blocks, cut and placed in buckets."""

    blocks: bytes  # of dtype ARRIVAL
    nbytes: list[int]  # of each bucket


def row_form(entry: Entry) -> tuple[int, int]:
    """(rows, bytes per row) of a tensor."""
    itemsize = getattr(torch, entry.dtype).itemsize
    size = torch.Size(entry.shape).numel()
    rows = size // entry.shape[-1] if len(entry.shape) > 1 and size else size
    return rows, itemsize * (size // rows if rows else 0)


def blocks_of(data: bytes) -> Blocks:
    return np.frombuffer(data, BLOCK)


def arrivals_of(data: bytes) -> Blocks:
    return np.frombuffer(data, ARRIVAL)


def whole(entries: Sequence[Entry], numbers: list[int]) -> Blocks:
    """Blocks that deliver these entries whole to SGLang's own loader."""
    blocks = np.zeros(len(numbers), BLOCK)
    for block, number in zip(blocks, numbers):
        rows, width = row_form(entries[number])
        block["tensor"], block["param"], block["rows"], block["width"] = number, STOCK, rows, width
    return blocks


class Strips(msgspec.Struct, frozen=True):
    """Copies that an engine process makes from one bucket, as parallel arrays i64."""

    offset: NDArray[np.int64]  # in the bucket; the rows of a strip follow each other there
    param: NDArray[np.int64]
    target: NDArray[np.int64]
    rows: NDArray[np.int64]
    width: NDArray[np.int64]
    step: NDArray[np.int64]  # in the parameter


def strips(arrivals: Blocks) -> Strips:
    """The copies of one bucket, neighbours merged: `arrivals` of dtype ARRIVAL, in any order."""
    a = arrivals[arrivals["param"] != STOCK]
    a = a[np.lexsort((a["offset"], a["param"]))]
    param, offset, target, rows, width, step = (
        a[name].astype(np.int64) for name in ("param", "offset", "target", "rows", "width", "step")
    )
    dense = (step == width) | (rows == 1)
    width = np.where(dense, rows * width, width)
    rows = np.where(dense, 1, rows)
    same = param[1:] == param[:-1]
    follows = (offset[1:] == (offset + rows * width)[:-1]) & (target[1:] == (target + width)[:-1])
    joined = same & follows & (rows[1:] == 1) & (rows[:-1] == 1)
    first = np.flatnonzero(np.r_[True, ~joined]) if len(a) else np.zeros(0, np.int64)
    lengths = np.add.reduceat(width, first) if len(a) else width
    return Strips(
        offset[first], param[first], target[first], rows[first], np.where(rows[first] == 1, lengths, width[first]),
        step[first],
    )  # fmt: skip


def copies(s: Strips, bucket: torch.Tensor, storages: Sequence[torch.Tensor]) -> tuple[list[Any], list[Any]]:
    """Views in the bucket and in the storages (uint8, by number of parameter) for `torch._foreach_copy_`."""
    near, far = [], []
    for offset, param, target, rows, width, step in zip(
        s.offset.tolist(), s.param.tolist(), s.target.tolist(), s.rows.tolist(), s.width.tolist(), s.step.tolist()
    ):
        near.append(bucket[offset : offset + rows * width].view(rows, width))
        far.append(storages[param][target:].as_strided((rows, width), (step, 1)))
    return near, far


def final_plans(
    entries: Sequence[Entry], recordings: Sequence[Recording], team: int = 1
) -> tuple[list[Blocks], dict[str, str]]:
    """The blocks that every engine process gets, and the tensors that go through SGLang's own loader, with the reason.

    A tensor takes that way on all processes if a loader did more than copy it on any, or if the processes of an engine
    did not read all of it: then nobody knows what becomes of the rest. `team` consecutive recordings are those of one
    engine's processes. Equal recordings should be the same object; then so are their plans.
    """
    stock: dict[int, str] = {}
    kinds = {id(recording): blocks_of(recording.blocks) for recording in recordings}
    for first in range(0, len(recordings), team):
        engine = {id(recording): recording for recording in recordings[first : first + team]}
        for recording in engine.values():
            stock |= recording.stock
        read = _read(entries, np.concatenate([kinds[key] for key in engine]))
        for number in np.flatnonzero(read != _sizes(entries)).tolist():
            stock.setdefault(number, "SGLang's loader did not read all of it")
    rest = whole(entries, sorted(stock))
    plans = {
        key: np.concatenate([blocks[~np.isin(blocks["tensor"], list(stock))], rest]) for key, blocks in kinds.items()
    }
    return [plans[id(recording)] for recording in recordings], {entries[i].name: why for i, why in stock.items()}


def _sizes(entries: Sequence[Entry]) -> NDArray[np.int64]:
    return np.array([rows * width for rows, width in map(row_form, entries)], np.int64)


def _read(entries: Sequence[Entry], blocks: Blocks) -> NDArray[np.int64]:
    """Bytes of each entry that are in some block; the same rectangle counts once."""
    source = np.unique(blocks[["tensor", "row", "rows", "column", "width"]])
    return np.bincount(source["tensor"], source["rows"] * source["width"], len(entries)).astype(np.int64)
