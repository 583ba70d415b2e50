"""Rollout correction (ALGORITHMS §4): the engine that sampled is not quite the trainer's policy.

ℓ = log π_old − log π_roll, ρ = exp ℓ. Importance sampling changes weights, rejection changes the loss mask.

    mode       old policy of the loss     weights, rejection
    decoupled  π_old, one more forward    as configured
    bypass     π_roll, saves the forward  none
    off        π_old                      none; the other fields of the section are not used

    importance    weight                                   default bounds
    token_tis     min(ρ_t, high)                           high 2
    sequence_tis  min(exp Σℓ, high) for all its tokens     high 5 (published: 2 to 10)
    mis           ρ_t in [low, high], else the token leaves the loss, denominator included      0.5, 2
    icepop        ρ_t in [low, high], else weight 0: the token stays in the denominator         0.5, 5

    rejection     a sequence stays iff
    geometric     exp(mean ℓ) in [geometric_low, geometric_high]
    seq_mean_k3   mean (ρ − 1 − ℓ) <= seq_mean_k3_max
    seq_max_k2    max ℓ²/2 <= seq_max_k2_max
    (veto)        no ρ_t < veto

Sources: Yao et al. "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training" (TIS); FP8-RL, arXiv
2601.18150; verl's rollout correction docs (rejection, veto); slime (MIS leaves the denominator); Ring IcePop.

The caller's order: `check_finite` and `correct` per micro-batch; with `normalize`, sum `Correction.totals` over
micro-batches and ranks, then `normalized`; `loss.denominator` of `keep_T`; `loss.policy_loss` with `keep_T` and
`weight_T`.
Shape letters and `mask_T`, `sequence_T`: see packed.py.
"""

from collections.abc import Sequence
from typing import Annotated, Literal, NamedTuple

import msgspec
import torch
from torch import Tensor

from sync.fields import doc
from trainer.algo.packed import log_ratio, nonempty, ratio, sequence_mean, sequence_sum
from trainer.algo.parts import Parts, masked_mean

BOUND_DEFAULTS = {"token_tis": (0.0, 2.0), "sequence_tis": (0.0, 5.0), "mis": (0.5, 2.0), "icepop": (0.5, 5.0)}
Rejection = Literal["geometric", "seq_mean_k3", "seq_max_k2"]


class CorrectionConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    mode: Annotated[
        Literal["decoupled", "bypass", "off"],
        doc("decoupled: weights against the trainer's own old log-probs; bypass: the rollout is the old policy; off."),
    ] = "decoupled"
    importance: Annotated[
        Literal["none", "token_tis", "sequence_tis", "mis", "icepop"], doc("How ρ = π_old/π_roll becomes a weight.")
    ] = "token_tis"
    low: Annotated[float | None, doc("Lower bound of ρ (mis, icepop). Empty: 0.5.")] = None
    high: Annotated[float | None, doc("Upper bound of ρ. Empty: 2 (token_tis, mis), 5 (sequence_tis, icepop).")] = None
    normalize: Annotated[bool, doc("Divide the weights by their mean over the batch, after truncation.")] = False
    rejection: Annotated[tuple[Rejection, ...], doc("Rules that drop whole sequences; empty: none.")] = ()
    geometric_low: Annotated[
        float, doc("Least exp(mean ℓ) (geometric); 0.999 suits dense BF16 models.", gt=0, lt=1)
    ] = 0.99
    geometric_high: Annotated[float, doc("Largest exp(mean ℓ) (geometric); 1.001 suits dense BF16 models.", gt=1)] = (
        1.01
    )
    seq_mean_k3_max: Annotated[float, doc("Largest mean of ρ − 1 − ℓ (seq_mean_k3).", unit="nats", gt=0)] = 0.01
    seq_max_k2_max: Annotated[float, doc("Largest ℓ²/2 (seq_max_k2).", unit="nats", gt=0)] = 2.5
    veto: Annotated[float, doc("Drop a sequence with any ρ below this, e.g. 1e-4; 0: off.", ge=0, lt=1)] = 0.0

    def __post_init__(self) -> None:
        if self.mode == "bypass" and (self.importance != "none" or self.rejection or self.veto):
            raise ValueError(
                "mode: bypass has no weights and no rejection; set importance: none, rejection: [], veto: 0"
            )
        if self.low is not None and self.importance not in ("mis", "icepop"):
            raise ValueError(f"low is for importance mis and icepop, not {self.importance}")
        if self.importance == "none" and (self.high is not None or self.normalize):
            raise ValueError("high and normalize need an importance other than none")
        low, high = self.bounds
        if not 0 <= low < high < float("inf"):
            raise ValueError(f"low {low} must be at least 0 and below high {high}")

    @property
    def bounds(self) -> tuple[float, float]:
        """(low, high) of ρ, with the defaults of the importance rule filled in."""
        low, high = BOUND_DEFAULTS.get(self.importance, (0.0, 1.0))
        return low if self.low is None else self.low, high if self.high is None else self.high


class Correction(NamedTuple):
    """What the loss needs to know, and the metrics."""

    weight_T: Tensor  # f32[T]  w, constant, finite; 0 where not keep_T
    keep_T: Tensor  # bool[T] the loss mask after rejection
    totals: Tensor  # f64[2]  (sum of w, number of tokens) over keep_T, for `normalized`
    parts: Parts


def correct(
    old_logp_T: Tensor,
    roll_logp_T: Tensor,
    mask_T: Tensor,
    sequence_T: Tensor,
    n_sequences: int,
    config: CorrectionConfig,
) -> Correction:
    """Weights and loss mask of one micro-batch, from f32 log-probs of the trainer and of the rollout.

    In bypass mode there is no π_old: pass the rollout's log-probs twice. On masked tokens they must be finite: see
    `check_finite`.

    Metrics, before normalisation: `trainer/correction_truncated_frac` (tokens whose weight was capped),
    `_masked_frac` (tokens that mis or icepop took out), both of the sampled tokens; `_weight_mean`, `_ess` over kept
    tokens; `_rejected_seq_frac` of the sequences (rejection and veto).
    """
    with torch.no_grad():
        ell_T = log_ratio(old_logp_T.double(), roll_logp_T.double(), mask_T)
        rejected_N = _rejected(ell_T, mask_T, sequence_T, n_sequences, config)
        keep_T = mask_T & ~rejected_N[sequence_T]
        weight_T, truncated_T, masked_T = _weights(ell_T, sequence_T, n_sequences, config)
        if config.importance == "mis":
            keep_T = keep_T & ~masked_T
        weight_T = torch.where(keep_T, weight_T, 0.0)
        parts: Parts = {
            "trainer/correction_truncated_frac": masked_mean(truncated_T, mask_T),
            "trainer/correction_masked_frac": masked_mean(masked_T, mask_T),
            "trainer/correction_rejected_seq_frac": masked_mean(rejected_N, nonempty(mask_T, sequence_T, n_sequences)),
            "trainer/correction_weight_mean": masked_mean(weight_T, keep_T),
            "trainer/correction_weight_square": masked_mean(weight_T.square(), keep_T),
        }
        totals = torch.stack([weight_T.sum(), keep_T.sum().double()])
        return Correction(weight_T.float(), keep_T, totals, parts)


def normalized(correction: Correction, totals: Tensor) -> Correction:
    """Weights divided by their mean over the batch; `totals` is f64[2], summed over micro-batches and ranks.

    Without any weight in the batch there is nothing to divide by, and the weights stay as they are.
    """
    mean = totals[0] / totals[1].clamp(min=1)
    scale = torch.where(mean > 0, mean, 1.0)
    return correction._replace(weight_T=(correction.weight_T.double() / scale).float())


def check_finite(whose: str, logp_T: Tensor, mask_T: Tensor, sequence_T: Tensor, samples_N: Sequence[int]) -> None:
    """Raises ValueError naming the sample (and its token) of the first masked log-prob that is NaN or infinite.

    `samples_N`: what the sequences are called in the message. Waits for the device.
    """
    bad_T = mask_T & ~logp_T.isfinite()
    if bad_T.any():
        token = int(bad_T.nonzero()[0])
        sequence = int(sequence_T[token])
        token -= int((sequence_T == sequence).nonzero()[0])
        raise ValueError(
            f"sample {samples_N[sequence]} of the batch has a non-finite {whose} log-prob at its sampled token {token}"
        )


def _weights(
    ell_T: Tensor, sequence_T: Tensor, n_sequences: int, config: CorrectionConfig
) -> tuple[Tensor, Tensor, Tensor]:
    """w f64[T]; bool[T] where it was capped; bool[T] where the rule takes the token out."""
    never_T = torch.zeros_like(ell_T, dtype=torch.bool)
    if config.mode != "decoupled" or config.importance == "none":
        return torch.ones_like(ell_T), never_T, never_T
    low, high = config.bounds
    if config.importance == "sequence_tis":
        ell_T = sequence_sum(ell_T, sequence_T, n_sequences)[sequence_T]
    rho_T = ratio(ell_T)
    if config.importance in ("token_tis", "sequence_tis"):
        return rho_T.clamp(max=high), rho_T > high, never_T
    outside_T = (rho_T < low) | (rho_T > high)
    return torch.where(outside_T, 0.0, rho_T), never_T, outside_T


def _rejected(ell_T: Tensor, mask_T: Tensor, sequence_T: Tensor, n_sequences: int, config: CorrectionConfig) -> Tensor:
    """bool[N]: sequences that any rule drops."""
    rejected_N = torch.zeros(n_sequences, dtype=torch.bool, device=ell_T.device)
    if config.mode != "decoupled":
        return rejected_N
    rho_T = ratio(ell_T)
    if "geometric" in config.rejection:
        mean_N = ratio(sequence_mean(ell_T, mask_T, sequence_T, n_sequences))
        rejected_N = rejected_N | (mean_N < config.geometric_low) | (mean_N > config.geometric_high)
    if "seq_mean_k3" in config.rejection:
        k3_N = sequence_mean(rho_T - 1 - ell_T, mask_T, sequence_T, n_sequences)
        rejected_N = rejected_N | (k3_N > config.seq_mean_k3_max)
    # A maximum over a limit, or a minimum under one, is a count above zero. Outside the mask ρ is 1: never a reason.
    bad_T = torch.zeros_like(mask_T)
    if "seq_max_k2" in config.rejection:
        bad_T = bad_T | (ell_T.square() / 2 > config.seq_max_k2_max)
    if config.veto:
        bad_T = bad_T | (rho_T < config.veto)
    return rejected_N | nonempty(bad_T & mask_T, sequence_T, n_sequences)
