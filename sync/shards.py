"""A parameter as the swap sees it: the rows that this rank holds, and which rows are which checkpoint tensor.

Row form: a parameter [..., K] is prod(...) rows of K numbers, a vector N rows of one. FSDP shards the first dimension,
so every rank holds a run of rows, which may begin and end anywhere.
"""

from typing import NamedTuple

from torch import Tensor


class Piece(NamedTuple):
    """One checkpoint tensor inside a parameter, e.g. one expert of a stack."""

    name: str  # Hugging Face checkpoint name of the weight
    shape: tuple[int, ...]
    row: int  # its first row in the parameter

    @property
    def rows(self) -> int:
        rows, width = 1, self.shape[-1] if len(self.shape) > 1 else 1
        for n in self.shape:
            rows *= n
        return rows // max(width, 1)


def whole(name: str, weight: Tensor) -> "Shard":
    """A parameter that is one checkpoint tensor and lies on one rank."""
    piece = Piece(name, tuple(weight.shape), 0)
    return Shard((piece,), (0, piece.rows), weight.reshape(piece.rows, -1))


class Shard(NamedTuple):
    """One parameter; `pieces` cover its rows in order."""

    pieces: tuple[Piece, ...]
    bounds: tuple[int, ...]  # rank r of the group holds the rows bounds[r] ... bounds[r + 1]
    local: Tensor  # f32 [rows of this rank, K], or float8_e4m3fn where `scale` is given
    scale: Tensor | None = None  # f32 [scales' rows that this rank holds, columns]: the codes are made already

    @property
    def rows(self) -> int:
        return self.bounds[-1]
