"""The Triton quantizer against sync/quantize.py, to the bit: interpreted on a CPU, compiled for sm_90, run on a GPU.

TRITON_INTERPRET counts when Triton is imported, so this file also is a program that a test starts with it set.
"""

import os
import re
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from sync import quantize_triton
from sync.quantize import quantize

DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
SHAPES = [(256, 256), (1, 1), (130, 257), (3, 64, 200), (2, 2, 40, 128)]


def inputs(device: str):
    """Name and tensor: partial blocks, stacks, other strides, a wide range of magnitudes, zeros, subnormals, ties."""
    generator = torch.Generator().manual_seed(1)
    for dtype, shape in product(DTYPES, SHAPES):
        x = torch.randn(shape, generator=generator) * 0.02
        yield f"{dtype} {shape}", x.to(dtype).to(device)
    for dtype in DTYPES:
        exponents = torch.randint(-20 if dtype == torch.float16 else -140, 15, (136, 200), generator=generator)
        x = (torch.randn(136, 200, generator=generator).double() * 2.0**exponents).clamp(-6e4, 6e4)
        x[:64] *= torch.rand(64, 200, generator=generator) > 0.7
        x[64:128, :128] = 0
        yield f"{dtype} spread", x.to(dtype).to(device)
        yield f"{dtype} transposed", x.to(dtype).to(device).mT
        yield f"{dtype} columns", x.to(dtype).to(device)[3:, 5:190]
        x = torch.arange(-448, 449, dtype=torch.float64).repeat(4, 1)  # amax 448: scale 1, and ties between the codes
        yield f"{dtype} ties", (x * torch.tensor([[1], [0.25], [2**-6], [2**-9]])).to(dtype).to(device)
        yield f"{dtype} largest", torch.full((2, 130), torch.finfo(dtype).max, dtype=dtype, device=device)


def compare(device: str) -> int:
    """Codes and scales of both quantizers, on `device` and against the CPU; the number of comparisons."""
    compared = 0
    for name, x in inputs(device):
        for granularity, scales in product(("block", "group"), ("fp32", "pow2")):
            floor = 1e-4 if "spread" in name else 1e-10
            codes, scale = quantize_triton.quantize(x, granularity, scales, floor)
            assert codes.is_contiguous()
            for other in {x.device.type: x, "cpu": x.cpu()}.values():
                expected_codes, expected_scale = quantize(other, granularity, scales, floor)
                case = f"{name} {granularity} {scales} against {other.device}"
                assert scale.shape == expected_scale.shape, case
                assert torch.equal(scale.to(other.device), expected_scale), case
                ours, theirs = (c.to(other.device).view(torch.uint8) for c in (codes, expected_codes))
                assert torch.equal(ours, theirs), f"{case}: {(ours != theirs).sum()} codes differ"
                compared += 1
    return compared


def check_errors(device: str) -> None:
    for dtype, granularity, scales, bad in product(
        DTYPES, ("block", "group"), ("fp32", "pow2"), (torch.nan, -torch.inf)
    ):
        x = torch.ones(2, 40, 140, dtype=dtype, device=device)
        x[1, 39, 139] = x[1, 39, 7] = bad
        with pytest.raises(ValueError, match=r"a\.q_proj holds a NaN or Inf, the first at index \(1, 39, 7\)"):
            quantize_triton.quantize(x, granularity, scales, name="a.q_proj")
    negative_nan = torch.tensor([0xFF800001 - 2**32], dtype=torch.int32, device=device).view(torch.float32)
    with pytest.raises(ValueError, match="NaN"):
        quantize_triton.quantize(negative_nan.expand(2, 2))
    with pytest.raises(ValueError, match="cannot be quantized"):
        quantize_triton.quantize(torch.ones(4, device=device))
    with pytest.raises(ValueError, match="takes 'block' and 'group', not 'rowwise'"):
        quantize_triton.quantize(torch.ones(4, 4, device=device), "rowwise")  # pyright: ignore[reportArgumentType]


def check_codes_in_place(device: str) -> None:
    x = torch.randn(2, 130, 140, device=device)
    staging = torch.zeros(x.numel() + 3, dtype=torch.uint8, device=device)  # odd addresses too
    target = staging[3:].view(torch.float8_e4m3fn).view(x.shape)
    codes, _ = quantize_triton.quantize(x, codes=target)
    assert codes is target
    assert torch.equal(staging[3:], quantize(x)[0].view(torch.uint8).flatten()) and not staging[:3].any()


def test_same_bits_through_the_interpreter():
    root = Path(__file__).resolve().parents[1]
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == 4 * 30


@triton.jit
def plain_division_kernel(x_ptr, y_ptr):
    tl.store(y_ptr, tl.load(x_ptr) / tl.load(y_ptr))


def ptx_for_h200(kernel, types: dict[str, str], constants: dict, aligned: set[str], num_warps: int = 4) -> str:
    """PTX of a kernel for sm_90, assembled by ptxas too; no GPU needed. `aligned` arguments are multiples of 16."""
    signature = {name: "constexpr" if name in constants else types[name] for name in kernel.arg_names}
    place = {name: (i,) for i, name in enumerate(kernel.arg_names)}
    values = {place[name]: value for name, value in constants.items()}
    attributes = {place[name]: [["tt.divisibility", 16]] for name in aligned}
    source = ASTSource(kernel, signature, values, attributes)  # pyright: ignore[reportArgumentType]
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": num_warps})
    assert len(compiled.asm["cubin"]) > 0
    return compiled.asm["ptx"]


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


@pytest.mark.parametrize("aligned", [True, False], ids=["aligned", "any"])
@pytest.mark.parametrize("granularity", ["block", "group"])
@pytest.mark.parametrize("dtype", DTYPES.values())
def test_compiles_for_sm_90(dtype, granularity, aligned, own_cache):
    for scales in ("fp32", "pow2") if aligned else ("pow2",):
        constants = quantize_triton.variant(granularity, scales)
        warps = constants.pop("num_warps")
        types = dict.fromkeys(quantize_triton.quantize_kernel.arg_names, "i32")
        types |= {"x_ptr": f"*{dtype}", "codes_ptr": "*fp8e4nv", "scale_ptr": "*fp32"}
        if aligned:  # as Triton specializes a launch: contiguous rows, sizes and addresses multiples of 16
            constants["stride_k"] = 1
        pointers = {"x_ptr", "codes_ptr", "scale_ptr"}
        multiples = {*pointers, "n", "k", "stride_b", "stride_n"} if aligned else set[str]()
        ptx = ptx_for_h200(quantize_triton.quantize_kernel, types, constants, multiples, warps)

        per_thread = constants["HEIGHT"] * constants["WIDTH"] // (32 * warps)
        assert 2 * len(re.findall(r"cvt\.rn\.satfinite\.e4m3x2\.f32", ptx)) == per_thread
        assert len(re.findall(r"\bdiv\.rn\.f32", ptx)) > per_thread
        assert not re.search(r"div\.(full|approx)|rcp|\.ftz|mul\.(rn\.)?f32|fma", ptx)
        if aligned:  # x is read once, and everything 16 bytes at a time
            size = {"fp32": 4, "bf16": 2, "fp16": 2}[dtype]
            assert len(re.findall(r"ld\.global\.v4\.b32", ptx)) * 16 == per_thread * size
            assert len(re.findall(r"ld\.global", ptx)) * 16 == per_thread * size
            assert len(re.findall(r"st\.global\.v4\.b32", ptx)) * 16 == per_thread


def test_plain_division_is_approximate_on_a_gpu(own_cache):
    """Why the kernel says div_rn."""
    ptx = ptx_for_h200(plain_division_kernel, {"x_ptr": "*fp32", "y_ptr": "*fp32"}, {}, set())
    assert "div.full.f32" in ptx and "div.rn" not in ptx


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.gpu
@needs_gpu
def test_same_bits_on_a_gpu_and_as_on_the_cpu():
    assert compare("cuda") == 2 * 4 * 30
    check_errors("cuda")
    check_codes_in_place("cuda")


@pytest.mark.gpu
@needs_gpu
def test_stacks_beyond_2_31_elements():
    x = torch.zeros(2049, 1024, 1024, dtype=torch.bfloat16, device="cuda")
    x[-1].normal_()
    codes, scale = quantize_triton.quantize(x)
    expected_codes, expected_scale = quantize(x[-1])
    assert torch.equal(scale[-1], expected_scale)
    assert torch.equal(codes[-1].view(torch.uint8), expected_codes.view(torch.uint8))


if __name__ == "__main__":
    torch.set_num_threads(1)
    check_errors("cpu")
    check_codes_in_place("cpu")
    print(compare("cpu"))
