"""Guard rails: every limit can warn, stop and be silent; what is said names value, limit, field and remedy; once."""

import math

import msgspec
import pytest

from config import Config
from records.guard import FEWEST, RULES, Guard, GuardConfig, Jump, Limit
from records.metrics import METRICS
from settings import field_docs, load

HEALTHY = {
    "trainer/mismatch_k1": 0.002,
    "trainer/mismatch_k3": 5e-4,
    "trainer/mismatch_prob_error": 1.01,
    "trainer/clip_frac_pos": 0.01,
    "trainer/clip_frac_neg": 0.02,
    "trainer/entropy": 0.5,
    "trainer/grad_norm": 1.0,
    "engine/response_length_mean": 100.0,
}
LIMITS = [field for field in GuardConfig.__struct_fields__ if isinstance(getattr(GuardConfig(), field), Limit)]
JUMPS = [field for field in GuardConfig.__struct_fields__ if isinstance(getattr(GuardConfig(), field), Jump)]
METRIC = {rule.field: rule.metric for rule in RULES}


def with_action(field, action):
    config = GuardConfig()
    return msgspec.structs.replace(config, **{field: msgspec.structs.replace(getattr(config, field), action=action)})


def after_healthy_steps(config=None, experts=False, steps=FEWEST):
    guard = Guard(config or GuardConfig(), experts)
    for step in range(steps):
        assert guard.check(step, HEALTHY) == ([], "")
    return guard


def bad(field, times=1.01):
    """Metrics in which just this limit is exceeded, `times` the limit."""
    limit = getattr(GuardConfig(), field)
    size = limit.above if isinstance(limit, Limit) else limit.factor * HEALTHY[METRIC[field]]
    return HEALTHY | {METRIC[field]: times * size}


def test_rules_and_fields_and_metrics_agree():
    assert {*LIMITS, *JUMPS} == set(METRIC) and len(RULES) == len(METRIC)
    assert set(METRIC.values()) <= set(METRICS) and set(METRIC.values()) == set(HEALTHY)
    assert {d.path for d in field_docs(Config) if d.path.startswith("guard.")} >= {f"guard.{f}" for f in METRIC}


@pytest.mark.parametrize("field", [*LIMITS, *JUMPS])
@pytest.mark.parametrize("action", ["warn", "stop", "off"])
def test_a_limit_does_what_its_action_says(field, action):
    guard = after_healthy_steps(with_action(field, action), experts=field == "mismatch_k3_moe")
    assert guard.check(98, bad(field, 0.99)) == ([], "")
    warnings, stop = guard.check(99, bad(field))
    assert (len(warnings), bool(stop)) == (action == "warn", action == "stop")
    if action != "off":
        text = stop or warnings[0]
        value = bad(field)[METRIC[field]]
        assert text.startswith(f"{METRIC[field]} = {value:.4g}") and f"(guard.{field})" in text and ": " in text
        assert ("above" in text) == (field in LIMITS) and len(text) > 100, "no advice"


def test_the_defaults_stop_only_for_k1_and_what_is_not_finite():
    config = GuardConfig()
    stops = [f for f in GuardConfig.__struct_fields__ if getattr(getattr(config, f), "action", None) == "stop"]
    assert stops == ["mismatch_k1"] and config.non_finite == "stop"
    assert config.mismatch_k1.above == 1.0 and config.mismatch_prob_error.above == 1.05
    warnings, stop = after_healthy_steps().check(9, HEALTHY | {"trainer/mismatch_k1": -1.5})
    assert not warnings and "-1.5 nats is above 1 (guard.mismatch_k1)" in stop and "sync.verify" in stop


def test_k3_depends_on_the_kind_of_model():
    high = HEALTHY | {"trainer/mismatch_k3": 0.05}
    [dense] = after_healthy_steps().check(9, high).warnings
    assert "above 0.001 (guard.mismatch_k3_dense)" in dense
    assert after_healthy_steps(experts=True).check(9, high) == ([], "")
    [moe] = after_healthy_steps(experts=True).check(9, HEALTHY | {"trainer/mismatch_k3": 0.2}).warnings
    assert "guard.mismatch_k3_moe" in moe


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("action", ["stop", "warn", "off"])
def test_not_finite(value, action):
    guard = after_healthy_steps(GuardConfig(non_finite=action))
    metrics = HEALTHY | {"trainer/grad_norm": value, "engine/reward_mean": value, "time/step_s": value}
    warnings, stop = guard.check(9, metrics)
    assert (len(warnings), bool(stop)) == (action == "warn", action == "stop")
    assert action == "off" or "not finite: engine/reward_mean, trainer/grad_norm (guard.non_finite)" in (
        stop or warnings[0]
    )
    assert guard.check(10, HEALTHY) == ([], ""), "it has no part in the medians"
    assert guard.check(11, HEALTHY | {"time/step_s": value}) == ([], ""), "times differ between ranks"


def test_several_stops_are_all_named():
    config = with_action("clip_frac_neg", "stop")
    stop = after_healthy_steps(config).check(9, bad("clip_frac_neg") | {"trainer/mismatch_k1": 3.0}).stop
    assert "guard.mismatch_k1" in stop and "guard.clip_frac_neg" in stop and "algo.calibration.period" in stop


def test_entropy_and_length_jump_both_ways_and_the_gradient_only_up():
    for field, down in (("entropy", True), ("response_length", True), ("grad_norm", False)):
        metrics = HEALTHY | {METRIC[field]: HEALTHY[METRIC[field]] / 100}
        warnings = after_healthy_steps().check(9, metrics).warnings
        assert [f"less than 1/3 of its median {HEALTHY[METRIC[field]]:.4g}" in w for w in warnings] == [True] * down
    assert after_healthy_steps().check(9, HEALTHY | {"trainer/entropy": 0.0}).warnings


def test_medians_run_and_need_some_steps():
    assert after_healthy_steps(steps=FEWEST - 1).check(9, bad("entropy", 100)) == ([], "")
    guard = after_healthy_steps(GuardConfig(window=5))
    for step in range(5, 30):  # 4 times in 24 steps, but never much within the window
        assert guard.check(step, HEALTHY | {"trainer/entropy": 0.5 * 1.06 ** (step - 5)}) == ([], "")
    still = Guard(GuardConfig(), False)
    for step in range(9):  # steps without any signal have no median to leave
        assert still.check(step, HEALTHY | {"trainer/grad_norm": 0.0}) == ([], "")
    assert still.check(9, HEALTHY) == ([], "")


def test_a_warning_is_repeated_when_worse_or_after_a_while():
    guard = after_healthy_steps(GuardConfig(repeat_every=10))

    def said(step, times):
        return len(guard.check(step, bad("mismatch_prob_error", times)).warnings)

    assert [said(step, 1.1) for step in range(10, 21)] == [1, *[0] * 9, 1]
    assert said(21, 1.5) == 0 and said(22, 1.7) == 1 and said(23, 1.7) == 0
    assert len(guard.check(24, bad("clip_frac_neg")).warnings) == 1, "each limit for itself"


def test_steps_without_training_are_passed_over():
    guard = after_healthy_steps()
    assert guard.check(9, {}) == ([], "") and guard.check(10, {"engine/reward_mean": 0.0}) == ([], "")


def test_one_override_keeps_the_rest_of_a_limit(tmp_path):
    recipe = tmp_path / "x.yaml"
    recipe.write_text("name: x\nsteps: 1\nmodel: {preset: tiny-qwen3}\ntask: {name: arithmetic}\nguard: {window: 9}\n")
    guard = load(Config, recipe, ["guard.mismatch_k1.action=off", "guard.entropy.factor=5"]).guard
    assert guard == GuardConfig(window=9, mismatch_k1=Limit(above=1.0, action="off"), entropy=Jump(factor=5.0))
