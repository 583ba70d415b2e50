"""Advantages against per-group Python with `statistics`, and what degenerate groups must not do."""

import statistics

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.algo import AlgoConfig
from trainer.algo.advantages import (
    AdvantageConfig,
    OverlongConfig,
    advantage_parts,
    advantages,
    overlong_penalty,
    reward_moments,
)
from trainer.tally import Tally


def reference(rewards, groups, config):
    """Sequence by sequence, from the definition of each rule."""
    result = []
    for i, (reward, group) in enumerate(zip(rewards, groups)):
        members = [r for r, g in zip(rewards, groups) if g == group]
        others = [r for j, (r, g) in enumerate(zip(rewards, groups)) if g == group and j != i]
        if config.name == "reinforce_pp":
            result.append((reward - statistics.fmean(rewards)) / (statistics.pstdev(rewards) + config.eps))
        elif not others:
            result.append(0.0)
        elif config.name == "rloo":
            result.append(reward - statistics.fmean(others))
        elif config.name == "dr_grpo":
            result.append(reward - statistics.fmean(members))
        else:
            result.append((reward - statistics.fmean(members)) / (statistics.stdev(members) + config.eps))
    return result


NAMES = ["grpo", "dr_grpo", "rloo", "reinforce_pp"]


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(-16, 16), st.sampled_from([-7, 0, 3, 2**31 - 1])), min_size=1, max_size=14))
def test_advantages_against_reference(name, samples):
    rewards, groups = [r / 8 for r, _ in samples], [g for _, g in samples]
    config = AdvantageConfig(name=name, eps=1e-3)
    r, g = torch.tensor(rewards), torch.tensor(groups, dtype=torch.int32)
    result = advantages(r, g, config, reward_moments(r))
    assert result.dtype == torch.float32
    assert result.tolist() == pytest.approx(reference(rewards, groups, config), rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("name", NAMES[:3])
def test_equal_rewards_and_groups_of_one_are_exactly_zero(name):
    rewards = torch.tensor([0.1] * 3 + [0.7] + [1e30, 1e30] + [1 / 3] * 7)
    groups = torch.tensor([5] * 3 + [-1] + [9, 9] + [2] * 7)
    assert (advantages(rewards, groups, AdvantageConfig(name=name)) == 0).all()


def test_reinforce_pp_sees_all_ranks():
    rewards = torch.tensor([0.0, 1.0, 1.0, 0.5, -1.0, 0.25, 3.0])
    groups = torch.zeros(7, dtype=torch.int64)
    config = AdvantageConfig(name="reinforce_pp")
    whole = advantages(rewards, groups, config, reward_moments(rewards))
    moments = reward_moments(rewards[:3]) + reward_moments(rewards[3:]) + reward_moments(rewards[:0])
    parts = [advantages(x, g, config, moments) for x, g in ((rewards[:3], groups[:3]), (rewards[3:], groups[3:]))]
    torch.testing.assert_close(torch.cat(parts), whole)
    shifted = rewards + 4096  # exact in f32, but its squares are not
    torch.testing.assert_close(advantages(shifted, groups, config, reward_moments(shifted)), whole)
    same = torch.full((4,), 0.1)
    assert advantages(same, groups[:4], config, reward_moments(same)).abs().max() < 1e-6
    with pytest.raises(AssertionError, match="moments of all ranks"):
        advantages(rewards, groups, config)


@pytest.mark.parametrize("name", NAMES)
def test_empty(name):
    empty, groups = torch.zeros(0), torch.zeros(0, dtype=torch.int32)
    assert advantages(empty, groups, AdvantageConfig(name=name), reward_moments(empty)).shape == (0,)
    assert overlong_penalty(groups, 10, OverlongConfig(buffer_tokens=4)).shape == (0,)


def test_overlong_penalty():
    lengths = torch.tensor([0, 80, 81, 90, 99, 100, 130])
    result = overlong_penalty(lengths, 100, OverlongConfig(buffer_tokens=20, penalty=0.5))
    assert result.tolist() == pytest.approx([0, 0, -0.025, -0.25, -0.475, -0.5, -0.5])
    assert (overlong_penalty(lengths, 100, OverlongConfig()) == 0).all()
    with pytest.raises(ValueError, match=r"overlong.buffer_tokens 101 must be at most max_tokens 100"):
        overlong_penalty(lengths, 100, OverlongConfig(buffer_tokens=101))


def test_advantage_metrics():
    tally = Tally("cpu")
    for chunk in ([1.0, -2.0], [], [0.5]):
        tally.add(advantage_parts(torch.tensor(chunk)))
    stats = tally.result()
    assert stats == pytest.approx(
        {
            "trainer/advantage_mean": statistics.fmean([1, -2, 0.5]),
            "trainer/advantage_std": statistics.pstdev([1, -2, 0.5]),
        }
    )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"name": "gae"}, "gae"),
        ({"eps": 0.0}, r"\$.advantage.eps"),
        ({"overlong": {"buffer_tokens": -1}}, r"\$.advantage.overlong.buffer_tokens"),
        ({"overlong": {"penalty": 0.0}}, r"\$.advantage.overlong.penalty"),
        ({"overlong": {"enabled": True}}, "unknown field"),
    ],
)
def test_config_errors(fields, message):
    with pytest.raises(msgspec.ValidationError, match=message):
        msgspec.convert({"advantage": fields}, AlgoConfig)
