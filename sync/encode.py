"""Quantizes on the shard: turns a rank's rows of a parameter into the bytes that the engine gets, without gathering.

A rank's rows may begin and end inside a 128-row block (or, with one scale per tensor, anywhere). The ranks that share
such a block agree on its amax before the swap (`exchange_edges`, a few kilobytes), so codes and scales are exactly
those of the whole tensor. A block's scale is written by the rank that holds its first row.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from sync.layout import Form, Share
from sync.messages import Entry
from sync.quantize import BLOCK, Fp8Config, block_amax, quantize, scale_name
from sync.shards import Piece, Shard

Edges = dict[tuple[int, int, int], Tensor]  # (form, piece, block row) → amax f32 [1, block columns], over all ranks


class Wire(msgspec.Struct, frozen=True):
    """The form in which parameters reach the engine: FP8 codes and scales, or the engine's own dtype."""

    fp8: Fp8Config
    n_layers: int
    dtype: torch.dtype  # of what is not quantized

    def form(self, shard: Shard) -> Form:
        """How a parameter looks on the wire."""
        quantized = {self.fp8.is_quantized(piece.name, piece.shape, self.n_layers) for piece in shard.pieces}
        assert len(quantized) == 1, f"{shard.pieces[0].name} and its neighbours are quantized in part"
        starts = tuple(piece.row for piece in shard.pieces)
        if not quantized.pop():
            dtype = str(self.dtype).removeprefix("torch.")
            codes = tuple(Entry(piece.name, dtype, piece.shape) for piece in shard.pieces)
            return Form(starts, shard.bounds, codes, (), 1)
        codes = tuple(Entry(piece.name, "float8_e4m3fn", piece.shape) for piece in shard.pieces)
        scales = tuple(Entry(scale_name(p.name), "float32", self._scale_shape(p)) for p in shard.pieces)
        height = {"block": BLOCK[0], "rowwise": 1, "tensor": shard.pieces[0].rows}[self.fp8.granularity]
        return Form(starts, shard.bounds, codes, scales, height)

    def _scale_shape(self, piece: Piece) -> tuple[int, int]:
        n, k = piece.shape
        blocks = (-(-n // BLOCK[0]), -(-k // BLOCK[1]))
        return {"block": blocks, "rowwise": (n, 1), "tensor": (1, 1)}[self.fp8.granularity]


def exchange_edges(
    wire: Wire, forms: Sequence[Form], shards: Sequence[Shard], rank: int, group: dist.ProcessGroup | None
) -> Edges:
    """All ranks of the group. The amax of every block that lies on more than one of them."""
    width = {"block": lambda k: -(-k // BLOCK[1])}.get(wire.fp8.granularity, lambda k: 1)
    keys = [
        (number, *found, width(shard.local.shape[1]))
        for number, (form, shard) in enumerate(zip(forms, shards))
        for found in _shared_blocks(form)
        if shard.scale is None
    ]
    device = shards[0].local.device
    flat = torch.zeros(sum(key[-1] for key in keys), device=device)
    edges, at = {}, 0
    for number, piece, block, columns in keys:
        form, shard = forms[number], shards[number]
        start = form.starts[piece] + block * form.block_rows
        stop = min(start + form.block_rows, form.starts[piece] + shard.pieces[piece].rows)
        first = form.bounds[rank]
        rows = shard.local[max(start - first, 0) : max(stop - first, 0)]
        amax = flat[at : at + columns].view(1, columns)
        if len(rows):
            mine = block_amax(rows, wire.fp8.granularity)
            amax.copy_(mine.where(mine.isfinite(), torch.inf))  # a maximum over ranks might lose a NaN
        edges[number, piece, block] = amax
        at += columns
    if keys:
        dist.all_reduce(flat, dist.ReduceOp.MAX, group=group)
    return edges


def _shared_blocks(form: Form) -> list[tuple[int, int]]:
    """(piece, block row) of every block with a border between ranks inside it."""
    if not form.scales:
        return []
    found = set()
    for row in form.bounds[1:-1]:
        piece = bisect_right(form.starts, row) - 1
        within = row - form.starts[piece]
        if row < form.bounds[-1] and within % form.block_rows:
            found.add((piece, within // form.block_rows))
    return sorted(found)


class _Segment(NamedTuple):
    """Rows quantized in one call: whole pieces of one shape, or whole blocks or a shared block of one piece."""

    piece: int
    pieces: int  # 0: part of one
    start: int  # row of the parameter
    stop: int
    block: int | None  # of a shared block


def encode(wire: Wire, share: Share, form: Form, shard: Shard, rank: int, edges: Edges, space: Tensor) -> None:
    """Writes the wire bytes of this rank's `share` of a parameter into `space` (uint8, the bucket's workspace).

    Raises ValueError naming the tensor if it holds a NaN or Inf.
    """
    rows, first = share.rows, form.bounds[rank]
    local = shard.local[rows[0] - first : rows[1] - first]
    itemsize = 1 if form.scales else wire.dtype.itemsize
    codes = space[share.codes : share.codes + local.numel() * itemsize]
    if shard.scale is not None:
        scale = shard.scale[slice(*share.scale_rows)]
        codes.view(local.shape).copy_(local.view(torch.uint8))
        space[share.scales : share.scales + scale.nbytes].view(torch.float32).copy_(scale.flatten())
        return
    if not form.scales:
        if not bool(block_amax(local, "tensor").isfinite()):
            name = form.codes[bisect_right(form.starts, rows[0]) - 1].name
            raise ValueError(f"{name} holds a NaN or Inf; it is not shipped to the engine")
        codes.view(wire.dtype).view(local.shape).copy_(local)
        return
    codes_RK = codes.view(torch.float8_e4m3fn).view(local.shape)
    at = share.scales
    for part in _segments(form, shard, rows):
        x = local[part.start - rows[0] : part.stop - rows[0]]
        out = codes_RK[part.start - rows[0] : part.stop - rows[0]]
        if part.pieces:
            x, out = x.unflatten(0, (part.pieces, -1)), out.unflatten(0, (part.pieces, -1))
        amax = None if part.block is None else edges[share.form, part.piece, part.block]
        scale = _quantize(x, wire.fp8, form.codes[part.piece].name, amax, out)
        if (part.start - form.starts[part.piece]) % form.block_rows == 0:
            space[at : at + scale.nbytes].view(torch.float32).copy_(scale.flatten())
            at += scale.nbytes


def _quantize(x: Tensor, fp8: Fp8Config, name: str, amax: Tensor | None, codes: Tensor) -> Tensor:
    if x.is_cuda and amax is None and fp8.granularity == "block":
        from sync import quantize_triton  # needs no GPU, but takes a second to import

        return quantize_triton.quantize(x, "block", fp8.scales, fp8.amax_floor, name=name, codes=codes)[1]
    return quantize(x, fp8.granularity, fp8.scales, fp8.amax_floor, name=name, amax=amax, codes=codes)[1]


def _segments(form: Form, shard: Shard, rows: tuple[int, int]) -> Iterator[_Segment]:
    start = rows[0]
    piece = bisect_right(form.starts, start) - 1
    while start < rows[1]:
        first, n = form.starts[piece], shard.pieces[piece].rows
        last = first + n
        if start == first and last <= rows[1]:
            count = 1  # whole pieces of the same shape go together
            while (
                piece + count < len(form.starts)
                and shard.pieces[piece + count].rows == n
                and last + count * n <= rows[1]
            ):
                count += 1
            yield _Segment(piece, count, start, first + count * n, None)
            start, piece = first + count * n, piece + count
            continue
        block, within = divmod(start - first, form.block_rows)
        stop = min(last, rows[1])
        if within or stop < min(first + (block + 1) * form.block_rows, last):  # a shared block
            stop = min(stop, first + (block + 1) * form.block_rows)
            yield _Segment(piece, 0, start, stop, block)
        else:
            if stop < last:
                stop = first + (stop - first) // form.block_rows * form.block_rows
            yield _Segment(piece, 0, start, stop, None)
        start = stop
        if start == last:
            piece += 1
