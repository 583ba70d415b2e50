"""The only definition of FP8 codes and scales: trainer, swap and engine must agree on them to the bit.

Formula (ALGORITHMS §1), in float32 whatever the input dtype:

    amax = max(amax_floor, max|x| over the block)
    s    = amax / 448                        stored as "<name>_scale_inv"
    s    = 2^ceil(log2 s)                    only with pow2 scales, exact
    q    = cast_e4m3fn(clamp(x / s, -448, 448))        x_hat = q * s

A granularity is nothing but the shape of a block, so that one code path serves all; scales have one row and column per
block of an [..., N, K] tensor, leading dimensions (stacked experts) are batch dimensions:

    block    128 x 128    [..., ceil(N/128), ceil(K/128)]    weights
    group      1 x 128    [..., N, ceil(K/128)]              activations
    rowwise    1 x K      [..., N, 1]                        per token, per output channel
    tensor     N x K      [..., 1, 1]                        per matrix; an expert stack has one scale per expert

We divide by s. DeepGEMM and SGLang multiply by 1/s (their torch and Triton code alike), which rounds twice; x/s rounds
once, so the code is the one nearest to the quotient, on every device. With pow2 scales both give the same bits. With
fp32 scales the scales are the same, and codes differ where x/s lies within a rounding error of the middle between two
codes: 3e-7 of float32, 5e-5 of float16, 4e-4 of bfloat16 values (measured on Gaussian data against DeepGEMM; bfloat16
meets ties often). Harmless for weights: an engine never quantizes them, it receives these codes and scales.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Annotated, Any, Literal

import msgspec
import torch
from torch import Tensor

from sync.fields import doc

E4M3_MAX = 448.0
E5M2_MAX = 57344.0
BLOCK = (128, 128)
PANEL = 1 << 19  # elements worked on at once: float32 temporaries stay at 2 MiB, within the cache

LARGEST = {torch.float8_e4m3fn: E4M3_MAX, torch.float8_e5m2: E5M2_MAX}

Granularity = Literal["block", "group", "rowwise", "tensor"]
ScaleFormat = Literal["fp32", "pow2"]

PROJECTIONS = frozenset({"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"})
EXPERT_STACKS = frozenset({"gate_up_proj", "gate_proj", "up_proj", "down_proj"})  # [E, N, K] parameters of `experts`
FUSED = {  # what SGLang stores as one tensor, and therefore quantizes whole or not at all; so are a layer's experts
    "q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj",
    "gate_proj": "gate_up_proj", "up_proj": "gate_up_proj",
}  # fmt: skip
MAGNITUDE = {  # integer view of a float dtype, and the mask that removes the sign
    torch.bfloat16: (torch.int16, 0x7FFF), torch.float16: (torch.int16, 0x7FFF),
    torch.float32: (torch.int32, 0x7FFFFFFF),
}  # fmt: skip


class Fp8Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which weights are FP8 and how; read by the engine's launch, every swap and the trainer, so that they agree."""

    enabled: Annotated[bool, doc("Quantize the projections to FP8 (E4M3); off means BF16 everywhere.")] = True
    granularity: Annotated[
        Literal["block", "rowwise", "tensor"],
        doc("One weight scale per 128x128 block, per output row, or per matrix. SGLang is served `block` only."),
    ] = "block"
    scales: Annotated[
        ScaleFormat, doc("fp32 (Hopper), or pow2: scales rounded up to powers of two (UE8M0, Blackwell).")
    ] = "fp32"
    amax_floor: Annotated[
        float, doc("Smallest amax of a block; keeps the scales of zero blocks finite.", ge=1e-30, le=1.0)
    ] = 1e-10
    ignored_layers: Annotated[
        list[str],
        doc(
            "Modules kept in BF16. A pattern matches where it covers whole dotted components of the module name, "
            "anywhere: `down_proj`, `layers.3.mlp`, `layers.*.o_proj` (`*`, `?`, `[0-3]` as in a shell, `*` also "
            "crosses dots)."
        ),
    ] = []
    num_first_layers_in_bf16: Annotated[int, doc("Decoder layers at the start kept in BF16.", ge=0)] = 0
    num_last_layers_in_bf16: Annotated[int, doc("Decoder layers at the end kept in BF16.", ge=0)] = 0
    train: Annotated[
        Literal["off", "auto", "reference", "te", "deepgemm"],
        doc(
            "What computes the same layers' forward, dgrad and wgrad in FP8; off: the trainer multiplies in its own "
            "dtype. reference: torch, any device; te: Transformer Engine; deepgemm: DeepGEMM; auto: deepgemm where it "
            "can run, else reference."
        ),
    ] = "off"
    gradients: Annotated[
        Literal["e4m3", "e5m2"],
        doc("Format of the gradients of the layers' outputs, where the trainer computes in FP8."),
    ] = "e4m3"

    def __post_init__(self) -> None:
        if self.train != "off" and not (self.enabled and self.granularity == "block"):
            raise ValueError(f"train = {self.train} needs enabled = true and granularity = block")
        for pattern in self.ignored_layers:
            if not pattern or pattern != pattern.strip(". ") or pattern.endswith((".weight", ".bias")):
                raise ValueError(f"ignored_layers: {pattern!r} must be a module name such as 'layers.0.mlp.down_proj'")

    def is_quantized(self, hf_weight_name: str, shape: Sequence[int], n_layers: int) -> bool:
        """Whether this Hugging Face parameter travels as FP8 codes with a scale.

        True for q/k/v/o_proj, gate/up/down_proj and the experts' projections (one per expert, or stacked 3-D
        parameters) unless ignored; never for embed_tokens, lm_head, norms, the router, shared_expert_gate, biases.
        `n_layers` is the model's num_hidden_layers. Raises ValueError for a layer index beyond it.
        """
        module = _module_of(hf_weight_name)
        return len(shape) >= 2 and module is not None and self._quantizes(module, n_layers)

    def _quantizes(self, module: str, n_layers: int) -> bool:
        parent, _, leaf = module.rpartition(".")
        stacked = leaf in EXPERT_STACKS and parent.endswith("experts")
        if not self.enabled or not (leaf in PROJECTIONS or stacked):
            return False
        if found := re.search(r"(?:^|\.)layers\.(\d+)\.", module):
            layer = int(found[1])
            if layer >= n_layers:
                raise ValueError(f"{module}: layer {layer} of a model with {n_layers} layers")
            if layer < self.num_first_layers_in_bf16 or layer >= n_layers - self.num_last_layers_in_bf16:
                return False
        return not any(_matches(pattern, module) for pattern in self.ignored_layers)

    def sglang_quantization_config(self, n_layers: int, names: Iterable[str]) -> dict[str, Any]:
        """The `quantization_config` override that makes SGLang quantize exactly the layers `is_quantized` names.

        `names` are the Hugging Face names of all parameters of the model. SGLang (layers/quantization/fp8.py,
        utils.py:is_layer_skipped) skips a linear when an entry of `ignored_layers` covers whole dotted components of
        its name; it looks up a fused linear under the names of its parts, and a layer's experts as one module. So the
        list spells out full names, never patterns, with the parts of fused linears, and one `….mlp.experts` per layer.
        pow2 scales add `scale_fmt: ue8m0`, which makes SGLang round its activation scales likewise.

        Raises ValueError where SGLang could not do the same: another granularity than block, an ignored set that
        splits a fused linear or a layer's experts, a pattern that matches nothing, or nothing left to quantize.
        """
        assert self.enabled, "a BF16 engine has no quantization_config"
        if self.granularity != "block":
            raise ValueError(
                f"fp8.granularity: the SGLang engine takes 'block' weights, not {self.granularity!r} (its rowwise and "
                "per-tensor methods use other parameter names and layouts)"
            )
        modules = list(dict.fromkeys(module for name in names if (module := _module_of(name))))
        for pattern in self.ignored_layers:
            if not any(_matches(pattern, module) for module in modules):
                raise ValueError(f"fp8.ignored_layers: {pattern!r} matches no module of the model")
        quantized = {module: self._quantizes(module, n_layers) for module in modules}
        if not any(quantized.values()):
            raise ValueError(f"fp8: every one of the {n_layers} layers stays in BF16; set fp8.enabled=false instead")
        _refuse_split_units(quantized)
        skipped = [module for module in modules if not quantized[module] and not module.endswith("norm")]
        config: dict[str, Any] = {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": list(BLOCK),
            "ignored_layers": list(dict.fromkeys(_experts_of(module) or module for module in skipped)),
        }
        return config | ({"scale_fmt": "ue8m0"} if self.scales == "pow2" else {})


def audit_layers(trained: Iterable[str], served: Mapping[str, Any], names: Iterable[str]) -> None:
    """ValueError naming the modules that only one of trainer and engine computes in FP8.

    `trained`: Hugging Face names of the weights that the trainer multiplies with in FP8; `served`: the engine's
    `quantization_config`; `names`: of all parameters of the model. Read as SGLang reads it: every linear layer is
    quantized that no entry of `ignored_layers` covers. A layer's experts count as one module.
    """

    def units(names: Iterable[str]) -> set[str]:
        modules = {module for name in names if (module := _module_of(name))}
        return {_experts_of(module) or module for module in modules if not module.endswith("norm")}

    def covered(module: str) -> bool:
        return any(f".{entry}." in f".{module}." for entry in served["ignored_layers"])

    engine = {module for module in units(names) if not covered(module)}
    ours = units(trained)
    sides = [("the trainer alone", ours - engine), ("the engine alone", engine - ours)]
    if found := [f"{side} quantizes {', '.join(sorted(modules))}" for side, modules in sides if modules]:
        raise ValueError(f"fp8: trainer and engine differ: {'; '.join(found)}")


def scale_name(hf_weight_name: str) -> str:
    """Hugging Face's (and SGLang's) name of the scale of a quantized parameter."""
    return hf_weight_name + "_scale_inv"


def block_amax(x: Tensor, granularity: Granularity = "block", block: tuple[int, int] = BLOCK) -> Tensor:
    """float32 max|x| over every block of x, [..., N, K] in bf16, fp16 or fp32: [..., block rows, block columns].

    Exact, and NaN above Inf above all numbers. So a block that lies on several ranks has the maximum of their values,
    to be taken on the bits (`.view(torch.int32)`), which order likewise: a float maximum may lose a NaN.
    """
    n, k = x.shape[-2:]
    height, width = _tile_shape(granularity, k, block)
    matrices = x.reshape(-1, n, k)
    amax = torch.empty(len(matrices), -(-n // height), -(-k // width), device=x.device)
    for blocks, tile in _tiles(matrices, height, width):
        amax[blocks] = _tile_amax(tile)
    amax = amax.view(*x.shape[:-2], *amax.shape[1:])
    return amax.amax(-2, keepdim=True) if granularity == "tensor" else amax


def quantize(
    x: Tensor,
    granularity: Granularity = "block",
    scales: ScaleFormat = "fp32",
    amax_floor: float = 1e-10,
    block: tuple[int, int] = BLOCK,
    name: str = "tensor",
    *,
    amax: Tensor | None = None,
    codes: Tensor | None = None,
    dtype: torch.dtype = torch.float8_e4m3fn,
    refuse: bool = True,
) -> tuple[Tensor, Tensor]:
    """FP8 codes and scales of x, [..., N, K] in bf16, fp16 or fp32, any strides, any device.

    Returns `codes` float8_e4m3fn [..., N, K], contiguous, and `scale` float32 (shapes: see the top of this file).
    `block` sets the block of "block" and, by its second entry, of "group"; blocks at the edges may be partial. A stack
    [E, 2I, K] of gate over up is right only for I % 128 == 0: no block may cover rows of both.

    `amax`, float32 of the shape of `scale`, is used instead of `block_amax(x)`, for rows of x whose blocks reach into
    another rank's rows; no |x| may exceed it. Blocks are counted from the first row given, so cut x at the borders of
    blocks first. `codes`, of the shape of x and contiguous, receives the codes and is returned. `dtype` float8_e5m2
    makes codes of that format, with 57344 for 448 in the formula: gradients, where the trainer is told so. With
    `refuse` false a NaN or Inf raises nothing, and nothing waits for the device: it becomes a NaN (with fp32 scales its
    whole block does).

    Raises ValueError for a NaN or Inf in x or amax, naming `name` and the first bad index of x, before any code is
    written; and for other dtypes or ranks.
    """
    check_input(x, name)
    assert amax_floor >= 1e-30, "s and x / s must stay normal numbers"
    n, k = x.shape[-2:]
    height, width = _tile_shape(granularity, k, block)
    shape = (*x.shape[:-2], *((1, 1) if granularity == "tensor" else (-(-n // height), -(-k // width))))
    amax = block_amax(x, granularity, block) if amax is None else amax
    assert amax.shape == shape and amax.dtype == torch.float32
    if refuse:
        refuse_non_finite(amax, x, name)
    scale = _scale(amax, scales, amax_floor, LARGEST[dtype])
    per_tile = scale.expand(*x.shape[:-2], -(-n // height), -(-k // width))
    if codes is None:
        codes = torch.empty(x.shape, dtype=dtype, device=x.device)
    assert codes.shape == x.shape and codes.dtype == dtype and codes.is_contiguous()
    matrices, out, s = x.reshape(-1, n, k), codes.view(-1, n, k), per_tile.reshape(-1, *per_tile.shape[-2:])
    for (blocks, tile), (_, target) in zip(_tiles(matrices, height, width), _tiles(out, height, width)):
        # No clamp: |x| / s is at most 448 (1 + 2^-22), and the cast rounds everything below 464 to 448; so with E5M2.
        target.copy_(tile.float() / s[blocks][:, :, None, :, None])
    return codes, scale


def dequantize(
    codes: Tensor, scale: Tensor, granularity: Granularity = "block", block: tuple[int, int] = BLOCK
) -> Tensor:
    """float32 values q * s of what `quantize` returned, [..., N, K].

    Codes 256..448 times a pow2 scale exceed float32 for |x| above 248 * 2^120, to which Inf is the answer.
    """
    n, k = codes.shape[-2:]
    height, width = _tile_shape(granularity, k, block)
    # The value of every code: a look-up is six times as fast as torch's own cast from float8 on a CPU.
    values = torch.arange(256, dtype=torch.uint8, device=codes.device).view(codes.dtype).float()
    x = torch.empty(codes.shape, device=codes.device)
    per_tile = scale.expand(*codes.shape[:-2], -(-n // height), -(-k // width))
    matrices, out, s = codes.reshape(-1, n, k), x.view(-1, n, k), per_tile.reshape(-1, *per_tile.shape[-2:])
    for (blocks, tile), (_, target) in zip(_tiles(matrices, height, width), _tiles(out, height, width)):
        q = values.index_select(0, tile.view(torch.uint8).int().flatten()).view(tile.shape)
        torch.mul(q, s[blocks][:, :, None, :, None], out=target)
    return x


def check_input(x: Tensor, name: str) -> None:
    """ValueError for what cannot be quantized: other ranks, other dtypes, no elements."""
    if x.ndim < 2 or x.dtype not in MAGNITUDE or x.numel() == 0:
        raise ValueError(f"{name}: {x.dtype}{list(x.shape)} cannot be quantized; allowed: bf16, fp16, fp32 [..., N, K]")


def refuse_non_finite(amax: Tensor, x: Tensor, name: str) -> None:
    """ValueError if the amax of the blocks of x, or scales made from it, hold a NaN or Inf. Waits for the device."""
    if not bool(amax.isfinite().all()):
        index = x.isfinite().logical_not().nonzero()
        where = f"the first at index {tuple(index[0].tolist())}" if len(index) else "in a part that another rank holds"
        raise ValueError(f"{name} holds a NaN or Inf, {where}")


def _scale(amax: Tensor, scales: ScaleFormat, amax_floor: float, largest: float) -> Tensor:
    # A tensor 448, not a Python one: CUDA kernels multiply by the reciprocal of a Python scalar, CPUs divide.
    scale = amax.clamp_min(amax_floor) / torch.full((), largest, device=amax.device)
    if scales == "fp32":
        return scale
    # 2^ceil(log2 s) on the bits: any mantissa bit carries into the exponent, then the mantissa is cleared.
    return ((scale.view(torch.int32) + 0x7FFFFF) & 0x7F800000).view(torch.float32)


def _tile_shape(granularity: Granularity, k: int, block: tuple[int, int]) -> tuple[int, int]:
    """Rows and columns that share an amax; "tensor" starts from rows, and takes their maximum afterwards."""
    return {"block": block, "group": (1, block[1]), "rowwise": (1, k), "tensor": (1, k)}[granularity]


def _tiles(matrices: Tensor, height: int, width: int) -> Iterator[tuple[tuple[slice, ...], Tensor]]:
    """Views [B, block rows, height, block columns, width] of about PANEL elements that cover matrices [B, N, K] once.

    Each comes with its place in the array of scales. Small matrices are taken several at once. Partial blocks at the
    edges form tiles of their own, so nothing is ever padded.
    """
    b, n, k = matrices.shape
    many, step = max(1, PANEL // (n * k)), max(1, PANEL // (height * k)) * height
    whole_n, whole_k = n - n % height, k - k % width
    strips = [(top, min(top + step, whole_n), height) for top in range(0, whole_n, step)]
    for first in range(0, b, many):
        for top, bottom, h in [*strips, (whole_n, n, n % height)]:
            for left, right, w in [(0, whole_k, width), (whole_k, k, k % width)]:
                if top < bottom and left < right:
                    tile = matrices[first : first + many, top:bottom, left:right].unflatten(2, (-1, w))
                    rows, columns = slice(top // height, -(-bottom // height)), slice(left // width, -(-right // width))
                    yield (slice(first, first + many), rows, columns), tile.unflatten(1, (-1, h))


def _tile_amax(tile: Tensor) -> Tensor:
    # Without their sign, float bits order like magnitudes, NaN above Inf: an integer maximum is exact, misses no NaN,
    # and runs at the speed of memory, which bf16 `abs().amax()` does not on a CPU.
    integer, mask = MAGNITUDE[tile.dtype]
    return (tile.view(integer) & mask).amax((2, 4)).view(tile.dtype).float()


def _matches(pattern: str, module: str) -> bool:
    return fnmatchcase(f".{module}.", f"*.{pattern}.*")


def _module_of(name: str) -> str | None:
    """Module of a weight, or a stacked expert parameter itself; None for biases and other parameters."""
    if name.endswith(".weight"):
        return name.removesuffix(".weight")
    parent, _, leaf = name.rpartition(".")
    return name if leaf in EXPERT_STACKS and parent.endswith("experts") else None


def _experts_of(module: str) -> str | None:
    """`model.layers.3.mlp.experts` for any projection of that layer's experts."""
    found = re.match(r"(.+\.experts)\.", module)
    return found[1] if found else None


def _refuse_split_units(quantized: dict[str, bool]) -> None:
    """ValueError where modules that SGLang stores as one are not all quantized or all left alone."""
    units: dict[str, list[str]] = {}
    for module in quantized:
        parent, _, leaf = module.rpartition(".")
        units.setdefault(_experts_of(module) or f"{parent}.{FUSED.get(leaf, leaf)}", []).append(module)
    for unit, modules in units.items():
        ignored = [module for module in modules if not quantized[module]]
        if 0 < len(ignored) < len(modules):
            raise ValueError(
                f"fp8.ignored_layers splits {unit}, which SGLang holds as one: {ignored[0]} is ignored, "
                f"{next(module for module in modules if quantized[module])} is not; ignore all of its parts or none"
            )
