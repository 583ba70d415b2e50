"""The loop without an engine: how a step's metrics lead to a warning, or to the end of the run with a checkpoint."""

import contextlib
import io
import json
from types import SimpleNamespace

import msgspec
import pytest
from trainer_cases import new_trainer, process_group, random_batch, write_model

from config import Config
from engine.rollout import Rollout, Stats
from loop import USER_ERRORS, GuardStop, Loop, Position
from records.console import RunConsole
from records.guard import Guard, Limit
from records.log import RunLog
from settings import load
from trainer.algo import AlgoConfig
from trainer.algo.advantages import AdvantageConfig
from trainer.checkpoint import CheckpointConfig, Checkpointer, complete

RECIPE = "name: x\nsteps: 9\nmodel: {preset: tiny-qwen3}\ntask: {name: arithmetic}\nrecords: {tensorboard: false}\n"
STATS = Stats({"engine/response_length_mean": (8.0, 1.0)}, {"engine/sampled_tokens": 8.0}, {})


class Ranks:
    """One rank."""

    def combine(self, means, totals, peaks):
        return {name: a / b for name, (a, b) in means.items()} | dict(totals) | dict(peaks)

    def largest(self, number):
        return number


class WithoutEngine(Loop):
    """A loop whose rollouts and swaps are given; training, checkpoints and records are real."""

    def __init__(self, run_dir, trainer, *overrides):
        recipe = run_dir.parent / "x.yaml"
        recipe.write_text(RECIPE)
        self.config = load(Config, recipe, overrides)
        self.run_dir, self.trainer, self.ranks, self.at, self.times = run_dir, trainer, Ranks(), Position(), {}
        self.output = io.StringIO()
        self.console = RunConsole(self.output)
        self.guard = Guard(self.config.guard, experts=False)
        self.checkpoints = Checkpointer(self.config.checkpoint, run_dir / "checkpoints")
        self.log = RunLog(run_dir, self.config.records, msgspec.to_builtins(self.config))
        self.host = SimpleNamespace(starts=1, team=1)
        self.ledger = SimpleNamespace(take=lambda combine: {})
        self.phases = SimpleNamespace(train=contextlib.nullcontext)
        self.batch = random_batch(groups=4)

    def rollout(self):
        self.at.cursor += 32
        return Rollout(self.batch, STATS, [], 1, None)

    def _swap(self, version):
        self.at.version = version
        return {}

    def events(self):
        return [json.loads(line) for line in (self.run_dir / "events.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    with process_group():
        yield write_model("llama-tied", tmp_path_factory.mktemp("models"))


QUIET = ["eval.every=0", "guard.mismatch_k3_dense.action=off", "guard.mismatch_prob_error.action=off"]


@pytest.mark.parametrize("every", [0, 2, 3])
def test_a_stop_saves_a_checkpoint_and_ends_the_run(model, tmp_path, every):
    """The rollout log-probs are random numbers, so k1 is far from 0; whether a checkpoint was due or not."""
    trainer = new_trainer(model)
    run = WithoutEngine(tmp_path / "run", trainer, *QUIET, "guard.mismatch_k1.above=50", f"checkpoint.every={every}")
    run.step(0)
    run.guard = Guard(
        msgspec.structs.replace(run.config.guard, mismatch_k1=Limit(above=0.01, action="stop")), experts=False
    )
    with pytest.raises(GuardStop) as stop:
        run.step(1)
    text = str(stop.value)
    assert text.startswith("step 1: trainer/mismatch_k1 = ") and "nats is above 0.01 (guard.mismatch_k1): the " in text
    assert text.endswith("; a checkpoint is saved, --resume goes on from it")
    assert issubclass(GuardStop, USER_ERRORS)
    assert [path.name for path in complete(tmp_path / "run" / "checkpoints")] == ["step_000002"]
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 2, "the step is on record"

    resumed = new_trainer(model)
    at = Checkpointer(CheckpointConfig(), tmp_path / "run" / "checkpoints").restore(resumed, print)
    assert msgspec.convert(at, Position) == Position(step=2, cursor=64, version=2) and resumed.updates == 2


def test_a_warning_is_an_event_and_a_line_and_is_not_repeated(model, tmp_path):
    trainer = new_trainer(model, lr=1e-9)  # every step is the same
    run = WithoutEngine(tmp_path / "run", trainer, *QUIET, "guard.mismatch_k1={above: 0.01, action: warn}")
    for step in range(3):
        run.step(step)
    [event] = [event for event in run.events() if event["kind"] == "guard"]
    assert event["text"].startswith("step 0: trainer/mismatch_k1 = ") and "guard.mismatch_k1" in event["text"]
    assert run.output.getvalue().count("guard.mismatch_k1") == 1
    assert not complete(tmp_path / "run" / "checkpoints")


def test_a_gradient_that_is_not_finite_leaves_a_checkpoint_of_what_was_before(model, tmp_path):
    trainer = new_trainer(model)
    run = WithoutEngine(tmp_path / "run", trainer, *QUIET, "guard.mismatch_k1.action=off")
    run.step(0)
    before = [p.full_tensor().clone() for p in trainer.policy.parameters()]
    run.batch.rewards[:] *= 1e38  # the loss grows beyond f32
    trainer.algo = AlgoConfig(advantage=AdvantageConfig(name="dr_grpo"))
    with pytest.raises(FloatingPointError, match="not applied"):
        run.step(1)
    [path] = complete(tmp_path / "run" / "checkpoints")
    assert path.name == "step_000001"
    resumed = new_trainer(model)
    Checkpointer(CheckpointConfig(), tmp_path / "run" / "checkpoints").restore(resumed, print)
    assert all((p.full_tensor() == old).all() for p, old in zip(resumed.policy.parameters(), before, strict=True))


def test_a_skipped_calibration_is_an_event(model, tmp_path):
    overrides = ["algo.calibration.period=2", "trainer.updates_per_rollout=2", "fp8.train=reference"]
    overrides += ["guard.mismatch_k1.action=off"]
    config = load(Config, _recipe(tmp_path), overrides)
    trainer = new_trainer(model, config.algo, updates_per_rollout=2)
    run = WithoutEngine(tmp_path / "run", trainer, *QUIET, *overrides)
    for step in range(2):
        run.step(step)
    [event] = [event for event in run.events() if event["kind"] == "calibration"]
    assert event["text"].startswith("step 0: clip bounds stay as they are: ") and "min_tokens = 512" in event["text"]
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [step["trainer/clip_calibrated"] for step in steps] == [0, 0]


def _recipe(directory):
    path = directory / "recipe.yaml"
    path.write_text(RECIPE)
    return path
