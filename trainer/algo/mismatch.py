"""How far the trainer's policy is from the one that sampled (ALGORITHMS §5): measured before any correction.

ℓ = log π_old − log π_roll of a sampled token, ρ = exp ℓ. Under π_roll, E[ρ] = 1 and E[−ℓ] = KL(π_roll || π_old).

    trainer/mismatch_k1            nats  E[−ℓ]; healthy 0.001–0.03, stop above 1.0
    trainer/mismatch_k3            nats  E[ρ − 1 − ℓ]; healthy 1e-5–1e-3 dense, 1e-3–1e-1 MoE
    trainer/mismatch_abs_p_mean          E|p_old − p_roll|
    trainer/mismatch_abs_p_max           max |p_old − p_roll|
    trainer/mismatch_ppl_ratio           mean over sequences of PPL_old / PPL_roll = exp(mean −ℓ)
    trainer/mismatch_chi2_token          E[ρ²] − 1
    trainer/mismatch_chi2_seq            mean over sequences of (exp Σℓ)² − 1
    trainer/mismatch_prob_error          E[exp |ℓ|] (token_mult_prob_error); healthy below 1.03–1.05
    trainer/mismatch_outside_frac        fraction of tokens with ρ outside [0.5, 2]
    trainer/mismatch_rho_mean            E[ρ]
    trainer/mismatch_ess                 1 / E[(ρ/ρ̄)²], made by `parts.finish` from mismatch_rho_square

Definitions of the sequence metrics follow verl's rollout correction docs. Limits: ALGORITHMS §5.
"""

import torch
from torch import Tensor

from trainer.algo.packed import log_ratio, nonempty, ratio, sequence_mean, sequence_sum
from trainer.algo.parts import Parts, masked_max, masked_mean

HEALTHY_RHO = (0.5, 2.0)


@torch.no_grad()
def mismatch(old_logp_T: Tensor, roll_logp_T: Tensor, mask_T: Tensor, sequence_T: Tensor, n_sequences: int) -> Parts:
    """The parts of all metrics above, from f32 log-probs of the trainer and of the rollout on sampled tokens.

    In bypass mode, which has no π_old, pass log π_θ of a step's first update: it is the same policy.
    Computed in f64, since χ² and k3 are small differences of numbers near 1. Finite for finite log-probs.
    """
    ell_T = log_ratio(old_logp_T.double(), roll_logp_T.double(), mask_T)
    rho_T = ratio(ell_T)
    low, high = HEALTHY_RHO
    p_difference_T = (
        torch.where(mask_T, old_logp_T, 0.0).double().exp() - torch.where(mask_T, roll_logp_T, 0.0).double().exp()
    ).abs()
    ppl_ratio_N = ratio(-sequence_mean(ell_T, mask_T, sequence_T, n_sequences))
    rho_N = ratio(sequence_sum(ell_T, sequence_T, n_sequences))
    sequences_N = nonempty(mask_T, sequence_T, n_sequences)
    return {
        "trainer/mismatch_k1": masked_mean(-ell_T, mask_T),
        "trainer/mismatch_k3": masked_mean(rho_T - 1 - ell_T, mask_T),
        "trainer/mismatch_abs_p_mean": masked_mean(p_difference_T, mask_T),
        "trainer/mismatch_abs_p_max": masked_max(p_difference_T, mask_T),
        "trainer/mismatch_ppl_ratio": masked_mean(ppl_ratio_N, sequences_N),
        "trainer/mismatch_chi2_token": masked_mean(rho_T.square() - 1, mask_T),
        "trainer/mismatch_chi2_seq": masked_mean(rho_N.square() - 1, sequences_N),
        "trainer/mismatch_prob_error": masked_mean(ratio(ell_T.abs()), mask_T),
        "trainer/mismatch_outside_frac": masked_mean((rho_T < low) | (rho_T > high), mask_T),
        "trainer/mismatch_rho_mean": masked_mean(rho_T, mask_T),
        "trainer/mismatch_rho_square": masked_mean(rho_T.square(), mask_T),
    }
