"""FP8 products in the model: an autograd function, the linear layer and the experts that call it, and the swap.

Shape letters: M tokens, N outputs, K inputs, S (token, expert) pairs sorted by expert, E experts, H hidden.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import msgspec
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from sync.fp8_tensor import Fp8Weight
from sync.quantize import BLOCK, Fp8Config
from sync.shards import Piece
from trainer.fp8 import Backend
from trainer.fp8.reference import Reference

EXPERTS = "fp8_products"


class Arithmetic:
    """How all FP8 layers of one model multiply at the moment."""

    def __init__(self, backend: Backend, fp8: Fp8Config) -> None:
        self.backend, self.fp8 = backend, fp8
        self.fp8_weights = self.fp8_activations = True
        self.foreign: Reference | None = None  # with the other scale format, where that is to be seen

    @contextmanager
    def high_precision(self, weights: bool, activations: bool) -> Iterator[None]:
        """Forwards inside take the masters, or activations as they are, without FP8. No gradients."""
        before = self.fp8_weights, self.fp8_activations
        self.fp8_weights, self.fp8_activations = not weights and before[0], not activations and before[1]
        try:
            yield
        finally:
            self.fp8_weights, self.fp8_activations = before

    @contextmanager
    def other_scales(self) -> Iterator[None]:
        """Forwards inside quantize weights and activations with the scale format that the config does not name: what
        an engine of the other format makes of the same masters. No gradients."""
        other = "pow2" if self.fp8.scales == "fp32" else "fp32"
        self.foreign = Reference(msgspec.structs.replace(self.fp8, scales=other))
        try:
            yield
        finally:
            self.foreign = None

    def product(self, x_MK: Tensor, weight: Fp8Weight, bias_N: Tensor | None, ends: Tensor | None) -> Tensor:
        """x W^T + b in x's dtype, [M, N]; with `ends` i32[E] a 3-D weight, one matrix per run of rows."""
        if self.fp8_weights and self.fp8_activations and self.foreign is None:
            return _Product.apply(x_MK, weight, bias_N, ends, self.backend)  # type: ignore[reportReturnType]
        assert not torch.is_grad_enabled(), "high_precision is for forwards: use torch.no_grad()"
        assert weight.stored is not None
        x = (self.foreign or self.backend).activations(x_MK) if self.fp8_activations else x_MK
        if not self.fp8_weights:
            w = weight.stored.master(x_MK.dtype)
        elif self.foreign is None:
            w = weight.dequantized()
        else:
            w = self.foreign.weights(weight.stored.master(torch.float32))
        if x.dtype != w.dtype:
            x, w = x.float(), w.float()
        y = F.linear(x, w) if ends is None else F.grouped_mm(x, w.mT, offs=ends)
        return (y if bias_N is None else y + bias_N).to(x_MK.dtype)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x, weight, bias, ends, backend):
        ctx.save_for_backward(x, weight, ends)
        ctx.backend = backend
        ctx.bias_dtype = None if bias is None else bias.dtype
        y = backend.forward(x, weight, ends)
        return (y if bias is None else y + bias.float()).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor):  # type: ignore[reportIncompatibleMethodOverride]
        x, weight, ends = ctx.saved_tensors
        dx = dw = db = None
        if ctx.needs_input_grad[0]:
            dx = ctx.backend.dgrad(dy, weight, ends).to(x.dtype)
        if ctx.needs_input_grad[1]:
            # FSDP reduces gradients of one dtype, the compute dtype; it adds micro-batches and ranks up in fp32.
            dw = ctx.backend.wgrad(dy, x, ends).to(weight.dtype)
        if ctx.needs_input_grad[2]:
            db = dy.sum(0, dtype=torch.float32).to(ctx.bias_dtype)
        return dx, dw, db, None, None


class Fp8Linear(nn.Linear):
    """A linear layer whose weight FSDP gathers as an Fp8Weight."""

    def __init__(self, plain: nn.Linear, arithmetic: Arithmetic) -> None:
        super().__init__(plain.in_features, plain.out_features, device="meta")
        self.weight, self.bias = plain.weight, plain.bias
        self.arithmetic = arithmetic

    def forward(self, input: Tensor) -> Tensor:
        weight = self.weight
        assert isinstance(weight, Fp8Weight), "FSDP has not gathered the codes"
        y = self.arithmetic.product(input.reshape(-1, self.in_features), weight, self.bias, None)
        return y.view(*input.shape[:-1], self.out_features)


def experts_forward(module: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """transformers' experts: hidden [M, H], `chosen` i64[M, k] experts per token, their `weights` [M, k]; [M, H].

    Modules without FP8 weights go transformers' own way.
    """
    arithmetic = getattr(module, "arithmetic", None)
    if arithmetic is None:
        return ALL_EXPERTS_FUNCTIONS["grouped_mm"](module, hidden, chosen, weights)
    per_token = chosen.shape[1]
    flat = chosen.reshape(-1)
    order = flat.argsort(stable=True)
    ends = torch.bincount(flat, minlength=module.num_experts).cumsum(0, dtype=torch.int32)
    x_SH = hidden[order // per_token]
    middle = module._apply_gate(arithmetic.product(x_SH, module.gate_up_proj, None, ends))
    y_SH = arithmetic.product(middle, module.down_proj, None, ends)
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=order.device)
    y, w = y_SH[back].view(*chosen.shape, -1), weights[..., None]
    if arithmetic.fp8_weights or arithmetic.fp8_activations:
        y, w = y.float(), w.float()  # as the engine adds experts up; without FP8, as transformers does
    return (y * w).sum(1).to(hidden.dtype)


def swap(
    hf: PreTrainedModel, parameters: Mapping[str, tuple[Piece, ...]], backend: Backend, fp8: Fp8Config
) -> Arithmetic:
    """Makes the modules of `parameters` (names in the model, and the checkpoint tensors in each) multiply in FP8.

    Before sharding. Raises ValueError naming a module that cannot.
    """
    arithmetic, experts = Arithmetic(backend, fp8), False
    for name, pieces in parameters.items():
        path, _, leaf = name.rpartition(".")
        module = cast(Any, hf.get_submodule(path))
        if leaf == "weight" and module.__class__ is nn.Linear:
            hf.set_submodule(path, Fp8Linear(module, arithmetic))
            continue
        plain_experts = getattr(module, "has_gate", False) and not (module.has_bias or module.is_transposed)
        if not plain_experts or leaf not in ("gate_up_proj", "down_proj"):
            raise ValueError(f"fp8.train: {name} of a {type(module).__name__} cannot be trained in FP8; add {path} to "
                             "fp8.ignored_layers")  # fmt: skip
        if odd := next((piece for piece in pieces if piece.shape[0] % BLOCK[0]), None):
            raise ValueError(f"fp8.train: {odd.name} {list(odd.shape)} shares a stack with others, so its rows must be "
                             f"a multiple of {BLOCK[0]}; add {path} to fp8.ignored_layers")  # fmt: skip
        module.arithmetic, experts = arithmetic, True
    if experts:
        ALL_EXPERTS_FUNCTIONS.register(EXPERTS, experts_forward)
        hf.set_experts_implementation(EXPERTS)
    return arithmetic
