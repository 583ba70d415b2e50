"""KL of the policy to a reference policy, as a loss term (ALGORITHMS §3).

With d = log π_θ − log π_ref on tokens sampled from π_θ, all three have values whose mean estimates KL(π_θ || π_ref):

    name  value            gradient                                     in expectation
    k1    d                d · ∇log π_θ  (not autograd's, see below)    ∇KL(π_θ || π_ref)
    k2    d²/2             d · ∇log π_θ                                 ∇KL(π_θ || π_ref)
    k3    e^−d − 1 + d     (1 − e^−d) · ∇log π_θ                        ∇KL(π_ref || π_θ): equal to first order in d

k1 and k3 are unbiased values, k2 a biased one (equal to second order); k2's gradient is exact. Plain autograd of k1 is
∇log π_θ, whose mean is zero: a term that does nothing but add noise. So k1 keeps its value and takes k2's gradient.
k3 is GRPO's (arXiv 2402.03300). Sources: Schulman, "Approximating KL divergence" (values); the gradients are checked
against the exact KL in the tests. Tokens of an older policy are not reweighted.
"""

from typing import Annotated, Literal

import msgspec
from torch import Tensor

from sync.fields import doc
from trainer.algo.loss import LossConfig, aggregate
from trainer.algo.packed import log_ratio, ratio
from trainer.algo.parts import Parts, masked_mean


class KlConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    coef: Annotated[
        float, doc("Weight of the KL to the reference policy in the loss; 0: no reference at all.", ge=0)
    ] = 0.0
    estimator: Annotated[Literal["k1", "k2", "k3"], doc("How the KL of a token is estimated.")] = "k3"


def kl_estimate(logp_T: Tensor, ref_logp_T: Tensor, mask_T: Tensor, config: KlConfig) -> Tensor:
    """The estimate per token [T], logp's dtype, nats; 0 where not `mask_T`. Gradient as in the table above."""
    d_T = log_ratio(logp_T, ref_logp_T.detach(), mask_T)
    if config.estimator == "k3":
        return ratio(-d_T) - 1 + d_T
    k2_T = d_T.square() / 2
    return k2_T if config.estimator == "k2" else d_T.detach() + k2_T - k2_T.detach()


def kl_loss(
    logp_T: Tensor,
    ref_logp_T: Tensor,
    mask_T: Tensor,
    sequence_T: Tensor,
    n_sequences: int,
    total: Tensor,
    config: KlConfig,
    loss: LossConfig,
) -> tuple[Tensor, Parts]:
    """coef · KL aggregated as the policy loss is, with the same `total`; to be added to it. And `trainer/kl_ref`.

    Arguments as of `loss.policy_loss`; `ref_logp_T` f32, log π_ref. A `coef` of 0 gives 0 attached to the graph.
    """
    kl_T = kl_estimate(logp_T, ref_logp_T, mask_T, config)
    numerator = aggregate(kl_T, mask_T, sequence_T, n_sequences, loss)
    parts: Parts = {"trainer/kl_ref": masked_mean(kl_T, mask_T)}
    return config.coef * numerator / total.clamp(min=1).to(numerator.dtype), parts
