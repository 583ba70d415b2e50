"""Sums per sequence and log-ratios over packed tokens: the two things every algorithm here does.

Shape letters of this room: T tokens of all sequences of a micro-batch one after the other, N sequences.
`sequence_T` i64[T] is the index, in [0, N), of the sequence a token belongs to; a sequence lies whole in one
micro-batch. `mask_T` bool[T] is True for the tokens that count; whatever stands elsewhere, NaN included, is never
looked at.
"""

import torch
from torch import Tensor

LOG_RATIO_LIMIT = 20.0  # exp(20) = 4.9e8: far outside every bound, and safe to square and to sum


def log_ratio(log_p_T: Tensor, log_q_T: Tensor, mask_T: Tensor) -> Tensor:
    """log p − log q where `mask_T`, else 0. Neither values nor gradients of the other tokens get through."""
    return torch.where(mask_T, log_p_T, 0.0) - torch.where(mask_T, log_q_T, 0.0)


def ratio(log_ratio: Tensor) -> Tensor:
    """exp of a log-ratio clamped to ±LOG_RATIO_LIMIT; the gradient is zero beyond the clamp."""
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def sequence_sum(x_T: Tensor, sequence_T: Tensor, n_sequences: int) -> Tensor:
    """Sum of `x_T` (any float dtype, kept) over each sequence, [N]; 0 for a sequence without tokens."""
    return x_T.new_zeros(n_sequences).index_add(0, sequence_T, x_T)


def sequence_mean(x_T: Tensor, mask_T: Tensor, sequence_T: Tensor, n_sequences: int) -> Tensor:
    """Mean of `x_T` over the masked tokens of each sequence, [N]; 0 for a sequence without any."""
    count_N = sequence_sum(mask_T.to(x_T.dtype), sequence_T, n_sequences)
    return sequence_sum(torch.where(mask_T, x_T, 0.0), sequence_T, n_sequences) / count_N.clamp(min=1)


def nonempty(mask_T: Tensor, sequence_T: Tensor, n_sequences: int) -> Tensor:
    """bool[N]: sequences with at least one masked token."""
    return sequence_sum(mask_T.double(), sequence_T, n_sequences) > 0
