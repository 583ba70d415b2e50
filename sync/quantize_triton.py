"""The quantizer of sync/quantize.py as one Triton kernel that reads x once; there are the formula and the contract.

Each program holds one tile in registers: a 128 x 128 block of a weight, or 32 rows of 128 activations with an amax per
row. The codes are the same to the bit, which rests on three choices:

    division   `tl.div_rn`: div.rn.f32, IEEE; plain `/` becomes div.full.f32, which may err by 2 ulp
    maximum    of the sign-less bits as integers, as on the CPU: exact, and a NaN is the largest
    rounding   cvt.rn.satfinite.e4m3x2.f32: to the nearest, ties to even; no quotient is large enough to saturate

TRITON_INTERPRET=1, set before Triton is imported, runs the kernel on CPU tensors. The interpreter casts float32 to
float8 wrongly; there the kernel stores the quotients and torch casts them.
"""

from typing import Any, Literal

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

from sync.quantize import BLOCK, E4M3_MAX, ScaleFormat, check_input, refuse_non_finite


@triton.jit(do_not_specialize=["floor_bits"])
def quantize_kernel(
    x_ptr,  # [B, N, K] bf16, fp16 or fp32, any strides
    codes_ptr,  # [B, N, K] contiguous: float8e4nv, or float32 quotients if not CAST
    scale_ptr,  # [B, N / 128, K / 128] or, PER_ROW, [B, N, K / 128], contiguous float32
    n,
    k,
    stride_b,
    stride_n,
    stride_k,
    floor_bits,  # of the float32 amax_floor
    PER_ROW: tl.constexpr,
    POW2: tl.constexpr,
    CAST: tl.constexpr,
    LARGEST: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
):
    strips, columns = tl.cdiv(n, HEIGHT), tl.cdiv(k, WIDTH)
    column = tl.program_id(0) % columns
    strip = tl.program_id(0) // columns
    matrix = (strip // strips).to(tl.int64)  # 64 bits from here on: a stack of experts may exceed 2^31 elements
    row = (strip % strips * HEIGHT + tl.arange(0, HEIGHT)).to(tl.int64)
    col = (column * WIDTH + tl.arange(0, WIDTH)).to(tl.int64)
    inside = (row < n)[:, None] & (col < k)[None, :]
    place = matrix * stride_b + row[:, None] * stride_n + col[None, :] * stride_k
    x = tl.load(x_ptr + place, mask=inside, other=0.0).to(tl.float32)

    magnitude = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    bits = tl.max(magnitude, axis=1)
    if not PER_ROW:
        bits = tl.max(bits, axis=0, keep_dims=True)
    bits = tl.maximum(bits, floor_bits)
    amax = bits.to(tl.float32, bitcast=True)
    scale = tl.div_rn(amax, tl.full(amax.shape, LARGEST, tl.float32))
    if POW2:  # as in sync/quantize.py, _scale; a NaN or Inf stays one
        power = (scale.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000
        scale = tl.where(bits < 0x7F800000, power.to(tl.float32, bitcast=True), amax)
    if PER_ROW:
        tl.store(scale_ptr + (matrix * n + row) * columns + column, scale, mask=row < n)
    else:
        tl.store(scale_ptr + tl.program_id(0) + tl.arange(0, 1), scale)

    q = tl.div_rn(x, tl.broadcast_to(scale[:, None], (HEIGHT, WIDTH)))
    if CAST:
        q = q.to(tl.float8e4nv)
    tl.store(codes_ptr + (matrix * n + row[:, None]) * k + col[None, :], q, mask=inside)


def variant(granularity: Literal["block", "group"], scales: ScaleFormat, cast: bool = True) -> dict[str, Any]:
    """Compile-time arguments of quantize_kernel: a tile is a block, or 32 rows that have a scale each."""
    height, warps = {"block": (BLOCK[0], 8), "group": (32, 4)}[granularity]
    return {
        "PER_ROW": granularity == "group", "POW2": scales == "pow2", "CAST": cast, "LARGEST": E4M3_MAX,
        "HEIGHT": height, "WIDTH": BLOCK[1], "num_warps": warps,
    }  # fmt: skip


def quantize(
    x: Tensor,
    granularity: Literal["block", "group"] = "block",
    scales: ScaleFormat = "fp32",
    amax_floor: float = 1e-10,
    name: str = "tensor",
    *,
    codes: Tensor | None = None,
    refuse: bool = True,
) -> tuple[Tensor, Tensor]:
    """What sync.quantize.quantize returns, bit for bit, for blocks of 128 x 128 and groups of 1 x 128 on a GPU.

    x is [..., N, K] in bf16, fp16 or fp32, any strides, on a CUDA device (on the CPU under TRITON_INTERPRET=1).
    Returns `codes` float8_e4m3fn [..., N, K], contiguous (in `codes` if given), and `scale` float32 [..., ceil(N/128)
    or N, ceil(K/128)]. Waits for the device once, to look for a NaN or Inf, unless `refuse` is false.

    Raises ValueError for a NaN or Inf, naming `name` and the first bad index; for other dtypes or ranks; and for other
    granularities. After a NaN the contents of `codes` mean nothing.
    """
    check_input(x, name)
    if granularity not in ("block", "group"):
        raise ValueError(f"{name}: the Triton quantizer takes 'block' and 'group', not {granularity!r}")
    interpreted = knobs.runtime.interpret
    assert x.is_cuda or interpreted, "the kernel needs a CUDA tensor"
    assert amax_floor >= 1e-30, "s and x / s must stay normal numbers"
    if codes is None:
        codes = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    assert codes.shape == x.shape and codes.dtype == torch.float8_e4m3fn and codes.is_contiguous()
    n, k = x.shape[-2:]
    matrices = x.reshape(-1, n, k)
    options = variant(granularity, scales, cast=not interpreted)
    strips, columns = triton.cdiv(n, options["HEIGHT"]), triton.cdiv(k, options["WIDTH"])
    scale = torch.empty(*x.shape[:-2], n if granularity == "group" else strips, columns, device=x.device)
    out = torch.empty(x.shape, device=x.device) if interpreted else codes
    floor_bits = torch.tensor(amax_floor).view(torch.int32).item()
    launch: Any = quantize_kernel[(len(matrices) * strips * columns,)]
    with torch.cuda.device_of(x):
        launch(matrices, out, scale, n, k, *matrices.stride(), floor_bits, **options)
    if refuse:
        refuse_non_finite(scale, x, name)
    if interpreted:
        codes.copy_(out)
    return codes, scale
