"""From one reward per sequence to one advantage per sequence (ALGORITHMS §2).

    grpo          A = (R − mean_group) / (std_group + eps)    DeepSeekMath, arXiv 2402.03300
    dr_grpo       A = R − mean_group                          arXiv 2503.20783; goes with loss aggregation: constant
    rloo          A = R − mean of the others of the group     arXiv 2402.14740
    reinforce_pp  A = (R − mean_batch) / (std_batch + eps)    arXiv 2501.03262; one mean and std over all ranks

std_group divides by n−1 (what verl and TRL do), std_batch by n. A group of one, or of equal rewards, has advantage 0
under every rule that compares within the group. Groups must be whole on one rank.

The caller's order: add `overlong_penalty` to the rewards; for reinforce_pp all-reduce `reward_moments` of the sum;
then `advantages`. Shape letter: N sequences.
"""

from typing import Annotated, Literal

import msgspec
import torch
from torch import Tensor

from sync.fields import doc
from trainer.algo.parts import Mean, Parts


class OverlongConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    buffer_tokens: Annotated[
        int, doc("Responses within this many tokens of the limit are punished (DAPO); 0: off.", unit="tokens", ge=0)
    ] = 0
    penalty: Annotated[float, doc("Reward taken from a response that reaches the limit.", gt=0)] = 1.0


class AdvantageConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: Annotated[Literal["grpo", "dr_grpo", "rloo", "reinforce_pp"], doc("How rewards become advantages.")] = "grpo"
    eps: Annotated[float, doc("Added to the standard deviation (grpo, reinforce_pp).", gt=0)] = 1e-6
    overlong: Annotated[OverlongConfig, doc("DAPO's soft punishment of overlong responses.")] = OverlongConfig()


def overlong_penalty(sampled_lengths_N: Tensor, max_tokens: int, config: OverlongConfig) -> Tensor:
    """What to ADD to each reward, f32[N], in [−penalty, 0] (DAPO, arXiv 2503.14476, eq. 13).

    0 up to `max_tokens − buffer_tokens` sampled tokens, then linear, −penalty at `max_tokens` and beyond.
    Raises ValueError if the buffer is longer than `max_tokens`.
    """
    if config.buffer_tokens > max_tokens:
        raise ValueError(f"overlong.buffer_tokens {config.buffer_tokens} must be at most max_tokens {max_tokens}")
    if config.buffer_tokens == 0:
        return torch.zeros_like(sampled_lengths_N, dtype=torch.float32)
    over_N = (sampled_lengths_N - (max_tokens - config.buffer_tokens)).float() / config.buffer_tokens
    return -config.penalty * over_N.clamp(0, 1)


def reward_moments(rewards_N: Tensor) -> Tensor:
    """(count, sum, sum of squares) of the rewards, f64[3]: to be summed over ranks for reinforce_pp."""
    x_N = rewards_N.double()
    return torch.stack([torch.full_like(x_N.sum(), x_N.numel()), x_N.sum(), (x_N * x_N).sum()])


def advantages(rewards_N: Tensor, groups_N: Tensor, config: AdvantageConfig, moments: Tensor | None = None) -> Tensor:
    """Advantage of each sequence, f32[N], always finite for finite rewards.

    `rewards_N` f32[N]; `groups_N` any integer dtype and any values, equal within a group; `moments` f64[3] as of
    `reward_moments`, summed over all ranks, for reinforce_pp only.
    """
    # An f64 sum of equal f32 rewards is exact: their mean is the reward, and no rounding error gets divided by eps.
    x_N = rewards_N.double()
    if config.name == "reinforce_pp":
        assert moments is not None, "reinforce_pp needs the reward moments of all ranks"
        count, total, squares = moments.double()
        mean = total / count.clamp(min=1)
        variance = (squares / count.clamp(min=1) - mean * mean).clamp(min=0)
        return ((x_N - mean) / (variance.sqrt() + config.eps)).float()

    _, inverse_N, size_G = torch.unique(groups_N, return_inverse=True, return_counts=True)
    size_G = size_G.double()
    others_G = (size_G - 1).clamp(min=1)
    mean_G = torch.zeros_like(size_G).index_add(0, inverse_N, x_N) / size_G
    centred_N = x_N - mean_G[inverse_N]
    if config.name == "dr_grpo":
        result_N = centred_N
    elif config.name == "rloo":
        # R − (ΣR − R)/(n−1) = (R − mean) · n/(n−1)
        result_N = centred_N * (size_G / others_G)[inverse_N]
    else:
        std_G = (torch.zeros_like(size_G).index_add(0, inverse_N, centred_N.square()) / others_G).sqrt()
        result_N = centred_N / (std_G[inverse_N] + config.eps)
    return result_N.float()


def advantage_parts(advantages_N: Tensor) -> Parts:
    """`trainer/advantage_mean`, and the mean square from which `parts.finish` makes `trainer/advantage_std`."""
    x_N = advantages_N.detach().double()
    count = torch.full_like(x_N.sum(), x_N.numel())
    return {
        "trainer/advantage_mean": Mean(x_N.sum(), count),
        "trainer/advantage_square": Mean(x_N.square().sum(), count),
    }
