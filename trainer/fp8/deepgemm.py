"""DeepGEMM as a backend: the three products on Hopper tensor cores, dense and grouped. NOT YET MEASURED on a GPU.

Checked so far: what this file hands to the library, against a stand-in that reads its arguments as DeepGEMM's own tests
do (tests/test_trainer_fp8_deepgemm.py). Layouts on Hopper, all operands E4M3 with fp32 scales and K contiguous:

    forward   fp8_gemm_nt                        x [M, K] 1x128        W [N, K] 128x128     bf16 [M, N]
    dgrad     fp8_gemm_nt                        dy [M, N] 1x128       W^T, its bytes copied bf16 [M, K]
    wgrad     fp8_gemm_nt, recipe (1, 1, 128)    dy^T [N, M'] 1x128    x^T [K, M'] 1x128    fp32 [N, K], added to c
    experts   m_grouped_fp8_gemm_nt_contiguous   rows of an expert begin at multiples of 128, padding has expert -1
    wgrad     k_grouped_fp8_gemm_nt_contiguous   matrices [N, k_e], one after the other; scales N-major

M' is the number of tokens with every run filled up to a multiple of 128 with zeros.
"""

from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from sync.fp8_tensor import Fp8Weight
from sync.quantize import BLOCK, Fp8Config, dequantize, quantize
from trainer.fp8.reference import aligned_rows, spread

WGRAD = (1, 1, 128)  # scale shapes of the two operands: rows, rows, columns


def missing(device: str) -> str:
    """What keeps it from running on `device`; "" where it can run."""
    if device != "cuda" or not torch.cuda.is_available():
        return "DeepGEMM needs a CUDA device"
    major, minor = torch.cuda.get_device_capability()
    if major != 9:
        return f"this backend is written for Hopper (compute capability 9.0), not {major}.{minor}"
    if find_spec("deep_gemm") is None:
        return "the package deep_gemm is not installed (requirements/gpu.txt)"
    return ""


class DeepGemm:
    """See trainer/fp8/__init__.py for the contract."""

    def __init__(self, fp8: Fp8Config) -> None:
        """Raises ValueError for gradients in E5M2."""
        if fp8.gradients != "e4m3":
            raise ValueError(f"fp8.gradients = {fp8.gradients}: DeepGEMM multiplies E4M3 only; fp8.train = reference "
                             "takes both")  # fmt: skip
        import deep_gemm  # type: ignore[reportMissingImports]

        self.fp8 = fp8
        self.library: Any = deep_gemm

    def _quantize(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if x.is_cuda:
            from sync import quantize_triton  # takes a second to import

            return quantize_triton.quantize(x, "group", self.fp8.scales, self.fp8.amax_floor, refuse=False)
        return quantize(x, "group", self.fp8.scales, self.fp8.amax_floor, refuse=False)

    def activations(self, x_MK: Tensor) -> Tensor:
        return dequantize(*self._quantize(x_MK), "group")

    def forward(self, x_MK: Tensor, weight: Fp8Weight, ends: Tensor | None = None) -> Tensor:
        return self._times(x_MK, weight.codes, weight.scale, ends)

    def dgrad(self, dy_MN: Tensor, weight: Fp8Weight, ends: Tensor | None = None) -> Tensor:
        codes = weight.codes.view(torch.uint8).mT.contiguous().view(torch.float8_e4m3fn)
        return self._times(dy_MN, codes, weight.scale.mT.contiguous(), ends)

    def _times(self, x_MK: Tensor, codes: Tensor, scale: Tensor, ends: Tensor | None) -> Tensor:
        """bf16 [M, N]."""
        if ends is None:
            y = x_MK.new_empty(len(x_MK), codes.shape[0], dtype=torch.bfloat16)
            self.library.fp8_gemm_nt(self._quantize(x_MK), (codes, scale), y, disable_ue8m0_cast=True)
            return y
        rows, new_ends = aligned_rows(ends, len(x_MK))
        x = spread(x_MK, rows, int(new_ends[-1]))
        expert = torch.full((len(x),), -1, dtype=torch.int32, device=x.device)
        expert[rows] = torch.searchsorted(ends, torch.arange(len(x_MK), device=x.device), right=True).int()
        y = x.new_empty(len(x), codes.shape[1], dtype=torch.bfloat16)
        self.library.m_grouped_fp8_gemm_nt_contiguous(
            self._quantize(x), (codes, scale), y, expert, disable_ue8m0_cast=True
        )
        return y[rows]

    def wgrad(self, dy_MN: Tensor, x_MK: Tensor, ends: Tensor | None = None) -> Tensor:
        """f32 [N, K] or [E, N, K]."""
        one = torch.tensor([len(x_MK)], dtype=torch.int32, device=x_MK.device)
        rows, new_ends = aligned_rows(one if ends is None else ends, len(x_MK))
        dy, x = (self._quantize(spread(t, rows, int(new_ends[-1])).T) for t in (dy_MN, x_MK))
        if ends is None:
            dw = torch.zeros(dy_MN.shape[1], x_MK.shape[1], device=x_MK.device)
            self.library.fp8_gemm_nt(dy, x, dw, c=dw, recipe=WGRAD, disable_ue8m0_cast=True)
            return dw
        dw = torch.zeros(len(ends), dy_MN.shape[1], x_MK.shape[1], device=x_MK.device)
        counts = new_ends.diff(prepend=new_ends.new_zeros(1))
        a, b = ((one_after_the_other(codes, new_ends), scale.T.contiguous().T) for codes, scale in (dy, x))
        self.library.k_grouped_fp8_gemm_nt_contiguous(a, b, dw, counts.tolist(), counts, c=dw, recipe=WGRAD)
        return dw


def one_after_the_other(codes_NM: Tensor, ends: Tensor) -> Tensor:
    """One vector: the columns of every expert as a matrix of their own, row by row. `ends` are multiples of 128."""
    n, blocks = codes_NM.shape[0], codes_NM.shape[1] // BLOCK[1]
    ends = ends.long() // BLOCK[1]
    starts = torch.cat([ends.new_zeros(1), ends[:-1]])
    block = torch.arange(blocks, device=ends.device)
    expert = torch.searchsorted(ends, block, right=True)
    width, start = (ends - starts)[expert], starts[expert]
    row = torch.arange(n, device=ends.device)[:, None]
    place = start * n + row * width + (block - start)
    flat = torch.empty(n * blocks, BLOCK[1], dtype=torch.uint8, device=codes_NM.device)
    flat[place.flatten()] = codes_NM.view(torch.uint8).view(n * blocks, BLOCK[1])
    return flat.flatten().view(codes_NM.dtype)
