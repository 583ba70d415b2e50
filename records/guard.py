"""Guard rails: limits on the metrics of a step, each of which warns, stops the run or is off.

A scalar KL can miss a collapse (ALGORITHMS §5), so clip fractions by sign, gradient norm, entropy and response length
are watched beside it. `Limit` compares with a number, `Jump` with the running median of the run itself. What is judged
are metrics of engine and trainer that are combined over ranks, so all ranks come to the same verdict without asking.
The medians start anew when a run is resumed.
"""

import math
import statistics
from collections import deque
from collections.abc import Mapping
from typing import Annotated, Literal, NamedTuple

import msgspec

from records.metrics import METRICS
from sync.fields import doc

Action = Literal["warn", "stop", "off"]
FEWEST = 5  # steps before a median means anything
WORSE = 1.5  # a warning is repeated early once the value is this many times further beyond its limit
COMBINED = ("engine/", "trainer/")  # metrics that are the same on every rank


class Limit(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A metric and the size it must not exceed."""

    above: Annotated[float, doc("Largest |value| that is allowed.", gt=0)]
    action: Annotated[Action, doc("What happens beyond it.")] = "warn"


class Jump(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A metric and the factor by which it may leave its running median."""

    factor: Annotated[float, doc("Largest change against the median of the last `guard.window` steps.", gt=1)]
    action: Annotated[Action, doc("What happens beyond it.")] = "warn"


class GuardConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When to warn of a run, and when to stop it (with a checkpoint)."""

    non_finite: Annotated[
        Action, doc("A metric that is NaN or infinite. A loss or gradient that is not finite always stops.")
    ] = "stop"
    mismatch_k1: Annotated[Limit, doc("KL between engine and trainer, k1; usual 0.001–0.03.")] = Limit(
        above=1.0, action="stop"
    )
    mismatch_k3_dense: Annotated[Limit, doc("KL, k3, of models without experts; usual 1e-5–1e-3.")] = Limit(above=1e-3)
    mismatch_k3_moe: Annotated[Limit, doc("KL, k3, of models with experts; usual 1e-3–1e-1.")] = Limit(above=0.1)
    mismatch_prob_error: Annotated[Limit, doc("token_mult_prob_error, E[exp|log ρ|]; healthy below 1.03–1.05.")] = (
        Limit(above=1.05)
    )
    clip_frac_pos: Annotated[Limit, doc("Clipped fraction of tokens with A > 0 (no published limit).")] = Limit(
        above=0.2
    )
    clip_frac_neg: Annotated[Limit, doc("Clipped fraction of tokens with A < 0 (no published limit).")] = Limit(
        above=0.2
    )
    entropy: Annotated[Jump, doc("Policy entropy, up (surge) or down (collapse).")] = Jump(factor=3.0)
    response_length: Annotated[Jump, doc("Mean response length, up or down.")] = Jump(factor=3.0)
    grad_norm: Annotated[Jump, doc("Gradient norm, up.")] = Jump(factor=10.0)
    window: Annotated[int, doc("Steps of the running medians.", unit="steps", ge=FEWEST)] = 20
    repeat_every: Annotated[
        int, doc("Steps until a warning that still holds is repeated; sooner if it gets worse.", unit="steps", ge=1)
    ] = 50


class Rule(NamedTuple):
    """What a field of the config watches, and what to tell the user."""

    field: str
    metric: str
    advice: str
    down: bool = False  # a Jump that counts downwards too


_ENGINE_OFF = (
    "the engine does not sample from the trainer's policy; look for weights that did not arrive (sync.verify=always), "
    "FP8 layers that should stay BF16 (fp8.ignored_layers, fp8.num_last_layers_in_bf16), or top_p, top_k, min_p "
    "without rollout.replay_support"
)
RULES = (
    Rule("mismatch_k1", "trainer/mismatch_k1", _ENGINE_OFF),
    Rule("mismatch_k3_dense", "trainer/mismatch_k3", _ENGINE_OFF),
    Rule("mismatch_k3_moe", "trainer/mismatch_k3", _ENGINE_OFF),
    Rule("mismatch_prob_error", "trainer/mismatch_prob_error", _ENGINE_OFF),
    Rule(
        "clip_frac_pos", "trainer/clip_frac_pos",
        "the policy moves far within one rollout; lower trainer.lr or trainer.updates_per_rollout, or raise "
        "algo.loss.clip_high",
    ),
    Rule(
        "clip_frac_neg", "trainer/clip_frac_neg",
        "bad tokens go unpunished, which comes before an entropy surge; with FP8 training set algo.calibration.period "
        "(calibrated clipping), else lower trainer.lr or trainer.updates_per_rollout",
    ),
    Rule(
        "entropy", "trainer/entropy",
        "a surge means that bad tokens go unpunished (see trainer/clip_frac_neg), a collapse that exploration ends; "
        "lower trainer.lr, or hold the policy with algo.kl.coef",
        down=True,
    ),
    Rule(
        "response_length", "engine/response_length_mean",
        "responses may be degenerating; read samples.jsonl, see engine/finish_length_frac and "
        "algo.advantage.overlong",
        down=True,
    ),
    Rule(
        "grad_norm", "trainer/grad_norm",
        "a few tokens may dominate the update; look at trainer/mismatch_* and trainer/ratio_max, lower trainer.lr or "
        "trainer.max_grad_norm",
    ),
)  # fmt: skip


class Verdict(NamedTuple):
    """`warnings` are news; `stop` is the reason to end the run, or empty."""

    warnings: list[str]
    stop: str


class Guard:
    """Usage: `check` once per step, with the same metrics on every rank."""

    def __init__(self, config: GuardConfig, experts: bool) -> None:
        """`experts`: whether the model is a mixture of experts; it decides which limit of k3 holds."""
        self.config = config
        other = "mismatch_k3_dense" if experts else "mismatch_k3_moe"
        self.rules = [rule for rule in RULES if rule.field != other]
        self._seen: dict[str, deque[float]] = {rule.metric: deque(maxlen=config.window) for rule in self.rules}
        self._said: dict[str, tuple[int, float]] = {}  # field -> (step, excess) of the last warning

    def check(self, step: int, metrics: Mapping[str, float]) -> Verdict:
        """Judges the metrics of a finished step; those that a step lacks are passed over."""
        warnings, stops = [], []

        def report(field: str, action: Action, excess: float, text: str) -> None:
            if action == "stop":
                stops.append(text)
            elif action == "warn" and self._is_news(field, step, excess):
                warnings.append(text)

        broken = sorted(name for name in metrics if name.startswith(COMBINED) and not math.isfinite(metrics[name]))
        if broken:
            text = f"not finite: {', '.join(broken)} (guard.non_finite); look at the samples and metrics of this step"
            report("non_finite", self.config.non_finite, 1.0, text)
        for rule in self.rules:
            value = metrics.get(rule.metric, math.nan)
            if not math.isfinite(value):
                continue
            limit: Limit | Jump = getattr(self.config, rule.field)
            excess, against = self._excess(rule, limit, abs(value))
            if excess > 1:
                unit = METRICS[rule.metric].unit.removeprefix("frac")
                shown = f"{rule.metric} = {value:.4g}{' ' * bool(unit)}{unit} is {against}"
                report(rule.field, limit.action, excess, f"{shown} (guard.{rule.field}): {rule.advice}")
            self._seen[rule.metric].append(abs(value))
        return Verdict(warnings, "; ".join(stops))

    def _excess(self, rule: Rule, limit: Limit | Jump, value: float) -> tuple[float, str]:
        """How many times beyond the limit the value is (above 1: beyond), and the limit in words."""
        if isinstance(limit, Limit):
            return value / limit.above, f"above {limit.above:g}"
        seen = self._seen[rule.metric]
        median = statistics.median(seen) if len(seen) >= FEWEST else 0.0
        if not median:
            return 0.0, ""
        change = value / median
        if rule.down and change < 1:
            return median / limit.factor / max(value, 1e-12), f"less than 1/{limit.factor:g} of its median {median:.4g}"
        return change / limit.factor, f"more than {limit.factor:g} times its median {median:.4g}"

    def _is_news(self, field: str, step: int, excess: float) -> bool:
        last = self._said.get(field)
        if last is not None and step < last[0] + self.config.repeat_every and excess < WORSE * last[1]:
            return False
        self._said[field] = (step, excess)
        return True
