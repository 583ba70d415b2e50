"""Log-probs of sampled tokens straight from hidden states, without a [R, V] tensor of fp32 logits.

For a 152k vocabulary the logits of one 32k-token micro-batch would take 20 GB. Rows are processed in chunks; the
backward recomputes each chunk instead of keeping it, and adds the head's gradient up in fp32.

Shape letters: R rows (positions whose next token was sampled), H hidden, V vocabulary, S kept candidates, C chunk rows.
"""

from typing import Any

import torch
from torch import Tensor


def token_logprobs(
    hidden_RH: Tensor,
    weight_VH: Tensor,
    bias_V: Tensor | None,
    targets_R: Tensor,
    *,
    temperature: float,
    support_RS: Tensor | None = None,
    chunk_rows: int,
) -> tuple[Tensor, Tensor]:
    """(log-prob f32[R] of `targets_R`, entropy f32[R] in nats) of softmax((hidden @ weight.T + bias) / temperature).

    With `support_RS` (i64, -1 pads) the distribution is renormalised over those candidates, as the sampler did after
    top-p / top-k / min-p. The log-prob carries a gradient to hidden, weight and bias; the entropy does not.
    """
    return _TokenLogprobs.apply(hidden_RH, weight_VH, bias_V, targets_R, support_RS, temperature, chunk_rows)


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float) -> Tensor:
    """f32[C, V], rounded to the compute dtype first, as the engine's own head does."""
    return torch.nn.functional.linear(hidden, weight, bias).float().div_(temperature)


def _probabilities(logits: Tensor, support: Tensor | None) -> tuple[Tensor, Tensor]:
    """(p, log-sum-exp [C, 1]); p is over the vocabulary, or over the support's columns (0 at pads)."""
    if support is not None:
        logits = logits.gather(1, support.clamp(min=0)).masked_fill(support < 0, -torch.inf)
    lse = logits.logsumexp(1, keepdim=True)
    return (logits - lse).exp_(), lse


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden, weight, bias, targets, support, temperature, chunk_rows):
        ctx.save_for_backward(hidden, weight, bias, targets, support)
        ctx.temperature, ctx.chunk_rows = temperature, chunk_rows
        logprobs = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        entropies = torch.empty_like(logprobs)
        for start in range(0, len(hidden), chunk_rows):
            rows = slice(start, start + chunk_rows)
            logits = _logits(hidden[rows], weight, bias, temperature)
            candidates = None if support is None else support[rows]
            p, lse = _probabilities(logits, candidates)
            logprobs[rows] = (logits.gather(1, targets[rows, None]) - lse)[:, 0]
            kept = logits if candidates is None else logits.gather(1, candidates.clamp(min=0))
            entropies[rows] = lse[:, 0] - (p * kept).sum(1)
        ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor):  # type: ignore[reportIncompatibleMethodOverride]
        hidden, weight, bias, targets, support = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        grad_bias = None if bias is None else torch.zeros_like(bias, dtype=torch.float32)
        for start in range(0, len(hidden), ctx.chunk_rows):
            rows = slice(start, start + ctx.chunk_rows)
            logits = _logits(hidden[rows], weight, bias, ctx.temperature)
            scale = (grad[rows] / ctx.temperature)[:, None]
            if support is None:
                d_logits = _probabilities(logits, None)[0].mul_(-scale)
            else:
                p, _lse = _probabilities(logits, support[rows])
                d_logits = torch.zeros_like(logits).scatter_add_(1, support[rows].clamp(min=0), -scale * p)
            d_logits.scatter_add_(1, targets[rows, None], scale)
            d_logits = d_logits.to(hidden.dtype)
            grad_hidden[rows] = d_logits @ weight
            if grad_weight is not None:
                grad_weight += d_logits.T @ hidden[rows]
            if grad_bias is not None:
                grad_bias += d_logits.sum(0, dtype=torch.float32)
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None or bias is None else grad_bias.to(bias.dtype),
            None, None, None, None,
        )  # fmt: skip
