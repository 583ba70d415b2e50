"""The policy loss (ALGORITHMS §3): one clipped surrogate, three objectives, three ways to average.

    ppo    L_t = −w_t · m_t, m_t = min(r_t A, clip(r_t) A), and max(m_t, c·A) if A < 0  (arXiv 1707.06347, 1912.09729)
    gspo   the same with r_t := s = exp(mean_t log r_t) of its sequence                 (arXiv 2507.18071)
    cispo  L_t = −w_t · sg(clip(r_t)) · A · log π_θ                                     (arXiv 2506.13585)

GRPO is ppo with 0.2/0.2, DAPO is ppo with 0.2/0.28 and token_mean, Dr.GRPO is ppo with aggregation: constant.

Micro-batches and ranks. Every function sees one micro-batch and divides by a denominator of the WHOLE mini-batch: sum
`denominator` over the micro-batches of all ranks first. The gradients of the micro-batches of all ranks then SUM to
that of one big batch (a data-parallel wrapper that averages over ranks needs the loss times the number of ranks).

Shape letters and `mask_T`, `sequence_T`: see packed.py.
"""

from typing import Annotated, Literal

import msgspec
import torch
from torch import Tensor

from sync.fields import doc
from trainer.algo.packed import log_ratio, nonempty, ratio, sequence_mean
from trainer.algo.parts import Mean, Parts, masked_max, masked_mean

# ε_lo, ε_hi. cispo: MiniMax-M1 has no lower bound, ScaleRL (arXiv 2510.13786) caps r at 5; both known second-hand.
CLIP_DEFAULTS = {"ppo": (0.2, 0.2), "gspo": (3e-4, 4e-4), "cispo": (1.0, 4.0)}


class LossConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    objective: Annotated[Literal["ppo", "gspo", "cispo"], doc("What is clipped: token, sequence, or weight.")] = "ppo"
    clip_low: Annotated[
        float | None, doc("ε_lo: ratios are clipped at 1 − ε_lo. Empty: 0.2 (ppo), 3e-4 (gspo), 1 = no bound (cispo).")
    ] = None
    clip_high: Annotated[
        float | None, doc("ε_hi: ratios are clipped at 1 + ε_hi. Empty: 0.2 (ppo), 4e-4 (gspo), 4 (cispo).")
    ] = None
    dual_clip: Annotated[float, doc("c: for A < 0 the loss is at most c·|A| (ppo, gspo); 0: off.", ge=0)] = 10.0
    aggregation: Annotated[
        Literal["token_mean", "sequence_mean", "constant"],
        doc("Divide by all tokens; by each sequence's tokens, then sequences; or by constant_length x sequences."),
    ] = "token_mean"
    constant_length: Annotated[int, doc("Tokens per sequence of aggregation: constant.", unit="tokens", ge=0)] = 0

    def __post_init__(self) -> None:
        if self.clip_low is not None and not 0 <= self.clip_low <= 1:
            raise ValueError(f"clip_low {self.clip_low} must be in [0, 1]")
        if self.clip_high is not None and not 0 <= self.clip_high < float("inf"):
            raise ValueError(f"clip_high {self.clip_high} must be at least 0 and finite")
        if 0 < self.dual_clip <= 1:
            raise ValueError(f"dual_clip {self.dual_clip} must be 0 (off) or above 1")
        if (self.aggregation == "constant") != (self.constant_length > 0):
            raise ValueError("constant_length must be above 0 with aggregation: constant, and 0 without")

    @property
    def bounds(self) -> tuple[float, float]:
        """(1 − ε_lo, 1 + ε_hi), with the objective's defaults filled in."""
        low, high = CLIP_DEFAULTS[self.objective]
        return 1 - (low if self.clip_low is None else self.clip_low), 1 + (
            high if self.clip_high is None else self.clip_high
        )


def denominator(mask_T: Tensor, sequence_T: Tensor, n_sequences: int, config: LossConfig) -> Tensor:
    """What this micro-batch adds to the mini-batch's denominator, f64 scalar: tokens, sequences, or length x sequences.

    A sequence without a masked token (rejected, or padding) does not count. To be summed over micro-batches and ranks.
    """
    if config.aggregation == "token_mean":
        return mask_T.sum().double()
    sequences = nonempty(mask_T, sequence_T, n_sequences).sum().double()
    return sequences * config.constant_length if config.aggregation == "constant" else sequences


def aggregate(x_T: Tensor, mask_T: Tensor, sequence_T: Tensor, n_sequences: int, config: LossConfig) -> Tensor:
    """The numerator to that denominator: sum over tokens, or over the sequences' means; scalar of x's dtype.

    Stays attached to the graph with an empty mask and with no tokens; its gradient is zero then.
    """
    if config.aggregation == "sequence_mean":
        return sequence_mean(x_T, mask_T, sequence_T, n_sequences).sum()
    return torch.where(mask_T, x_T, 0.0).sum()


def policy_loss(
    logp_T: Tensor,
    old_logp_T: Tensor,
    advantages_N: Tensor,
    mask_T: Tensor,
    weight_T: Tensor,
    sequence_T: Tensor,
    total: Tensor,
    config: LossConfig,
) -> tuple[Tensor, Parts]:
    """This micro-batch's share of the policy loss, and its metrics.

    `logp_T` f32, log π_θ with its graph; `old_logp_T` f32, log π_old (log π_roll in bypass mode); `advantages_N` f32;
    `mask_T` bool, after rejection; `weight_T` f32, w (constant); `total`: the denominator of the mini-batch over all
    ranks. Returns the scalar loss (in logp's dtype) whose gradients sum to the big batch's.
    """
    n_sequences = len(advantages_N)
    advantage_T, weight_T = advantages_N[sequence_T].detach(), weight_T.detach()
    log_r_T = log_ratio(logp_T, old_logp_T.detach(), mask_T)
    if config.objective == "gspo":
        log_r_T = sequence_mean(log_r_T, mask_T, sequence_T, n_sequences)[sequence_T]
    r_T = ratio(log_r_T)
    low, high = config.bounds

    if config.objective == "cispo":
        gain_T = r_T.clamp(low, high).detach() * advantage_T * torch.where(mask_T, logp_T, 0.0)
    else:
        gain_T = torch.minimum(r_T * advantage_T, r_T.clamp(low, high) * advantage_T)
        if config.dual_clip:
            gain_T = torch.where(advantage_T < 0, torch.maximum(gain_T, config.dual_clip * advantage_T), gain_T)
    # `where`, not a product: a weight outside the mask may be anything.
    loss_T = -torch.where(mask_T, weight_T, 0.0).to(gain_T.dtype) * gain_T
    numerator = aggregate(loss_T, mask_T, sequence_T, n_sequences, config)

    parts = _clip_parts(r_T, advantage_T, mask_T, config)
    local = denominator(mask_T, sequence_T, n_sequences, config)
    parts["trainer/loss"] = Mean(numerator.detach().double(), local)
    return numerator / total.clamp(min=1).to(numerator.dtype), parts


def _clip_parts(r_T: Tensor, advantage_T: Tensor, mask_T: Tensor, config: LossConfig) -> Parts:
    """Ratios, and the fractions of tokens whose ratio was clipped, split by the sign of A.

    Clipped means that the clip acts: above 1 + ε_hi for A > 0, below 1 − ε_lo for A < 0; cispo clips both ends whatever
    the sign. `clip_frac` is over all tokens, `_pos` over those with A > 0, `_neg` and `dual_clip_frac` over A < 0.
    """
    low, high = config.bounds
    positive_T, negative_T = mask_T & (advantage_T > 0), mask_T & (advantage_T < 0)
    if config.objective == "cispo":
        clipped_T = (r_T < low) | (r_T > high)
        dual_T = torch.zeros_like(clipped_T)
    else:
        clipped_T = ((advantage_T > 0) & (r_T > high)) | ((advantage_T < 0) & (r_T < low))
        dual_T = (r_T > config.dual_clip) if config.dual_clip else torch.zeros_like(clipped_T)
    return {
        "trainer/clip_frac": masked_mean(clipped_T, mask_T),
        "trainer/clip_frac_pos": masked_mean(clipped_T, positive_T),
        "trainer/clip_frac_neg": masked_mean(clipped_T, negative_T),
        "trainer/dual_clip_frac": masked_mean(dual_T, negative_T),
        "trainer/ratio_mean": masked_mean(r_T, mask_T),
        "trainer/ratio_max": masked_max(r_T, mask_T),
    }
