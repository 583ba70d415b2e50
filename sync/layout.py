"""What travels when: cuts the plans of all engine processes at the borders of the ranks' shards, and fills buckets.

Every rank computes the same layout from the same plans, so nobody has to be told what to send. Terms:

    plane     the wire form of one parameter, a matrix of bytes: its codes (or its values in the engine's dtype); a
              second one for its scales. All planes' rows are numbered through.
    unit      part i of every rank's rows of a parameter, codes and scales: what is quantized at once and never split
              between buckets. Every rank holds a share of every unit, so all of them work on every bucket.
    segment   what one rank sends one engine process in one bucket, in the order of the parameters there
    workspace where a rank quantizes its shares of a bucket
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from sync.messages import Entry
from sync.plan import ARRIVAL, STOCK, Blocks, Strips, row_form, strips

_ALIGN = 16  # bytes; segments begin there
_UNITS_PER_BUCKET = 4  # at least: fuller buckets

Ints = NDArray[np.int64]


class Form(NamedTuple):
    """One parameter without its numbers: its pieces (sync/shards.py), and how they look on the wire."""

    starts: tuple[int, ...]  # first row of each piece
    bounds: tuple[int, ...]  # of the ranks' rows
    codes: tuple[Entry, ...]  # one per piece
    scales: tuple[Entry, ...]  # likewise, or none
    block_rows: int  # rows that share a scale


class Share(NamedTuple):
    """One rank's part of a unit, and where its wire bytes lie in the workspace."""

    form: int
    rows: tuple[int, int]  # of the parameter
    codes: int  # first byte
    scales: int
    scale_rows: tuple[int, int] = (0, 0)  # of those that the rank holds


class Bucket(NamedTuple):
    """One bucket as one rank sees it."""

    shares: list[Share]
    workspace: int  # bytes
    pack: list[Strips]  # per engine process: from the workspace (`target`) into its segment (`offset`)
    send: list[int]  # per engine process: bytes of its segment
    receive: list[tuple[int, int]]  # per rank: first byte in this rank's bucket, and bytes
    nbytes: int  # of this rank's bucket

    def is_identity(self, process: int) -> bool:
        """Whether the workspace is already the segment for that process."""
        s = self.pack[process]
        return len(s.offset) == 1 and s.target[0] == 0 and s.rows[0] == 1 and self.workspace == self.send[process]

    def scratch(self, rank: int) -> int:
        """Bytes that `rank` needs beside its staging: its workspace, unless its own segment serves, and a segment for
        every other kind of engine process."""
        own = self.pack[rank]
        others = {id(strips): size for strips, size in zip(self.pack, self.send) if strips is not own}
        return sum(others.values()) + (0 if self.is_identity(rank) else self.workspace)


class Layout(NamedTuple):
    """What one rank does in every swap."""

    rank: int
    buckets: list[Bucket]
    arrivals: Blocks  # at this rank's engine process, dtype ARRIVAL

    @property
    def bytes_sent(self) -> int:
        """To other ranks, per swap."""
        return sum(sum(b.send) - b.send[self.rank] for b in self.buckets)

    @property
    def bytes_received(self) -> int:
        """From other ranks, per swap."""
        return sum(sum(n for _, n in b.receive) - b.receive[self.rank][1] for b in self.buckets)


def entries_of(forms: Sequence[Form]) -> list[Entry]:
    """All tensors on the wire, in the order of their numbers."""
    return [entry for form in forms for entry in (*form.codes, *form.scales)]


def build(forms: Sequence[Form], plans: Sequence[Blocks], half: int, rank: int) -> Layout:
    """The layout of `rank`. `plans` (dtype BLOCK) are those of the engine processes, one per rank of the group; equal
    plans should be the same object. `half`: bytes of a bucket at most.

    Raises ValueError for a unit that no bucket can hold.
    """
    table = _Table(forms, half)
    cut = {id(plan): table.cut(plan) for plan in plans}
    cuts = [cut[id(plan)] for plan in plans]
    bucket_of = table.fill([c.unit_bytes for c in cut.values()], _order([*cut.values()], table), half)
    n_buckets = int(bucket_of.max(initial=-1)) + 1

    mine = cuts[rank]
    place = table.workspace(mine, bucket_of, rank)
    by_plan = {key: c.segments(bucket_of, n_buckets, rank, place, table) for key, c in cut.items()}
    arrivals, receive = mine.arrivals(bucket_of, n_buckets, table)
    packs = [by_plan[id(plan)] for plan in plans]
    return Layout(
        rank,
        [
            Bucket(
                shares=place.shares[b],
                workspace=place.nbytes[b],
                pack=[pack[b][0] for pack in packs],
                send=[pack[b][1] for pack in packs],
                receive=[(int(o), int(n)) for o, n in receive[b]],
                nbytes=max((int(o + n) for o, n in receive[b]), default=0),
            )
            for b in range(n_buckets)
        ],
        arrivals,
    )


class _Place(NamedTuple):
    offset: Ints  # of every interval in its bucket's workspace; -1 where it is another rank's
    shares: list[list[Share]]
    nbytes: list[int]


class _Table:
    """All planes, cut into intervals: the shares' rows, numbered through all planes in ascending order."""

    def __init__(self, forms: Sequence[Form], half: int):
        begin, end, rank, unit, width, size, form_of, scales = [], [], [], [], [], [], [], []
        entry_row: list[Ints] = []
        base = self.n_units = 0
        self.forms, self.n_ranks = forms, len(forms[0].bounds) - 1
        self.first_row: list[int] = []  # of each form's first plane
        self.unit_form: list[int] = []
        for number, form in enumerate(forms):
            cuts = _cut_rows(form, _parts(form, half))  # [ranks, parts + 1]
            ranks, parts = cuts.shape[0], cuts.shape[1] - 1
            self.first_row.append(base)
            starts = np.array(form.starts)
            planes: list[tuple[Ints, tuple[Entry, ...], Ints]] = [(starts, form.codes, cuts)]
            if form.scales:
                counts = np.array([row_form(entry)[0] for entry in form.scales])
                planes.append((np.cumsum(counts) - counts, form.scales, _scale_rows(form, cuts, counts)))
            for plane, (first, entries, at) in enumerate(planes):
                entry_row.append(base + first)
                begin.append(base + at[:, :-1].ravel())
                end.append(base + at[:, 1:].ravel())
                rank.append(np.repeat(np.arange(ranks), parts))
                unit.append(np.tile(np.arange(parts), ranks) + self.n_units)
                itemsize = getattr(torch, entries[0].dtype).itemsize
                for values, value in zip(
                    (width, size, form_of, scales), (row_form(entries[0])[1], itemsize, number, plane)
                ):
                    values.append(np.full(ranks * parts, value))
                base += int(at[-1, -1])
            self.n_units += parts
            self.unit_form += [number] * parts
        some = np.concatenate(end) > np.concatenate(begin)  # a rank may hold nothing of a small parameter
        self.begin, self.end, self.rank, self.unit, self.width, self.size, self.form, self.scales = (
            np.concatenate(x)[some] for x in (begin, end, rank, unit, width, size, form_of, scales)
        )
        self.entry_row = np.concatenate(entry_row)

    def cut(self, plan: Blocks) -> "_Cut":
        """The blocks of a plan, cut at the borders of the intervals."""
        row = self.entry_row[plan["tensor"]] + plan["row"]
        first = np.searchsorted(self.end, row, "right")
        count = np.searchsorted(self.begin, row + plan["rows"], "left") - first
        source = np.repeat(np.arange(len(plan)), count)
        interval = np.arange(len(source)) - np.repeat(np.cumsum(count) - count - first, count)
        low = np.maximum(row[source], self.begin[interval])
        high = np.minimum(row[source] + plan["rows"][source], self.end[interval])
        blocks = np.zeros(len(source), ARRIVAL)
        for name in plan.dtype.names or ():
            blocks[name] = plan[name][source]
        blocks["row"] += low - row[source]
        blocks["target"] += (low - row[source]) * blocks["step"]
        blocks["rows"] = high - low
        unit_bytes = np.bincount(self.unit[interval], blocks["rows"] * blocks["width"], self.n_units).astype(np.int64)
        return _Cut(blocks, interval, low, unit_bytes)

    def fill(self, unit_bytes: list[Ints], order: Ints, half: int) -> Ints:
        """The bucket of every unit. `unit_bytes`: at each kind of engine process."""
        need = np.stack(unit_bytes)  # [kinds, units]
        room = half - _ALIGN * self.n_ranks
        bucket_of, bucket, used = np.zeros(self.n_units, np.int64), 0, np.zeros(len(need), np.int64)
        for unit in order:
            if need[:, unit].max() > room:
                name = self.forms[self.unit_form[unit]].codes[0].name
                raise ValueError(
                    f"sync.bucket_mb is too small: the smallest part of {name} that can travel alone takes "
                    f"{need[:, unit].max() / 2**20:.1f} MiB, a bucket holds {room / 2**20:.1f}"
                )
            if (used + need[:, unit]).max() > room:
                bucket, used = bucket + 1, used * 0
            bucket_of[unit] = bucket
            used += need[:, unit]
        return bucket_of

    def workspace(self, cut: "_Cut", bucket_of: Ints, rank: int) -> _Place:
        """Where this rank quantizes: in the order in which its own engine process takes the bytes."""
        key = np.full(len(self.begin), np.iinfo(np.int64).max)
        np.minimum.at(key, cut.interval, cut.key)
        mine = np.flatnonzero(self.rank == rank)
        mine = mine[np.lexsort((mine, key[mine], bucket_of[self.unit[mine]]))]
        offset = np.full(len(self.begin), -1)
        n_buckets = int(bucket_of.max(initial=-1)) + 1
        nbytes = [0] * n_buckets
        for i in mine.tolist():
            b = int(bucket_of[self.unit[i]])
            offset[i] = -(-nbytes[b] // self.size[i]) * self.size[i]
            nbytes[b] = int(offset[i] + (self.end[i] - self.begin[i]) * self.width[i])
        shares: list[list[Share]] = [[] for _ in range(n_buckets)]
        first_scale: dict[int, int] = {}  # row of the rank's first scale of a form; rows ascend
        scales: dict[int, tuple[int, tuple[int, int]]] = {}  # of a unit
        for i in np.sort(mine).tolist():
            if self.scales[i]:
                first = first_scale.setdefault(int(self.form[i]), int(self.begin[i]))
                scales[int(self.unit[i])] = int(offset[i]), (int(self.begin[i]) - first, int(self.end[i]) - first)
        for i in np.sort(mine).tolist():
            if not self.scales[i]:
                first, unit = self.first_row[self.form[i]], int(self.unit[i])
                rows = (int(self.begin[i] - first), int(self.end[i] - first))
                at, scale_rows = scales.get(unit, (0, (0, 0)))
                shares[bucket_of[unit]].append(Share(int(self.form[i]), rows, int(offset[i]), at, scale_rows))
        return _Place(offset, shares, nbytes)


class _Cut(NamedTuple):
    """One kind of engine process: its blocks, cut; the interval and the plane row of each."""

    blocks: Blocks
    interval: Ints
    row: Ints
    unit_bytes: Ints

    @property
    def key(self) -> Ints:
        """Order in the engine process: by parameter, then by byte."""
        return ((self.blocks["param"].astype(np.int64) - STOCK) << 44) + self.blocks["target"]

    def segments(
        self, bucket_of: Ints, n_buckets: int, rank: int, place: _Place, table: _Table
    ) -> list[tuple[Strips, int]]:
        """What `rank` packs for this process, per bucket: the copies, and the bytes of the segment."""
        chosen = np.flatnonzero(table.rank[self.interval] == rank)
        interval = self.interval[chosen]
        bucket = bucket_of[table.unit[interval]]
        order = np.lexsort((self.key[chosen], bucket))
        chosen, interval, bucket = chosen[order], interval[order], bucket[order]
        blocks = self.blocks[chosen].copy()
        blocks["target"] = (
            place.offset[interval]
            + (self.row[chosen] - table.begin[interval]) * table.width[interval]
            + blocks["column"]
        )
        blocks["param"], blocks["step"] = 0, table.width[interval]
        result = []
        for part in np.split(blocks, np.searchsorted(bucket, np.arange(1, n_buckets))):
            nbytes = part["rows"] * part["width"]
            part["offset"] = np.cumsum(nbytes) - nbytes
            result.append((strips(part), int(nbytes.sum())))
        return result[:n_buckets]

    def arrivals(self, bucket_of: Ints, n_buckets: int, table: _Table) -> tuple[Blocks, Any]:
        """The placed blocks of this process, and (offset, bytes) [buckets, ranks, 2] of the segments."""
        rank, bucket = table.rank[self.interval], bucket_of[table.unit[self.interval]]
        order = np.lexsort((self.key, rank, bucket))
        blocks, rank, bucket = self.blocks[order], rank[order], bucket[order]
        nbytes = blocks["rows"] * blocks["width"]
        n_ranks = table.n_ranks
        segment = bucket * n_ranks + rank
        sizes = np.bincount(segment, nbytes, n_buckets * n_ranks).astype(np.int64).reshape(n_buckets, n_ranks)
        padded = -(-sizes // _ALIGN) * _ALIGN
        starts = np.cumsum(padded, axis=1) - padded
        before = np.cumsum(nbytes) - nbytes  # bytes before this block, in all segments
        first = np.cumsum(sizes.ravel()) - sizes.ravel()
        blocks["offset"] = starts.ravel()[segment] + before - first[segment]
        blocks["bucket"] = bucket
        return blocks, np.stack([starts, sizes], axis=-1)


def _order(cuts: list[_Cut], table: _Table) -> Ints:
    """Units in the order in which the engine processes hold them, so that what lies together travels together."""
    key = np.full(table.n_units, np.iinfo(np.int64).max)
    for cut in cuts:
        np.minimum.at(key, table.unit[cut.interval], cut.key)
    return np.argsort(key, kind="stable")


def _parts(form: Form, half: int) -> int:
    """Into how many parts every rank's rows are cut."""
    nbytes = sum(rows * width for rows, width in map(row_form, (*form.codes, *form.scales)))
    largest = max(b - a for a, b in zip(form.bounds, form.bounds[1:]))
    return max(1, min(-(-nbytes * _UNITS_PER_BUCKET // half), -(-largest // form.block_rows)))


def _cut_rows(form: Form, parts: int) -> Ints:
    """Rows [ranks, parts + 1] at which the ranks' parts begin and end; inside a rank at the nearest block's border."""
    low, high = np.array(form.bounds[:-1])[:, None], np.array(form.bounds[1:])[:, None]
    rows = low + (high - low) * np.arange(parts + 1) // parts
    starts = np.array([*form.starts, form.bounds[-1]])
    piece = np.minimum(np.searchsorted(starts, rows, "right"), len(form.starts)) - 1
    before = starts[piece] + (rows - starts[piece]) // form.block_rows * form.block_rows
    after = np.minimum(before + form.block_rows, starts[piece + 1])
    aligned = np.clip(np.where(rows - before < after - rows, before, after), low, high)
    aligned[:, 0], aligned[:, -1] = low[:, 0], high[:, 0]
    return aligned


def _scale_rows(form: Form, rows: Ints, counts: Ints) -> Ints:
    """Scale rows that belong to the code rows before `rows`: a block's scale is held by the rank of its first row.
    `counts`: of each piece."""
    starts = np.array(form.starts)
    piece = np.searchsorted(starts, rows, "right") - 1
    before = np.cumsum(counts) - counts
    return before[piece] + np.minimum(-(-(rows - starts[piece]) // form.block_rows), counts[piece])
