"""The reference backend's three products against float64, and why other backends cannot run here.

The oracle quantizes in numpy from the definition of the formats and multiplies in float64; it shares no code with
sync/quantize.py or trainer/fp8.
"""

import math
import types

import msgspec
import numpy as np
import pytest
import torch
import torch.nn.functional as F

from engine import cpu_ops
from sync.fp8_tensor import Fp8Weight
from sync.quantize import Fp8Config, quantize
from trainer.fp8 import backend_name, make_backend
from trainer.fp8.linear import Arithmetic, experts_forward
from trainer.fp8.reference import Reference, aligned_rows

FP8 = Fp8Config(train="reference")
FORMATS = {"e4m3": (3, 7, 448.0), "e5m2": (2, 15, 57344.0)}  # mantissa bits, bias, largest number
CPU = "cpu"


pytestmark = pytest.mark.usefixtures("one_thread")


def values(kind: str) -> np.ndarray:
    """All non-negative numbers of a format, rising; their index is the code."""
    bits, bias, largest = FORMATS[kind]
    codes = np.arange(128)
    exponent, mantissa = codes >> bits, (codes & (2**bits - 1)) / 2**bits
    numbers = np.where(exponent == 0, mantissa * 2.0 ** (1 - bias), (1 + mantissa) * 2.0 ** (exponent - float(bias)))
    return numbers[numbers <= largest]


def rounded(x: torch.Tensor, width: int, kind: str = "e4m3", pow2: bool = False) -> np.ndarray:
    """f64 [M, K]: x rounded to FP8 with one scale per `width` columns of a row, as numbers."""
    a, table, out = x.float().numpy(), values(kind), np.zeros(x.shape)
    middles = (table[1:] + table[:-1]) / 2
    for row in range(a.shape[0]):
        for left in range(0, a.shape[1], width):
            part = a[row, left : left + width]
            scale = np.float32(max(np.float32(1e-10), np.abs(part).max())) / np.float32(table[-1])
            if pow2:
                scale = np.float32(2.0 ** math.ceil(math.log2(float(scale))))
            quotient = np.abs(part / scale).astype(np.float64)
            low, high = np.searchsorted(middles, quotient, "left"), np.searchsorted(middles, quotient, "right")
            code = np.where(low % 2 == 0, low, high)
            out[row, left : left + width] = np.sign(part) * table[code] * float(scale)
    return out


def matrix(*shape: int, seed: int = 0, spread: float = 0.5) -> torch.Tensor:
    """Gaussian numbers whose rows and columns differ in size, so that a scale in the wrong place is seen."""
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=random)
    sizes = [torch.randn(n, generator=random).mul(spread).exp() for n in shape[-2:]]
    return x * sizes[0][:, None] * sizes[1]


def fp8_weight(w: torch.Tensor, scales="fp32") -> tuple[Fp8Weight, np.ndarray]:
    """A weight, and its f64 values."""
    codes, scale = quantize(w, "block", scales)
    weight = Fp8Weight(codes, scale, torch.float32)
    table = np.concatenate([values("e4m3"), [np.nan], -values("e4m3"), [np.nan]])
    wide = scale.repeat_interleave(128, -2)[..., : w.shape[-2], :].repeat_interleave(128, -1)[..., : w.shape[-1]]
    return weight, table[codes.view(torch.uint8).numpy()] * wide.double().numpy()


def close(got: torch.Tensor, expected: np.ndarray, limit: float = 1e-6) -> bool:
    return np.linalg.norm(got.double().numpy() - expected) <= limit * np.linalg.norm(expected)


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("scales", ["fp32", "pow2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_operands_are_rounded_as_the_formats_say(kind, scales, dtype):
    backend = Reference(Fp8Config(train="reference", gradients=kind, scales=scales))
    x = matrix(7, 300, spread=2).to(dtype)
    x[3, 128:256] = 0
    for got, expected in (
        (backend.activations(x), rounded(x, 128, pow2=scales == "pow2")),
        (backend.gradients(x), rounded(x, 128, kind, scales == "pow2")),
    ):
        assert got.dtype == torch.float32 and (got.numpy() == expected.astype(np.float32)).all()


SHAPES = [(200, 256, 384), (5, 130, 70), (1, 128, 128)]  # M, N, K


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("scales", ["fp32", "pow2"])
def test_the_products_are_float64s_of_the_rounded_operands(shape, scales):
    m, n, k = shape
    pow2 = scales == "pow2"
    backend = Reference(Fp8Config(train="reference", gradients="e5m2", scales=scales))
    x, dy = matrix(m, k, seed=1), matrix(m, n, seed=2)
    weight, w = fp8_weight(matrix(n, k, seed=3), scales)
    assert close(backend.forward(x, weight), rounded(x, 128, pow2=pow2) @ w.T)
    assert close(backend.dgrad(dy, weight), rounded(dy, 128, "e5m2", pow2) @ w)
    by_tokens = rounded(dy.T, 128, "e5m2", pow2) @ rounded(x.T, 128, pow2=pow2).T
    assert close(backend.wgrad(dy, x), by_tokens)


def test_so_they_are_for_a_stack_of_experts():
    """Every expert as a matrix of its own; some have no token, and none shares a group of tokens with another."""
    backend = Reference(Fp8Config(train="reference"))
    counts = [0, 130, 1, 0, 300, 128, 0]
    ends = torch.tensor(np.cumsum(counts), dtype=torch.int32)
    x, dy = matrix(sum(counts), 256, seed=1, spread=1), matrix(sum(counts), 128, seed=2, spread=1)
    weight, w = fp8_weight(matrix(len(counts), 128, 256, seed=3))
    forward, dgrad = backend.forward(x, weight, ends), backend.dgrad(dy, weight, ends)
    wgrad = backend.wgrad(dy, x, ends)
    assert wgrad.shape == w.shape
    for expert, count in enumerate(counts):
        rows = slice(int(ends[expert]) - count, int(ends[expert]))
        assert close(forward[rows], rounded(x[rows], 128) @ w[expert].T)
        assert close(dgrad[rows], rounded(dy[rows], 128) @ w[expert])
        expected = rounded(dy[rows].T, 128) @ rounded(x[rows].T, 128).T if count else np.zeros((128, 256))
        assert close(wgrad[expert], expected) or (not count and not wgrad[expert].any())
    assert (aligned_rows(ends, len(x))[1] % 128 == 0).all()


def leaf(w: torch.Tensor) -> tuple[Fp8Weight, np.ndarray]:
    weight, numbers = fp8_weight(w)
    return weight.requires_grad_(), numbers


@pytest.mark.parametrize("gradients", FORMATS)
def test_autograd_takes_the_three_products(gradients):
    backend = Reference(Fp8Config(train="reference", gradients=gradients))
    x, dy = matrix(40, 256, seed=1).requires_grad_(), matrix(40, 128, seed=2)
    bias = torch.randn(128).requires_grad_()
    weight, w = leaf(matrix(128, 256, seed=3))
    y = Arithmetic(backend, FP8).product(x, weight, bias, None)
    y.backward(dy)
    assert close(y.detach(), rounded(x.detach(), 128) @ w.T + bias.detach().double().numpy())
    assert close(x.grad, rounded(dy, 128, gradients) @ w)
    assert close(weight.grad, rounded(dy.T, 128, gradients) @ rounded(x.detach().T, 128).T)
    assert weight.grad.dtype == torch.float32 and close(bias.grad, dy.double().numpy().sum(0))


def experts(seed: int = 0):
    """A module as transformers' expert classes are, 4 experts, and the f64 values of its two stacks."""
    module = types.SimpleNamespace(num_experts=4, act_fn=F.silu)
    module._apply_gate = lambda x: F.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1]
    module.gate_up_proj, up = leaf(matrix(4, 512, 128, seed=seed) / 8)
    module.down_proj, down = leaf(matrix(4, 128, 256, seed=seed + 1) / 8)
    module.arithmetic = Arithmetic(Reference(FP8), FP8)
    return module, torch.from_numpy(up).float(), torch.from_numpy(down).float()


def test_experts_compute_what_the_engine_computes():
    """engine/cpu_ops.py, written apart; both sums are fp32."""
    module, up, down = experts()
    x, weights = matrix(50, 128, seed=4), torch.rand(50, 2)
    chosen = torch.randint(0, 3, (50, 2), generator=torch.Generator().manual_seed(0))  # expert 3 has no token
    with torch.no_grad():
        got = experts_forward(module, x, chosen, weights)
    expected = cpu_ops.experts(x, up, down, weights, chosen, group=128)
    # fp32 sums of another order move a few inputs of the second product to the next code
    assert (got - expected).norm() < 1e-3 * expected.norm()


def test_gradients_of_experts_are_those_of_every_expert_alone():
    """Straight-through: the gradient of the rounding is taken as 1, so autograd of the same products in f64."""
    module, up, down = experts()
    x, weights = matrix(60, 128, seed=4).requires_grad_(), torch.rand(60, 2).requires_grad_()
    chosen = torch.randint(0, 4, (60, 2), generator=torch.Generator().manual_seed(0))
    out = experts_forward(module, x, chosen, weights)
    out.square().sum().backward()
    exact = [t.detach().double().requires_grad_() for t in (x, weights, up, down)]
    result = torch.zeros(60, 128, dtype=torch.float64)
    for expert in range(4):
        token, place = (chosen == expert).nonzero(as_tuple=True)
        hidden = module._apply_gate(exact[0][token] @ exact[2][expert].T) @ exact[3][expert].T
        result = result.index_add(0, token, hidden * exact[1][token, place, None])
    result.square().sum().backward()
    for got, expected in zip((x.grad, weights.grad, module.gate_up_proj.grad, module.down_proj.grad), exact):
        error = (got - expected.grad).norm() / expected.grad.norm()
        assert 0.01 < error < 0.15, "as far from exact as a few FP8 products are"


def test_a_product_is_3_7_percent_off_and_two_scale_formats_are_further_apart():
    x, w = torch.randn(256, 1024), torch.randn(256, 1024)
    exact = x.double() @ w.double().T
    outputs = {}
    for scales in ("fp32", "pow2"):
        backend = Reference(Fp8Config(train="reference", scales=scales))
        outputs[scales] = backend.forward(x, fp8_weight(w, scales)[0]).double()
        error = (outputs[scales] - exact).norm() / exact.norm()
        assert 0.035 < error < 0.039
    apart = (outputs["fp32"] - outputs["pow2"]).norm() / exact.norm()
    assert 0.049 < apart < 0.056


def test_mixed_operands_of_high_precision():
    arithmetic = Arithmetic(Reference(FP8), FP8)
    x, master = matrix(9, 256, seed=1), matrix(128, 256, seed=3)
    weight, w = fp8_weight(master)
    weight.stored = types.SimpleNamespace(master=lambda dtype: master.to(dtype))
    exact = {True: x.double().numpy(), False: rounded(x, 128)}, {True: master.double().numpy(), False: w}
    for weights in (True, False):
        for activations in (True, False):
            with torch.no_grad(), arithmetic.high_precision(weights, activations):
                got = arithmetic.product(x, weight, None, None)
            assert close(got, exact[0][activations] @ exact[1][weights].T)
    with pytest.raises(AssertionError, match="no_grad"), arithmetic.high_precision(True, True):
        arithmetic.product(x, weight, None, None)
    assert arithmetic.fp8_weights and arithmetic.fp8_activations


@pytest.mark.parametrize(("own", "other"), [("fp32", "pow2"), ("pow2", "fp32")])
def test_other_scales_are_those_of_a_backend_of_the_other_format(own, other):
    fp8 = Fp8Config(train="reference", scales=own)
    arithmetic = Arithmetic(Reference(fp8), fp8)
    x, master = matrix(9, 256, seed=1), matrix(256, 256, seed=3)
    weight, _ = fp8_weight(master, own)
    weight.stored = types.SimpleNamespace(master=lambda dtype: master.to(dtype))
    foreign, _ = fp8_weight(master, other)
    expected = Reference(msgspec.structs.replace(fp8, scales=other)).forward(x, foreign)
    with torch.no_grad():
        with arithmetic.other_scales():
            assert torch.equal(arithmetic.product(x, weight, None, None), expected)
        assert not torch.equal(arithmetic.product(x, weight, None, None), expected)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("scales", ["fp32", "pow2"])
@pytest.mark.parametrize("gradients", FORMATS)
def test_a_nan_is_passed_on(bad, scales, gradients):
    backend = Reference(Fp8Config(train="reference", scales=scales, gradients=gradients))
    weight, _ = fp8_weight(matrix(128, 128))
    x = matrix(3, 128)
    x[1, 5] = bad
    for y in (backend.forward(x, weight), backend.dgrad(x, weight)):
        assert y[1].isnan().all() and y[[0, 2]].isfinite().all()
    assert backend.wgrad(x, matrix(3, 128)).isnan().any()


def test_nothing_takes_an_fp8_weight_for_a_matrix():
    weight, _ = fp8_weight(matrix(128, 128))
    with pytest.raises(NotImplementedError, match="ignored_layers"):
        torch.randn(2, 128) @ weight
    assert type(weight.detach()) is Fp8Weight


def test_backends_say_why_they_cannot_run():
    assert backend_name("off", CPU) == "off" and make_backend(Fp8Config(), CPU) is None
    assert backend_name("auto", CPU) == backend_name("reference", CPU) == "reference"
    with pytest.raises(ValueError, match=r"fp8\.train = te cannot run here: Transformer Engine needs a CUDA device"):
        backend_name("te", CPU)
    with pytest.raises(ValueError, match=r"fp8\.train = deepgemm cannot run here: DeepGEMM needs a CUDA device"):
        make_backend(Fp8Config(train="deepgemm"), CPU)


@pytest.mark.parametrize("fields", [{"enabled": False}, {"granularity": "rowwise"}])
def test_training_needs_block_fp8(fields):
    with pytest.raises(ValueError, match="train = auto needs enabled = true and granularity = block"):
        Fp8Config(train="auto", **fields)
