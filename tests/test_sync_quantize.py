"""FP8 codes and scales against independent oracles: numpy with a code table, DeepGEMM's and SGLang's own functions.

DeepGEMM and SGLang are read, not imported: importing SGLang takes ten seconds and DeepGEMM wants a CUDA toolkit, while
the functions compared here are plain torch. `source_functions` runs their installed source text, unchanged.
"""

import ast
import importlib.util
import math
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.overrides import TorchFunctionMode

from sync import quantize as module
from sync.quantize import Fp8Config, Granularity, block_amax, dequantize, quantize, scale_name

GRANULARITIES: list[Granularity] = ["block", "group", "rowwise", "tensor"]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


pytestmark = pytest.mark.usefixtures("one_thread")


def source_functions(package: str, path: str, names: list[str], **scope: Any) -> dict[str, Any]:
    """The named top-level functions and constants of an installed package's file, without importing the package."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"{package} is not installed")
    tree = ast.parse(Path(spec.submodule_search_locations[0], path).read_text())
    wanted: list[ast.stmt] = []
    for node in tree.body:
        targets = [node.target] if isinstance(node, ast.AnnAssign) else []
        if getattr(node, "name", None) in names or any(getattr(t, "id", None) in names for t in targets):
            wanted.append(node)
    assert len(wanted) == len(names), f"{path} has changed"
    future = ast.parse("from __future__ import annotations").body
    exec(compile(ast.Module(body=[*future, *wanted], type_ignores=[]), path, "exec"), scope)
    return {name: scope[name] for name in names}


def bits(codes: torch.Tensor) -> np.ndarray:
    return codes.view(torch.uint8).numpy()


# ---- the oracle: E4M3 as a table of numbers, one block at a time ----


def code_values() -> np.ndarray:
    """Exact values of codes 0..126 (127 is NaN), from the definition of the format."""
    exponent, mantissa = np.arange(127) >> 3, np.arange(127) & 7
    return np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))


def nearest_code(x: np.ndarray) -> np.ndarray:
    """u8 code nearest to each number, ties to the even code; numbers above 448 saturate."""
    values = code_values()
    middles = (values[1:] + values[:-1]) / 2
    a = np.abs(x.astype(np.float64))
    low, high = np.searchsorted(middles, a, "left"), np.searchsorted(middles, a, "right")
    code = np.where(low % 2 == 0, low, high)  # differ only at a tie, where one of the two is even
    return (code + 128 * np.signbit(x)).astype(np.uint8)


def oracle(x: torch.Tensor, height: int, width: int, pow2: bool, floor: float) -> tuple[np.ndarray, np.ndarray]:
    a = x.float().numpy().reshape(-1, *x.shape[-2:])
    n, k = a.shape[1:]
    codes = np.zeros(a.shape, np.uint8)
    scale = np.zeros((len(a), math.ceil(n / height), math.ceil(k / width)), np.float32)
    for b, i, j in np.ndindex(scale.shape):
        where = np.s_[b, i * height : (i + 1) * height, j * width : (j + 1) * width]
        s = np.float32(max(np.float32(floor), np.abs(a[where]).max())) / np.float32(448)
        if pow2:
            mantissa, exponent = math.frexp(s)
            s = np.float32(2.0 ** (exponent - (mantissa == 0.5)))
        scale[b, i, j] = s
        codes[where] = nearest_code(np.clip(a[where] / s, -448, 448))
    lead = x.shape[:-2]
    return codes.reshape(x.shape), scale.reshape(*lead, *scale.shape[1:])


def block_of(granularity: str, shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, int]:
    n, k = shape[-2:]
    return {"block": block, "group": (1, block[1]), "rowwise": (1, k), "tensor": (n, k)}[granularity]


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("scales", ["fp32", "pow2"])
@pytest.mark.parametrize("shape", [(256, 384), (576, 192), (3, 64, 200), (2, 256, 128), (5, 7)], ids=str)
def test_bits_equal_the_oracle(granularity, scales, shape):
    for dtype in DTYPES:
        x = (torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 0.02).to(dtype)
        codes, scale = quantize(x, granularity, scales)
        expected_codes, expected_scale = oracle(x, *block_of(granularity, shape, (128, 128)), scales == "pow2", 1e-10)
        assert codes.dtype == torch.float8_e4m3fn and codes.is_contiguous() and scale.dtype == torch.float32
        assert scale.shape == expected_scale.shape
        np.testing.assert_array_equal(scale.numpy().view(np.uint32), expected_scale.view(np.uint32))
        np.testing.assert_array_equal(bits(codes), expected_codes)


@pytest.mark.parametrize("panel", [1, 700, 6000])
@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("shape", [(7, 48, 32), (7, 41, 37)], ids=str)
def test_bits_do_not_depend_on_the_panel(granularity, shape, panel, monkeypatch):
    """Panels of a strip, of a few strips and of a few matrices, of which the last has fewer."""
    monkeypatch.setattr(module, "PANEL", panel)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(6))
    codes, scale = quantize(x, granularity, block=(16, 16))
    expected_codes, expected_scale = oracle(x, *block_of(granularity, shape, (16, 16)), False, 1e-10)
    np.testing.assert_array_equal(scale.numpy(), expected_scale)
    np.testing.assert_array_equal(bits(codes), expected_codes)
    back = dequantize(codes, scale, granularity, (16, 16))
    monkeypatch.undo()
    assert torch.equal(back, dequantize(codes, scale, granularity, (16, 16)))


@st.composite
def problems(draw):
    """(x, granularity, scales, block): small blocks, so that most shapes have partial ones; all magnitudes of dtype."""
    dtype = draw(st.sampled_from(DTYPES))
    lead = draw(st.sampled_from([(), (), (1,), (3,), (2, 2)]))
    n, k = draw(st.integers(1, 20)), draw(st.integers(1, 40))
    largest = 15 if dtype == torch.float16 else 118
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    spread = draw(st.sampled_from([0, 4, 60]))
    exponents = draw(st.integers(-149, largest)) + torch.randint(
        -spread, spread + 1, (*lead, n, k), generator=generator
    )
    x = torch.randn((*lead, n, k), generator=generator).clamp(-1.9, 1.9).double() * 2.0 ** exponents.clamp(
        -149, largest
    )
    x = x * (torch.rand((*lead, n, k), generator=generator) >= draw(st.sampled_from([0, 0.5, 1])))
    x = x.to(dtype)
    if draw(st.booleans()):
        x = x.mT.contiguous().mT  # the same values behind other strides
    return x, draw(st.sampled_from(GRANULARITIES)), draw(st.sampled_from(["fp32", "pow2"])), draw(
        st.sampled_from([(8, 16), (4, 4), (16, 8), (1, 1)])
    )  # fmt: skip


@settings(deadline=None, max_examples=120)
@given(problems(), st.sampled_from([1e-10, 1e-4]))
def test_properties(problem, floor):
    x, granularity, scales, block = problem
    height, width = block_of(granularity, x.shape, block)
    codes, scale = quantize(x, granularity, scales, floor, block)
    expected_codes, expected_scale = oracle(x, height, width, scales == "pow2", floor)
    np.testing.assert_array_equal(scale.numpy(), expected_scale)
    np.testing.assert_array_equal(bits(codes), expected_codes)
    assert ((bits(codes) & 127) < 127).all(), "a NaN code"
    assert scale.isfinite().all() and (scale > 0).all()

    # Half a step: 2^-4 of a normal code's magnitude, 2^-10 s below the normal codes; plus the float32 roundings.
    back = dequantize(codes, scale, granularity, block)
    spread = scale.repeat_interleave(height, -2).repeat_interleave(width, -1)[..., : x.shape[-2], : x.shape[-1]]
    assert torch.equal(back, codes.float() * spread)
    bound = torch.maximum(x.double().abs() * 2.0**-4, spread.double() * 2.0**-10) * (1 + 1e-6)
    assert ((back.double() - x.double()).abs() <= bound).all()

    # Idempotent: the same codes (fp32 scales), the same values (pow2: 224 s is rewritten as 448 s/2).
    again, again_scale = quantize(back, granularity, scales, floor, block)
    if scales == "fp32":
        np.testing.assert_array_equal(bits(again), bits(codes))
        np.testing.assert_allclose(again_scale, scale, rtol=2.0**-22)
    else:
        assert torch.equal(dequantize(again, again_scale, granularity, block), back)

    if scales == "pow2":
        plain = quantize(x, granularity, "fp32", floor, block)[1]
        mantissa, _ = torch.frexp(scale)
        assert (mantissa == 0.5).all() and (scale >= plain).all() and (scale < 2 * plain).all()


@pytest.mark.parametrize("exponent", range(-40, 40))
def test_pow2_scales_are_exact_next_to_a_power_of_two(exponent):
    """Where ceil(log2(s)) in floating point goes wrong: s one step above, at, and below a power of two."""
    power = torch.tensor(2.0**exponent)
    for s in (power, torch.nextafter(power, torch.tensor(torch.inf)), torch.nextafter(power, torch.tensor(0.0))):
        amax = s * 448
        exact = Fraction(float((amax / torch.tensor(448.0)).item()))
        scale = Fraction(quantize(amax.view(1, 1), "tensor", "pow2", 1e-30)[1].item())
        assert scale >= exact > scale / 2


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_zero_and_subnormal_blocks_take_the_floor(granularity):
    x = torch.zeros(130, 256)
    x[0, 200] = 1e-44
    codes, scale = quantize(x, granularity, amax_floor=1e-4)
    assert (scale == torch.tensor(1e-4) / torch.tensor(448.0)).all() and (bits(codes) == 0).all()
    assert (dequantize(codes, scale, granularity) == 0).all()


def test_largest_floats():
    for dtype in DTYPES:
        x = torch.full((2, 2), torch.finfo(dtype).max, dtype=dtype)
        for scales in ("fp32", "pow2"):
            codes, scale = quantize(x, "tensor", scales)
            assert scale.isfinite().all() and ((bits(codes) & 127) < 127).all()


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_non_finite_values_are_refused_with_name_and_index(granularity, bad, dtype):
    x = torch.ones(2, 130, 140, dtype=dtype)
    x[1, 129, 139] = x[1, 129, 7] = bad
    with pytest.raises(ValueError, match=r"layers\.0\.up_proj holds a NaN or Inf, the first at index \(1, 129, 7\)"):
        quantize(x, granularity, name="layers.0.up_proj")


@pytest.mark.parametrize("x", [torch.ones(4), torch.ones(2, 2, dtype=torch.int32), torch.ones(0, 4)])
def test_what_cannot_be_quantized(x):
    with pytest.raises(ValueError, match="cannot be quantized"):
        quantize(x)


@settings(deadline=None, max_examples=60)
@given(problems())
def test_block_amax_is_the_exact_maximum(problem):
    x, granularity, _, block = problem
    height, width = block_of(granularity, x.shape, block)
    amax = block_amax(x, granularity, block)
    assert amax.dtype == torch.float32
    a = np.abs(x.double().numpy())
    for *lead, i, j in np.ndindex(amax.shape):
        where = np.s_[*lead, i * height : (i + 1) * height, j * width : (j + 1) * width]
        assert amax[*lead, i, j].item() == a[where].max()


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_block_amax_loses_no_nan_and_no_inf(granularity, dtype):
    x = torch.full((2, 130, 140), torch.finfo(dtype).max, dtype=dtype)
    x[1, 129, 139] = -math.inf
    amax = block_amax(x, granularity)
    assert amax[1, -1, -1] == math.inf and amax[0].isfinite().all()
    x[1, 129, 138] = -torch.tensor(math.nan, dtype=dtype)
    assert block_amax(x, granularity)[1, -1, -1].isnan()


@settings(deadline=None, max_examples=100)
@given(problems(), st.sets(st.integers(1, 30), max_size=4))
def test_slices_with_exchanged_amaxes_give_the_codes_of_the_whole(problem, cuts):
    """Ranks that hold any rows: each cuts its own at the borders of blocks, the amax of shared blocks is exchanged."""
    x, granularity, scales, block = problem
    x = x.flatten(0, -2)
    height, width = block_of(granularity, x.shape, block)
    expected_codes, expected_scale = oracle(x, height, width, scales == "pow2", 1e-10)
    borders = {0, len(x), *range(0, len(x), height), *(cut for cut in cuts if cut < len(x))}
    slices = [(slice(a, b), slice(a // height, a // height + 1)) for a, b in pairwise(sorted(borders))]
    amax = torch.zeros(expected_scale.shape)
    for rows, blocks in slices:
        amax[blocks] = torch.maximum(amax[blocks], block_amax(x[rows], granularity, block))
    staging = torch.empty(x.shape, dtype=torch.float8_e4m3fn)
    for rows, blocks in slices:
        target = staging[rows]
        codes, scale = quantize(x[rows], granularity, scales, block=block, amax=amax[blocks], codes=target)
        assert codes is target
        np.testing.assert_array_equal(scale.numpy(), expected_scale[blocks])
    np.testing.assert_array_equal(bits(staging), expected_codes)


def test_codes_go_to_any_place_in_a_byte_buffer():
    x = torch.randn(2, 130, 140)
    staging = torch.zeros(x.numel() + 4, dtype=torch.uint8)
    target = staging[3:-1].view(torch.float8_e4m3fn).view(x.shape)
    for granularity in GRANULARITIES:
        codes, scale = quantize(x, granularity, codes=target)
        expected_codes, expected_scale = quantize(x, granularity)
        assert codes is target and torch.equal(scale, expected_scale)
        np.testing.assert_array_equal(bits(staging[3:-1]), bits(expected_codes).flatten())
    assert not staging[:3].any() and staging[-1] == 0
    before = staging.clone()
    with pytest.raises(ValueError, match="NaN"):
        quantize(x / 0, codes=target)
    assert torch.equal(staging, before)  # refused before anything is written


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_bad_amax_from_another_rank_is_refused(bad):
    x = torch.ones(4, 256)
    with pytest.raises(ValueError, match="k_proj holds a NaN or Inf, in a part that another rank holds"):
        quantize(x, name="k_proj", amax=torch.tensor([[1.0, bad]]))
    x[2, 130] = bad
    with pytest.raises(ValueError, match=r"k_proj holds a NaN or Inf, the first at index \(2, 130\)"):
        quantize(x, name="k_proj", amax=torch.tensor([[1.0, bad]]))


class LargestTensor(TorchFunctionMode):
    """Bytes of the largest tensor that an operation allocated (views of its inputs do not count)."""

    bytes = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        with torch._C.DisableTorchFunction():
            inputs = {a.untyped_storage().data_ptr() for a in args if isinstance(a, torch.Tensor)}
            if isinstance(result, torch.Tensor) and result.untyped_storage().data_ptr() not in inputs:
                self.bytes = max(self.bytes, result.untyped_storage().nbytes())
        return result


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("shape", [(3000, 2048), (24, 128, 2048), (300, 96, 128)], ids=str)
def test_no_temporary_grows_with_the_tensor(granularity, shape):
    x = torch.ones(shape, dtype=torch.bfloat16)
    with LargestTensor() as largest:
        quantize(x, granularity)
    assert largest.bytes <= max(x.numel(), 4 * module.PANEL)  # the codes themselves, or one float32 panel


# ---- other people's quantizers ----


def deepgemm() -> dict[str, Any]:
    names = ["per_block_cast_to_fp8", "per_token_cast_to_fp8", "ceil_to_ue8m0", "ceil_div", "align"]
    return source_functions("deep_gemm", "utils/math.py", names, torch=torch)


@pytest.mark.parametrize("shape", [(256, 512), (576, 192), (130, 260)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_deepgemm(shape, dtype):
    """Same scales to the bit; same codes with pow2, and all but those at a tie with fp32 scales (x * (1/s) there)."""
    functions = deepgemm()
    x = torch.randn(shape, generator=torch.Generator().manual_seed(2)).to(dtype)
    x[:128, :128] *= 1e-6  # below DeepGEMM's floor of 1e-4
    pairs: list[tuple[Granularity, str]] = [("block", "per_block_cast_to_fp8"), ("group", "per_token_cast_to_fp8")]
    for granularity, function in pairs:
        for scales in ("fp32", "pow2"):
            codes, scale = quantize(x, granularity, scales, amax_floor=1e-4)
            their_codes, their_scale = functions[function](x, scales == "pow2")
            assert torch.equal(scale, their_scale)
            allowed = (
                0.0 if scales == "pow2" else {torch.float32: 1e-4, torch.float16: 5e-4, torch.bfloat16: 2e-3}[dtype]
            )
            assert (bits(codes) != bits(their_codes)).mean() <= allowed


def test_sglang_pow2_blocks_have_the_same_bits():
    functions = source_functions(
        "sglang", "srt/layers/quantization/fp8_utils.py", ["per_block_cast_to_fp8", "ceil_to_ue8m0"],
        torch=torch, ceil_align=lambda x, y: -(-x // y) * y,
    )  # fmt: skip
    x = torch.randn(576, 300, generator=torch.Generator().manual_seed(3)).bfloat16()
    x[:128, :128] = 0
    codes, scale = quantize(x, "block", "pow2", amax_floor=1e-4)
    their_codes, their_scale = functions["per_block_cast_to_fp8"](x)
    assert torch.equal(scale, their_scale) and np.array_equal(bits(codes), bits(their_codes))


def test_sglang_fp32_and_tensor_quantizers_differ_only_at_ties():
    """They multiply by 448/amax: measured 4e-4 (blocks) and 2e-4 (tensor) of the codes of bf16 data, one step each."""
    scope = {"torch": torch, "cdiv": lambda x, y: -(-x // y), "_is_fp8_fnuz": False, "fp8_dtype": torch.float8_e4m3fn}
    block = source_functions("sglang", "benchmark/deepseek_utils.py", ["per_block_cast_to_fp8"], **scope)
    tensor = source_functions("sglang", "srt/layers/quantization/fp8_utils.py", ["input_to_float8"], **scope)
    x = torch.randn(1024, 1024, generator=torch.Generator().manual_seed(4)).bfloat16()
    pairs: list[tuple[Granularity, Any]] = [
        ("block", block["per_block_cast_to_fp8"]),
        ("tensor", tensor["input_to_float8"]),
    ]
    for granularity, theirs in pairs:
        codes, scale = quantize(x, granularity, amax_floor=1e-4)
        their_codes, their_scale = theirs(x)
        torch.testing.assert_close(scale.view(their_scale.shape), their_scale, rtol=2.0**-22, atol=0)
        ours, other = bits(codes).astype(int), bits(their_codes).astype(int)
        assert abs(ours - other).max() <= 1 and (ours != other).mean() < 1e-3


def test_sglang_dequantizes_to_the_same_values():
    theirs = source_functions(
        "sglang", "srt/layers/quantization/fp8_utils.py", ["block_quant_dequant"], torch=torch
    )["block_quant_dequant"]  # fmt: skip
    codes, scale = quantize(torch.randn(3, 576, 300))
    assert torch.equal(dequantize(codes, scale), theirs(codes, scale, [128, 128], torch.float32))


def test_master_and_bf16_cast_differ_in_2_4_percent_of_codes():
    """Why both sides must quantize the same tensor (ALGORITHMS §1)."""
    x = torch.randn(1024, 1024, generator=torch.Generator().manual_seed(5))
    different = (bits(quantize(x)[0]) != bits(quantize(x.bfloat16())[0])).mean()
    assert different == pytest.approx(0.024, abs=0.001)


# ---- which layers: the names ----


def model_names(n_layers: int, experts: int = 0, stacked: bool = False, shared: bool = False) -> list[str]:
    """Hugging Face parameter names of Qwen3 (experts=0), Qwen3-MoE, or one with a shared expert."""
    names = ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"]
    for layer in range(n_layers):
        names += [f"model.layers.{layer}.{norm}.weight" for norm in ("input_layernorm", "post_attention_layernorm")]
        names += [f"model.layers.{layer}.self_attn.{p}_proj.weight" for p in "qkvo"]
        names += [f"model.layers.{layer}.self_attn.{p}_proj.bias" for p in "qkv"]
        names += [f"model.layers.{layer}.self_attn.{p}_norm.weight" for p in "qk"]
        mlp, projections = f"model.layers.{layer}.mlp", ("gate_proj", "up_proj", "down_proj")
        if not experts:
            names += [f"{mlp}.{p}.weight" for p in projections]
            continue
        names.append(f"{mlp}.gate.weight")
        if stacked:
            names += [f"{mlp}.experts.gate_up_proj", f"{mlp}.experts.down_proj"]
        else:
            names += [f"{mlp}.experts.{e}.{p}.weight" for e in range(experts) for p in projections]
        if shared:
            names += [f"{mlp}.shared_expert_gate.weight", *(f"{mlp}.shared_expert.{p}.weight" for p in projections)]
    return names


MODELS = {
    "Qwen3 dense": model_names(12),
    "Qwen3-MoE": model_names(12, experts=4),
    "Qwen3-MoE stacked": model_names(12, experts=4, stacked=True),
    "Qwen2-MoE": model_names(12, experts=2, shared=True),
}
CONFIGS = [
    Fp8Config(),
    Fp8Config(num_first_layers_in_bf16=1, num_last_layers_in_bf16=2),
    Fp8Config(ignored_layers=["layers.1"]),
    Fp8Config(ignored_layers=["self_attn", "lm_head"]),
    Fp8Config(ignored_layers=["layers.1*.mlp"], num_first_layers_in_bf16=2),
    Fp8Config(ignored_layers=["o_proj"]),
]


def engine_modules(names: list[str]) -> dict[str, list[str]]:
    """SGLang's quantizable modules, each with the Hugging Face parameters it holds."""
    modules: dict[str, list[str]] = {}
    fused = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj", "gate_proj": "gate_up_proj", "up_proj": "gate_up_proj"}  # fmt: skip  # noqa: E501
    for name in names:
        if ".experts." in name:
            modules.setdefault(name.split(".experts.")[0] + ".experts", []).append(name)
        elif name.endswith("_proj.weight"):
            parent, _, leaf = name.removesuffix(".weight").rpartition(".")
            modules.setdefault(f"{parent}.{fused.get(leaf, leaf)}", []).append(name)
    return modules


def decision(config: Fp8Config, names: list[str]) -> bool:
    (quantized,) = {config.is_quantized(name, (2, 128, 128), 12) for name in names}
    return quantized


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: f"{c.ignored_layers}{c.num_first_layers_in_bf16}")
def test_sglang_skips_exactly_what_we_do_not_quantize(model, config):
    names = ["_module_path_match", "_FALLBACK_FUSED_SHARDS", "is_layer_skipped"]
    functions = source_functions(
        "sglang", "srt/layers/quantization/utils.py", names, MappingProxyType=MappingProxyType
    )  # fmt: skip
    override = config.sglang_quantization_config(12, MODELS[model])
    plain = [entry.removeprefix("model.") for entry in override["ignored_layers"]]
    ignored = [*plain, *(f"model.{entry}" for entry in plain)]  # Fp8Config.from_config, checked by the slow test
    modules = engine_modules(MODELS[model])
    assert len(modules) >= 36
    for prefix, parts in modules.items():
        assert functions["is_layer_skipped"](prefix, ignored) == (not decision(config, parts)), prefix


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_sglangs_own_config_class_agrees(model):
    from sglang.srt.layers.quantization.fp8 import Fp8Config as SglangConfig
    from sglang.srt.layers.quantization.utils import is_layer_skipped

    packed = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
    for config in CONFIGS:
        override = config.sglang_quantization_config(12, MODELS[model])
        theirs = SglangConfig.from_config(override | {"packed_modules_mapping": packed})
        assert theirs.is_checkpoint_fp8_serialized and theirs.weight_block_size == [128, 128]
        assert theirs.scale_fmt is None
        for prefix, parts in engine_modules(MODELS[model]).items():
            assert is_layer_skipped(prefix, theirs.ignored_layers, packed) == (not decision(config, parts)), prefix
    pow2 = Fp8Config(scales="pow2").sglang_quantization_config(12, MODELS[model])
    assert SglangConfig.from_config(pow2).scale_fmt == "ue8m0"


def test_names_that_are_quantized():
    config, names = Fp8Config(), model_names(1, experts=1, shared=True) + model_names(1, experts=1, stacked=True)
    quantized = {name for name in names if config.is_quantized(name, (128, 128), 1)}
    layer = "model.layers.0"
    assert quantized == {
        *(f"{layer}.self_attn.{p}_proj.weight" for p in "qkvo"),
        *(f"{layer}.mlp.experts.0.{p}_proj.weight" for p in ("gate", "up", "down")),
        *(f"{layer}.mlp.shared_expert.{p}_proj.weight" for p in ("gate", "up", "down")),
        f"{layer}.mlp.experts.gate_up_proj", f"{layer}.mlp.experts.down_proj",
    }  # fmt: skip
    assert not config.is_quantized(f"{layer}.mlp.experts.down_proj_bias", (4, 128), 1)
    assert not config.is_quantized(f"{layer}.self_attn.q_proj.weight", (128,), 1)
    assert not any(Fp8Config(enabled=False).is_quantized(name, (128, 128), 1) for name in names)
    assert scale_name("a.q_proj.weight") == "a.q_proj.weight_scale_inv"


@pytest.mark.parametrize(
    ("pattern", "matched"),
    [
        ("down_proj", {"layers.1.mlp.down_proj", "layers.11.mlp.down_proj"}),
        ("layers.1", {"layers.1.mlp.down_proj", "layers.1.mlp.gate_proj"}),
        ("layers.1*.mlp.gate_proj", {"layers.1.mlp.gate_proj", "layers.11.mlp.gate_proj"}),
        ("model.layers.11.mlp.gate_proj", {"layers.11.mlp.gate_proj"}),
        ("proj", set()),
        ("gate", set()),
    ],
)
def test_ignored_patterns_match_whole_components(pattern, matched):
    config = Fp8Config(ignored_layers=[pattern])
    modules = [f"layers.{i}.mlp.{p}_proj" for i in (1, 11) for p in ("gate", "down")]
    ignored = {m for m in modules if not config.is_quantized(f"model.{m}.weight", (128, 128), 12)}
    assert ignored == matched


@pytest.mark.parametrize(
    ("config", "model", "message"),
    [
        (Fp8Config(ignored_layers=["layers.3.self_attn.q_proj"]), "Qwen3 dense", r"splits .*layers\.3.*qkv_proj"),
        (Fp8Config(ignored_layers=["up_proj"]), "Qwen3 dense", "splits .*gate_up_proj"),
        (Fp8Config(ignored_layers=["layers.0.mlp.experts.2"]), "Qwen3-MoE", r"splits .*layers\.0\.mlp\.experts,"),
        (Fp8Config(ignored_layers=["experts.down_proj"]), "Qwen3-MoE stacked", "splits .*experts,"),
        (Fp8Config(ignored_layers=["donw_proj"]), "Qwen3 dense", "'donw_proj' matches no module"),
        (Fp8Config(num_first_layers_in_bf16=6, num_last_layers_in_bf16=6), "Qwen3 dense", "stays in BF16"),
        (Fp8Config(granularity="rowwise"), "Qwen3 dense", "takes 'block' weights, not 'rowwise'"),
        (Fp8Config(granularity="tensor"), "Qwen3 dense", "takes 'block' weights, not 'tensor'"),
    ],
)
def test_configs_sglang_cannot_serve_are_refused(config, model, message):
    with pytest.raises(ValueError, match=message):
        config.sglang_quantization_config(12, MODELS[model])


def test_a_layer_beyond_the_model_is_refused():
    with pytest.raises(ValueError, match="layer 12 of a model with 12 layers"):
        Fp8Config().is_quantized("model.layers.12.self_attn.q_proj.weight", (128, 128), 12)


def test_ignored_experts_are_one_entry_and_never_the_neighbour():
    config = Fp8Config(ignored_layers=["layers.1.mlp.experts"])
    ignored = config.sglang_quantization_config(12, MODELS["Qwen3-MoE"])["ignored_layers"]
    assert [entry for entry in ignored if "experts" in entry] == ["model.layers.1.mlp.experts"]


@pytest.mark.parametrize(
    "section",
    [
        {"granularity": "group"}, {"scales": "bf16"}, {"amax_floor": 0.0}, {"num_first_layers_in_bf16": -1},
        {"ignored_layers": [""]}, {"ignored_layers": ["q_proj.weight"]}, {"ignored_layers": ["a."]}, {"typo": 1},
    ],
    ids=str,
)  # fmt: skip
def test_bad_sections_are_refused(section):
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(section, Fp8Config)


def test_code_table_of_the_oracle():
    values = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double().numpy()
    assert np.array_equal(code_values(), values) and all(a < b for a, b in pairwise(values))
