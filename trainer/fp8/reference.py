"""The reference backend: FP8 products in plain torch on any device, the definition that other backends are held to.

Operands are quantized by sync.quantize, dequantized to fp32 and multiplied in fp32, so a result is exact but for fp32
rounding of the sums (TF32 must be off, torch's default). It costs more than it saves: for CPUs, tests and comparison.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from sync.fp8_tensor import Fp8Weight
from sync.quantize import BLOCK, Fp8Config, dequantize, quantize

GRADIENTS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


class Reference:
    """See trainer/fp8/__init__.py for the contract."""

    def __init__(self, fp8: Fp8Config) -> None:
        self.fp8 = fp8

    def activations(self, x_MK: Tensor) -> Tensor:
        return self._rounded(x_MK, torch.float8_e4m3fn)

    def weights(self, w: Tensor) -> Tensor:
        """f32 values of the codes of masters f32 [..., N, K]."""
        return dequantize(*quantize(w, "block", self.fp8.scales, self.fp8.amax_floor))

    def gradients(self, dy_MN: Tensor) -> Tensor:
        return self._rounded(dy_MN, GRADIENTS[self.fp8.gradients])

    def _rounded(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        # NaN stays NaN: the trainer refuses the update on all ranks, where an error here would stop one of them.
        codes, scale = quantize(x, "group", self.fp8.scales, self.fp8.amax_floor, dtype=dtype, refuse=False)
        return dequantize(codes, scale, "group")

    def forward(self, x_MK: Tensor, weight: Fp8Weight, ends: Tensor | None = None) -> Tensor:
        return _times(self.activations(x_MK), weight.dequantized().mT, ends)

    def dgrad(self, dy_MN: Tensor, weight: Fp8Weight, ends: Tensor | None = None) -> Tensor:
        return _times(self.gradients(dy_MN), weight.dequantized(), ends)

    def wgrad(self, dy_MN: Tensor, x_MK: Tensor, ends: Tensor | None = None) -> Tensor:
        if ends is not None:
            rows, ends = aligned_rows(ends, len(x_MK))
            dy_MN, x_MK = spread(dy_MN, rows, int(ends[-1])), spread(x_MK, rows, int(ends[-1]))
        return _times(self.gradients(dy_MN.T), self.activations(x_MK.T).T, ends)


def _times(a: Tensor, b: Tensor, ends: Tensor | None) -> Tensor:
    """a b, grouped where `ends` is given: rows of a with a 3-D b, columns of a (and rows of b) with a 2-D b."""
    return a @ b if ends is None else F.grouped_mm(a, b, offs=ends)


def aligned_rows(ends: Tensor, n_rows: int) -> tuple[Tensor, Tensor]:
    """(i64[S], i32[E]): new places of S rows, and new ends, such that each expert's rows begin at a multiple of 128.

    So no group of 128 tokens holds tokens of two experts. `ends` i32[E] are the old ends, the last one S.
    """
    counts = ends.diff(prepend=ends.new_zeros(1))
    room = (counts + BLOCK[0] - 1) // BLOCK[0] * BLOCK[0]
    new_ends = room.cumsum(0, dtype=torch.int32)
    shift = (new_ends - room) - (ends - counts)
    row = torch.arange(n_rows, device=ends.device)
    return row + shift[torch.searchsorted(ends, row, right=True)], new_ends


def spread(x: Tensor, rows: Tensor, n_rows: int) -> Tensor:
    """[n_rows, K] with the rows of x at `rows`, zeros elsewhere."""
    return x.new_zeros(n_rows, x.shape[1]).index_copy_(0, rows, x)
