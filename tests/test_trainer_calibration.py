"""Calibrated clipping inside the trainer: when it happens, with which forwards, what the loss then does, what is saved.

FP8 is played by a forward hook that adds noise to the log-probs, and is silent under `policy.high_precision()`.
"""

import contextlib

import pytest
import torch
from trainer_cases import new_trainer, random_batch, write_model

from config import Config
from settings import ConfigError, load
from trainer.algo import AlgoConfig
from trainer.algo.clipping import CalibrationConfig
from trainer.algo.loss import LossConfig
from trainer.checkpoint import CheckpointConfig, Checkpointer


@pytest.fixture(scope="module")
def model(tmp_path_factory, group):
    return write_model("llama-tied", tmp_path_factory.mktemp("models"))


def make(model, updates=2, loss=None, lr=1e-2, **calibration):
    algo = AlgoConfig(
        loss=loss or LossConfig(), calibration=CalibrationConfig(**({"period": 2, "min_tokens": 5} | calibration))
    )
    return new_trainer(model, algo, updates_per_rollout=updates, lr=lr)


def batch(seed=0):
    return random_batch(seed, groups=8)


def play_fp8(trainer, monkeypatch, noise):
    """Returns the list of forwards: (updates done before, high precision?, gradient?)."""
    precise, forwards = [False], []
    generator = torch.Generator().manual_seed(0)

    @contextlib.contextmanager
    def high_precision():
        precise[0] = True
        yield
        precise[0] = False

    def forward(module, inputs, output):
        logp, entropy = output
        forwards.append((trainer.updates, precise[0], torch.is_grad_enabled()))
        return (logp if precise[0] else logp + noise * torch.randn(len(logp), generator=generator)), entropy

    monkeypatch.setattr(trainer.policy, "high_precision", high_precision)
    trainer.policy.register_forward_hook(forward)
    return forwards


def parameters(trainer):
    return [p.full_tensor().clone() for p in trainer.policy.parameters()]


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("updates", [2, 3])
def test_it_calibrates_on_the_last_mini_batch_of_every_period(model, monkeypatch, updates):
    trainer = make(model, updates, lr=1e-3)  # r16 stays within the bounds: what leaves them is noise
    forwards = play_fp8(trainer, monkeypatch, 0.15)
    before = (0.8, 1.2)
    for step in range(4):
        forwards.clear()
        metrics = trainer.step(batch(step))
        first = step * updates
        precise = {done for done, is_precise, _ in forwards if is_precise}
        calibrates = step % 2 == 0
        # high precision for the old policy, before anything moves, and for the current one before the last update
        assert precise == ({first, first + updates - 1} if calibrates else set())
        assert not any(gradient for _, is_precise, gradient in forwards if is_precise)
        assert metrics["trainer/clip_calibrated"] == calibrates
        assert ("trainer/clip_alpha" in metrics) == ("trainer/clip_mass_ratio" in metrics) == calibrates
        bounds = metrics["trainer/clip_low"], metrics["trainer/clip_high"]
        assert (bounds != before) == calibrates
        before = bounds
    assert before[0] < 0.79, "noise widens the ratios, so the lower bound falls"
    assert metrics["trainer/clip_calibration_s"] >= 0 and not trainer.calibrator.skipped


def test_alpha_is_that_of_high_precision(model, monkeypatch):
    noisy, plain = make(model), make(model)
    play_fp8(noisy, monkeypatch, 0.3)
    metrics, exact = noisy.step(batch()), plain.step(batch())
    assert metrics["trainer/clip_alpha_naive"] > metrics["trainer/clip_alpha"]
    assert exact["trainer/clip_alpha_naive"] == exact["trainer/clip_alpha"]


def test_without_fp8_it_trains_as_if_it_were_off(model):
    """r16 = r8: the same parameters to the last bit, whatever the forwards in between."""
    on, off = make(model, period=1), make(model, period=0)
    assert off.calibrator is None
    for seed in range(3):
        metrics = on.step(batch(seed))
        off.step(batch(seed))
        assert metrics["trainer/clip_calibrated"] == 1 and metrics["trainer/clip_mass_ratio"] == pytest.approx(1)
        assert (metrics["trainer/clip_low"], metrics["trainer/clip_high"]) == pytest.approx((0.8, 1.2), rel=1e-12)
    assert same(parameters(on), parameters(off))


def test_the_updates_clip_with_the_bounds_in_use(model):
    """A step that does not calibrate is one with those bounds in the config; and not one with others."""
    wanted, other = (make(model, loss=LossConfig(clip_low=e, clip_high=e), period=0) for e in (0.02, 0.2))
    trainer = make(model)
    trainer.calibrator.load({"low": 0.98, "high": 1.02, "steps": 1})
    metrics = [t.step(batch()) for t in (trainer, wanted, other)]
    assert metrics[0]["trainer/clip_calibrated"] == 0 and metrics[0]["trainer/clip_low"] == 0.98
    assert metrics[0]["trainer/clip_frac"] == metrics[1]["trainer/clip_frac"] > metrics[2]["trainer/clip_frac"]
    assert same(parameters(trainer), parameters(wanted)) and not same(parameters(trainer), parameters(other))


def test_the_last_update_already_clips_with_the_new_bounds(model, monkeypatch):
    trainer = make(model, smoothing=0.0)
    play_fp8(trainer, monkeypatch, 0.15)
    seen = []
    update = trainer._update
    monkeypatch.setattr(
        trainer,
        "_update",
        lambda *args, **named: (seen.append(trainer.calibrator.loss_config.bounds), update(*args, **named))[1],
    )
    metrics = trainer.step(batch())
    assert seen[0] == pytest.approx((0.8, 1.2))
    assert seen[1] == pytest.approx((metrics["trainer/clip_low"], metrics["trainer/clip_high"])) != seen[0]


@pytest.mark.parametrize(("case", "reason"), [("few", "too few"), ("still", "no update came before")])
def test_a_skipped_calibration_says_why_and_changes_nothing(model, case, reason):
    trainer = make(model, min_tokens=10_000 if case == "few" else 5, initial_low=0.6, initial_high=1.8)
    rollout = batch()
    if case == "still":  # the first mini-batch has no token that counts
        rollout.sampled[: rollout.starts[16]] = False
    metrics = trainer.step(rollout)
    assert reason in trainer.calibrator.skipped and metrics["trainer/clip_calibrated"] == 0
    assert (metrics["trainer/clip_low"], metrics["trainer/clip_high"]) == (0.6, 1.8)
    assert "trainer/clip_alpha" not in metrics
    trainer.step(batch(1))
    assert not trainer.calibrator.skipped, "said once"


@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_bounds_are_part_of_a_checkpoint(model, tmp_path, monkeypatch, asynchronous):
    trainer = make(model)
    play_fp8(trainer, monkeypatch, 0.15)
    trainer.step(batch())
    checkpointer = Checkpointer(CheckpointConfig(asynchronous=asynchronous), tmp_path)
    saved = trainer.calibrator.state()
    assert saved["low"] != 0.8 and saved["steps"] == 1
    checkpointer.save(trainer, 1, {})
    trainer.step(batch(1))
    trainer.step(batch(2))  # calibrates, while an asynchronous save is being written
    assert trainer.calibrator.state() != saved
    checkpointer.close()

    resumed = make(model)
    Checkpointer(CheckpointConfig(), tmp_path).restore(resumed, print)
    assert resumed.calibrator.state() == saved, "to the last bit"
    off = make(model, period=0)
    assert Checkpointer(CheckpointConfig(), tmp_path).restore(off, print) == {} and off.calibrator is None


def test_a_checkpoint_without_bounds_leaves_the_initial_ones(model, tmp_path):
    plain = make(model, period=0)
    plain.step(batch())
    Checkpointer(CheckpointConfig(asynchronous=False), tmp_path).save(plain, 1, {})
    resumed = make(model, initial_low=0.6, initial_high=1.8)
    assert Checkpointer(CheckpointConfig(), tmp_path).restore(resumed, print) == {}
    assert resumed.calibrator.state() == {"low": 0.6, "high": 1.8, "steps": 0} and resumed.updates == 2


def test_one_update_per_rollout_is_a_config_error(tmp_path):
    recipe = tmp_path / "x.yaml"
    recipe.write_text("name: x\nsteps: 1\nmodel: {preset: tiny-qwen3}\ntask: {name: arithmetic}\n")
    two = ["algo.calibration.period=20", "trainer.updates_per_rollout=2"]
    load(Config, recipe, [*two, "fp8.train=reference"])
    with pytest.raises(ConfigError, match=r"fp8\.train is off"):
        load(Config, recipe, two)
    with pytest.raises(
        ConfigError, match=r"algo\.calibration\.period = 20 needs trainer\.updates_per_rollout of at least 2"
    ):
        load(Config, recipe, ["algo.calibration.period=20"])
