"""What the DeepGEMM backend hands to the library, read as DeepGEMM's own tests read it; no GPU needed.

The stand-in takes nothing for granted but the documented layouts: K contiguous, scale shapes by recipe, groups that
begin at multiples of 128, one matrix per expert in k-grouped products. It multiplies in fp32.
"""

import sys
import types

import numpy as np
import pytest
import torch

from sync.fp8_tensor import Fp8Weight
from sync.quantize import Fp8Config, quantize
from trainer.fp8.deepgemm import DeepGemm
from trainer.fp8.reference import Reference

FP8 = Fp8Config(train="deepgemm")


def numbers(operand, height):
    """f32 [rows, K] of (codes, scales) with scales for `height` x 128."""
    codes, scale = operand
    assert codes.is_contiguous() and codes.dtype == torch.float8_e4m3fn and scale.dtype == torch.float32
    rows, k = codes.shape
    assert k % 16 == 0 and scale.shape == (-(-rows // height), -(-k // 128))
    return codes.float() * scale.repeat_interleave(height, 0)[:rows].repeat_interleave(128, 1)[:, :k]


class StandIn(types.ModuleType):
    def fp8_gemm_nt(self, a, b, d, c=None, recipe=None, disable_ue8m0_cast=False):
        assert disable_ue8m0_cast, "fp32 scales on Hopper"
        if recipe is None:
            assert d.dtype == torch.bfloat16 and c is None
            d.copy_(numbers(a, 1) @ numbers(b, 128).T)
        else:
            assert recipe == (1, 1, 128) and d.dtype == torch.float32 and c is d and a[0].shape[1] % 128 == 0
            d.add_(numbers(a, 1) @ numbers(b, 1).T)

    def m_grouped_fp8_gemm_nt_contiguous(self, a, b, d, grouped_layout, disable_ue8m0_cast=False):
        assert disable_ue8m0_cast and grouped_layout.dtype == torch.int32 and len(grouped_layout) == len(a[0])
        x = numbers(a, 1)
        for start in range(0, len(x), 128):
            expert = grouped_layout[start : start + 128]
            assert len(expert) == 128 and set(expert.tolist()) <= {int(expert[0]), -1} and expert[0] >= 0
            block = x[start : start + 128] @ numbers((b[0][expert[0]], b[1][expert[0]]), 128).T
            d[start : start + 128] = block.where(expert[:, None] >= 0, torch.nan)

    def k_grouped_fp8_gemm_nt_contiguous(self, a, b, d, ks, ks_tensor, c=None, recipe=None):
        assert recipe == (1, 1, 128) and c is d and ks == ks_tensor.tolist() and ks_tensor.dtype == torch.int32
        done = 0
        for expert, k in enumerate(ks):
            assert k % 128 == 0
            part = []
            for (flat, scale), n in ((a, d.shape[1]), (b, d.shape[2])):
                assert scale.stride(0) == 1 and flat.ndim == 1
                matrix = flat[done * n : (done + k) * n].view(n, k)
                part.append(numbers((matrix, scale[:, done // 128 : (done + k) // 128]), 1) if k else torch.zeros(n, 0))
            d[expert].add_(part[0] @ part[1].T)
            done += k
        assert done * d.shape[1] == len(a[0]) and done * d.shape[2] == len(b[0])


@pytest.fixture
def backend(monkeypatch):
    torch.set_num_threads(1)
    monkeypatch.setitem(sys.modules, "deep_gemm", StandIn("deep_gemm"))
    return DeepGemm(FP8)


def operands(counts, n=256, k=384, dtype=torch.bfloat16):
    random = torch.Generator().manual_seed(0)
    m = sum(counts)
    x, dy = (torch.randn(m, width, generator=random).to(dtype) for width in (k, n))
    shape = (n, k) if len(counts) == 1 else (len(counts), n, k)
    codes, scale = quantize(torch.randn(shape, generator=random) / 16)
    ends = None if len(counts) == 1 else torch.tensor(np.cumsum(counts), dtype=torch.int32)
    return x, dy, Fp8Weight(codes, scale, dtype), ends


@pytest.mark.parametrize("counts", [[1], [200], [256], [0, 130, 1, 0, 300, 128, 0], [1, 1], [0, 0, 5]])
def test_the_products_are_the_references(backend, counts):
    x, dy, weight, ends = operands(counts)
    reference = Reference(FP8)
    for got, expected in (
        (backend.forward(x, weight, ends), reference.forward(x, weight, ends)),
        (backend.dgrad(dy, weight, ends), reference.dgrad(dy, weight, ends)),
    ):
        assert got.dtype == torch.bfloat16 and got.shape == expected.shape
        assert (got.float() - expected).norm() < 3e-3 * expected.norm(), "rounded to bf16 once"
    got, expected = backend.wgrad(dy, x, ends), reference.wgrad(dy, x, ends)
    assert got.dtype == torch.float32 and (got - expected).norm() <= 1e-6 * expected.norm()
    assert torch.equal(backend.activations(x), reference.activations(x))


def test_e5m2_is_refused():
    with pytest.raises(ValueError, match=r"fp8\.gradients = e5m2: DeepGEMM multiplies E4M3 only"):
        DeepGemm(Fp8Config(train="deepgemm", gradients="e5m2"))
