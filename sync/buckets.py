"""Buckets: named tensors inside a fixed run of bytes, and the checksum that both ends take of it."""

from collections.abc import Iterator

import torch
import xxhash
from torch import Tensor

from sync.messages import Entry

_ALIGN = 16  # bytes; any dtype can be viewed at such an offset


def align(nbytes: int) -> int:
    """Room that a tensor of `nbytes` takes in a bucket."""
    return -(-nbytes // _ALIGN) * _ALIGN


def nbytes(entry: Entry) -> int:
    return getattr(torch, entry.dtype).itemsize * torch.Size(entry.shape).numel()


def views(staging: Tensor, entries: list[Entry]) -> Iterator[tuple[str, Tensor]]:
    """The named tensors that `entries` describe inside `staging` (uint8)."""
    for entry in entries:
        yield (
            entry.name,
            staging[entry.offset : entry.offset + nbytes(entry)].view(getattr(torch, entry.dtype)).view(entry.shape),
        )


def checksum(data: Tensor) -> int:
    """XXH3 (64 bit) of the bytes of a tensor of any dtype, on any device."""
    return xxhash.xxh3_64_intdigest(data.detach().contiguous().cpu().view(-1).view(torch.uint8).numpy().data)
