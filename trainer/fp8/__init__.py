"""FP8 training: which backend multiplies, and why one cannot run here.

A linear layer y = x W^T takes three products (M tokens, N outputs, K inputs), all with FP8 operands, fp32 sums and
results that are rounded once, to the compute dtype:

    forward   y  = x W^T      x  in groups of 1 x 128 along K     W in blocks of 128 x 128
    dgrad     dx = dy W       dy in groups of 1 x 128 along N     the same codes of W
    wgrad     dW = dy^T x     both in groups of 128 x 1, along the tokens, as DeepSeek-V3 and DeepGEMM have it

Activations are quantized anew for wgrad from the saved input, not from its FP8 codes: one rounding instead of two, and
one saved tensor for all layers that share an input. Token groups begin at the first token of a micro-batch (of every
expert), so dW depends on how tokens are packed, within the error of FP8; the forward does not.
What FP8 is applied to is Fp8Config's: the same rule tells the engine. Everything else stays in the compute dtype.
"""

from typing import Protocol

from torch import Tensor

from sync.fp8_tensor import Fp8Weight
from sync.quantize import Fp8Config
from trainer.fp8 import deepgemm, te
from trainer.fp8.reference import Reference


class Backend(Protocol):
    """The three products. Without `ends` weights are [N, K]; with it, i32[E], weights are [E, N, K] and the rows
    ends[e - 1] … ends[e] belong to expert e. Results are fp32 or the dtype of the first argument."""

    def activations(self, x_MK: Tensor) -> Tensor:
        """f32 [M, K], what the forward product sees of x."""
        ...

    def forward(self, x_MK: Tensor, weight: Fp8Weight, ends: Tensor | None = None) -> Tensor: ...

    def dgrad(self, dy_MN: Tensor, weight: Fp8Weight, ends: Tensor | None = None) -> Tensor: ...

    def wgrad(self, dy_MN: Tensor, x_MK: Tensor, ends: Tensor | None = None) -> Tensor: ...


def backend_name(train: str, device: str) -> str:
    """What `fp8.train` means on `device`, "cuda" or "cpu": "off" or the backend that runs.

    Raises ValueError, with the reason, for a backend that cannot run here.
    """
    reasons = {"deepgemm": deepgemm.missing, "te": te.missing}
    if train == "auto":
        return "reference" if deepgemm.missing(device) else "deepgemm"
    if train in reasons and (reason := reasons[train](device)):
        raise ValueError(f"fp8.train = {train} cannot run here: {reason}")
    return train


def make_backend(fp8: Fp8Config, device: str) -> Backend | None:
    """The backend of `fp8.train`, None for "off". Raises ValueError as `backend_name` does."""
    name = backend_name(fp8.train, device)
    if name == "off":
        return None
    return deepgemm.DeepGemm(fp8) if name == "deepgemm" else Reference(fp8)
