"""The parts of benchmarks/ that need neither an engine nor TRL."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from trainer_cases import preset, process_group

from benchmarks.figure import figure
from benchmarks.loop import parse
from benchmarks.ours import TrainerSide, random_batch, recipe
from benchmarks.sides import Side

KEYS = {"figure", "value", "unit", "against", "against_value", "ratio", "spread", "note"}
ECHO = """
from benchmarks.sides import Turns
turns = Turns()
print("noise")
turns.reply(model="here")
hold = bytearray(40_000_000)
while turns.wait():
    turns.reply(seconds=0.5)
"""


def test_ratio_above_one_is_in_our_favour() -> None:
    fast = figure("x", "tokens/s", [90, 110, 100], "peer", [50, 40, 60], higher_is_better=True, note="")
    assert set(fast) == KEYS
    assert (fast["value"], fast["against_value"], fast["ratio"], fast["spread"]) == (100, 50, 2.0, 0.4)
    assert figure("x", "s", [2.0], "peer", [3.0], higher_is_better=False, note="")["ratio"] == 1.5


def test_without_a_peer_there_is_no_ratio() -> None:
    alone = figure("x", "s", [2.0], "peer", [], higher_is_better=False, note="")
    assert alone["against"] is alone["against_value"] is alone["ratio"] is alone["spread"] is None


def test_batch_has_the_promised_lengths() -> None:
    batch = random_batch(groups=64, group_size=8, longest=256, vocabulary=64, seed=1)
    lengths = batch.sampled_lengths
    assert lengths.min() >= 8 and lengths.max() == 256
    assert 56 <= np.median(lengths) <= 72
    prompts = batch.lengths - lengths
    assert prompts.min() >= 8 and prompts.max() <= 40
    assert (batch.tokens >= 2).all() and (batch.tokens < 64).all()
    first = [batch.tokens[batch.starts[i] : batch.starts[i] + prompts[i]].tolist() for i in range(8)]
    assert all(prompt == first[0] for prompt in first)


def test_trainer_side_steps(tmp_path: Path) -> None:
    batch = random_batch(groups=2, group_size=8, longest=16, vocabulary=64, seed=0)
    with process_group():
        side = TrainerSide(recipe([]), preset("tiny-qwen3", tmp_path), batch, torch.device("cpu"))
        before = side.trainer.logprobs(side.batch)
        assert np.array_equal(before, side.batch.logprobs) and before[batch.sampled].max() < 0
        assert side.step() > 0
        assert np.abs(side.trainer.logprobs(side.batch) - before).max() > 1e-4


def test_a_side_takes_turns(tmp_path: Path) -> None:
    with Side("echo", [sys.executable, "-c", ECHO], {}, tmp_path) as side:
        assert side.ready == {"model": "here"}
        assert side.turn() == {"seconds": 0.5}
        assert 0 <= side.peak_mb() < 1000
    assert side.process.returncode == 0
    assert side.log.read_text() == "noise\n"


def test_a_side_that_ends_shows_its_log(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"(?s)broken ended with exit status 1.*out of luck"):
        Side("broken", [sys.executable, "-c", "raise SystemExit('out of luck')"], {}, tmp_path)


def test_command_line() -> None:
    assert parse(["--only", "trainer", "--peer", "none"]).peer == "none"
