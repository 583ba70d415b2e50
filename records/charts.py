"""What the report draws: the charts as data, and the series that go into them.

Rows are the records of metrics.jsonl. A chart without any finite value is left out, so a run without FP8, evaluation
or correction has a shorter page instead of empty frames.
"""

import math
import statistics
from collections.abc import Sequence
from typing import Any

import msgspec

MAX_POINTS = 1000  # per line: more cannot be told apart on a screen and only slow the page down

Row = dict[str, Any]


class Chart(msgspec.Struct, frozen=True, kw_only=True):
    """One frame of the report. `lines` maps metric names to labels; `band` is drawn where the value is healthy."""

    title: str
    lines: dict[str, str]
    unit: str = ""
    note: str = ""
    kind: str = "lines"  # or "stack": parts of a whole
    smooth: bool = False  # add a moving average, for noisy lines
    log: bool = False  # start with a logarithmic axis where every value is positive
    band: tuple[float, float, str] | None = None  # low, high, label; sources: ALGORITHMS §5
    limit: tuple[float, str] | None = None  # a value not to reach


TIME_PARTS = {
    "time/rollout_s": "rollout", "time/reward_s": "reward", "time/train_s": "train", "time/sync_s": "sync",
    "time/eval_s": "evaluation", "time/probe_s": "probe", "time/checkpoint_s": "checkpoint",
}  # fmt: skip

CHARTS = (
    Chart(title="Reward", lines={"engine/reward_mean": "mean"}, smooth=True, note="Of all samples drawn."),
    Chart(
        title="Held-out evaluation", lines={"engine/eval_accuracy": "pass@1", "engine/eval_pass_at_k": "pass@k"},
        unit="fraction correct",
    ),
    Chart(
        title="Mismatch: KL", lines={"trainer/mismatch_k1": "k1", "trainer/mismatch_k3": "k3"}, unit="nats",
        note="Engine that sampled against trainer. k3 is usually 1e-5–1e-3 for dense, 1e-3–1e-1 for MoE models.",
        log=True, band=(0.001, 0.03, "usual k1"), limit=(1.0, "stop above 1"),
    ),
    Chart(
        title="Mismatch: probability error", lines={"trainer/mismatch_prob_error": "E[exp|log ρ|]"},
        band=(1.0, 1.03, "healthy"), limit=(1.05, "too far above 1.05"),
    ),
    Chart(
        title="Mismatch: sources", unit="nats",
        lines={
            "trainer/probe_kl": "as trained", "trainer/probe_remainder": "all matched",
            "trainer/probe_weights": "+ weights", "trainer/probe_activations": "+ activations",
            "trainer/probe_scales": "+ scales",
        },
        note="What the KL gains by each source alone, where the others are matched to the engine.",
    ),
    Chart(
        title="Mismatch: outliers",
        lines={"trainer/mismatch_outside_frac": "ρ outside [0.5, 2]", "trainer/mismatch_abs_p_mean": "mean |Δp|"},
    ),
    Chart(
        title="Clipped tokens by sign of the advantage", unit="fraction",
        lines={"trainer/clip_frac_pos": "A > 0", "trainer/clip_frac_neg": "A < 0"},
        note="A rise for A < 0 alone comes before an entropy surge: bad tokens go unpunished.",
    ),
    Chart(
        title="Calibrated clipping: bounds", lines={"trainer/clip_low": "L", "trainer/clip_high": "H"},
        note="Of the ratio. L falls and H rises with the FP8 noise of the log-probs.",
    ),
    Chart(
        title="Calibrated clipping: α", unit="fraction of A < 0",
        lines={"trainer/clip_alpha": "high precision", "trainer/clip_alpha_naive": "FP8, bound as configured"},
        note="What the configured bound clips. Calibration makes FP8 clip what high precision would.",
    ),
    Chart(
        title="Calibrated clipping: mass ratio", lines={"trainer/clip_mass_ratio": "FP8 / high precision"},
        note="Gradient mass of A > 0 over that of A < 0. 1: the balance of high precision.",
    ),
    Chart(title="Entropy", lines={"trainer/entropy": "policy entropy"}, unit="nats"),
    Chart(
        title="Response length", unit="tokens",
        lines={"engine/response_length_mean": "mean", "engine/response_length_max": "longest"},
    ),
    Chart(title="Gradient norm", lines={"trainer/grad_norm": "before clipping"}),
    Chart(title="Learning rate", lines={"trainer/lr": "learning rate"}),
    Chart(
        title="Rollout correction: touched", unit="fraction",
        lines={
            "trainer/correction_truncated_frac": "truncated", "trainer/correction_masked_frac": "masked",
            "trainer/correction_rejected_seq_frac": "rejected sequences",
        },
    ),
    Chart(
        title="Rollout correction: effective samples", lines={"trainer/correction_ess": "ESS"}, unit="fraction",
        note="1 = every token counts the same.",
    ),
    Chart(title="Where the time of a step goes", kind="stack", lines={**TIME_PARTS, "other_s": "other"}, unit="s"),
    Chart(
        title="Tokens per second", lines={"engine/tokens_per_s": "rollout", "trainer/tokens_per_s": "training"},
        unit="tokens/s",
    ),
    Chart(title="Swap: time", lines={"sync/swap_s": "whole swap", "sync/quantize_s": "of it quantizing"}, unit="s"),
    Chart(title="Swap: size", lines={"swap_mb": "shipped"}, unit="MB"),
    Chart(title="Swap: throughput", lines={"swap_gb_per_s": "bytes / swap time"}, unit="GB/s"),
    Chart(
        title="Memory by phase", unit="MB",
        lines={"memory/rollout_mb": "rollout", "memory/train_mb": "train", "memory/sync_mb": "swap"},
        note="Of a rank and its engine, most of any rank.",
    ),
    Chart(
        title="Groups without signal", unit="fraction",
        lines={"engine/groups_degenerate_frac": "all rewards equal", "engine/groups_dropped_frac": "dropped"},
    ),
    Chart(
        title="Cut, aborted, failed", unit="fraction",
        lines={
            "engine/finish_length_frac": "cut at the limit", "engine/finish_abort_frac": "aborted",
            "engine/reward_failed_frac": "reward failed", "engine/reward_timeout_frac": "reward timed out",
        },
    ),
)  # fmt: skip


def finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def column(rows: Sequence[Row], name: str) -> list[float]:
    """The finite values of a metric, in step order."""
    return [row[name] for row in rows if finite(row.get(name))]


def with_derived(row: Row) -> Row:
    """The row with what only the report needs: the rest of the step time, megabytes and GB/s of the swap.

    `time/rollout_s` loses `time/reward_s`, which lies inside it: the parts of the step then add up.
    """
    extra: Row = {}
    if finite(row.get("time/rollout_s")) and finite(row.get("time/reward_s")):
        row = row | {"time/rollout_s": max(row["time/rollout_s"] - row["time/reward_s"], 0.0)}
    if finite(row.get("time/step_s")):
        parts = sum(row[name] for name in TIME_PARTS if finite(row.get(name)))
        extra["other_s"] = max(row["time/step_s"] - parts, 0.0)
    if finite(row.get("sync/bytes")):
        extra["swap_mb"] = row["sync/bytes"] / 1e6
        if finite(row.get("sync/swap_s")) and row["sync/swap_s"] > 0:
            extra["swap_gb_per_s"] = row["sync/bytes"] / 1e9 / row["sync/swap_s"]
    return row | extra


def series(rows: Sequence[Row], name: str) -> dict[str, list[Any]] | None:
    """x (steps) and y of one line, at most `MAX_POINTS` of them; None where no value is finite.

    Longer lines show the mean of equal runs of steps, names ending in "_max" the largest. A value that was not finite
    is a gap (None); a step without the metric is no point at all, so that sparse evaluations stay connected.
    """
    points = [(row["step"], row[name]) for row in rows if name in row]
    if not any(finite(value) for _, value in points):
        return None
    reduce = max if name.endswith("_max") else statistics.fmean
    stride = -(-len(points) // MAX_POINTS)
    x: list[Any] = []
    y: list[Any] = []
    for first in range(0, len(points), stride):
        values = [value for _, value in points[first : first + stride] if finite(value)]
        x.append(points[first][0])
        y.append(float(f"{reduce(values):.5g}") if values else None)
    return {"x": x, "y": y}


def moving_average(y: Sequence[float | None], weight: float) -> list[float | None]:
    """Exponential moving average without the bias towards the first value; gaps stay gaps."""
    smoothed: list[float | None] = []
    total = mass = 0.0
    for value in y:
        if value is not None:
            total, mass = weight * total + value, weight * mass + 1.0
        smoothed.append(None if value is None else float(f"{total / mass:.5g}"))
    return smoothed


def draw(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Every chart that has data, as plain data for the page."""
    rows = [with_derived(row) for row in rows]
    # A part that a step did not have took no time in it: 0, where other charts have no point.
    stacked = [dict.fromkeys(TIME_PARTS, 0.0) | row for row in rows]
    drawn: list[dict[str, Any]] = []
    for chart in CHARTS:
        traces = []
        for name, label in chart.lines.items():
            line = series(stacked if chart.kind == "stack" else rows, name)
            if line is None or (chart.kind == "stack" and not any(line["y"])):
                continue  # no data; or a part of the step that never took time
            trace = {"name": label, **line}
            if chart.smooth and len(line["x"]) >= 10:
                # Over a tenth of a short run: a longer average would lag behind its whole rise.
                trace["smooth"] = moving_average(line["y"], 1 - 1 / max(2.0, min(10.0, len(line["y"]) / 10)))
            traces.append(trace)
        if traces:
            drawn.append({**msgspec.to_builtins(chart), "traces": traces})
    return drawn
