"""Builds report.html from the files of a run: one page that opens offline, on any machine, years later.

    python -m records.report runs/NAME

Everything is inside the page: its style, its script, plotly.js (compressed, unpacked by the browser: 2 MB instead of
5) and the data. Samples come from a model and may hold anything, so text reaches the page only as JSON with "<"
escaped, and from there only as text nodes.
"""

import base64
import functools
import gzip
import html
import json
import statistics
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import yaml
from plotly.offline import get_plotlyjs

from records.attribution import attribution_section
from records.charts import Row, column, draw, finite
from records.guard import GuardConfig
from records.lines import count_lines, read_lines, records_error
from records.metrics import METRICS

MAX_SAMPLES = 2000  # rows in the page's table
MAX_SAMPLE_CHARS = 4_000_000  # over all samples: keeps the page below about 8 MB
ROUTINE = ("sft", "started", "resumed", "swap")  # kinds of events that are no reason to worry


def write_report(run_dir: Path) -> Path:
    """Writes run_dir/report.html and returns its path. Raises FileNotFoundError where `run_dir` holds no run.

    A run without a single step, with missing metrics or with values that are not finite still gives a page.
    """
    if not (run_dir / "config.yaml").exists() and not (run_dir / "metrics.jsonl").exists():
        raise FileNotFoundError(f"{run_dir} holds no run: neither config.yaml nor metrics.jsonl is there")
    page = (Path(__file__).parent / "page.html").read_text(encoding="utf-8")
    data = collect(run_dir)
    # "<" is the only character with which text could leave a script element; in JSON it may always be escaped.
    parts = {
        "title": html.escape(data["name"]),
        "data": json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c"),
        "plotly": _plotly(),
    }
    head, *rest = page.split("{{")
    filled = head + "".join(parts[name] + tail for name, tail in (piece.split("}}", 1) for piece in rest))
    path = run_dir / "report.html"
    try:
        unfinished = path.with_suffix(".tmp")  # a reader never meets half a page
        unfinished.write_text(filled, encoding="utf-8", errors="replace")
        unfinished.replace(path)
    except OSError as error:
        raise records_error(path, error) from error
    return path


@functools.cache
def _plotly() -> str:
    return base64.b64encode(gzip.compress(get_plotlyjs().encode(), 6, mtime=0)).decode()


def collect(run_dir: Path) -> dict[str, Any]:
    """Everything the page shows, as plain data without a non-finite number."""
    config_path = run_dir / "config.yaml"
    config_text = config_path.read_text(encoding="utf-8") if config_path.exists() else ""
    config = yaml.safe_load(config_text) or {}
    rows = list(read_lines(run_dir / "metrics.jsonl"))
    samples, note = _samples(run_dir / "samples.jsonl")
    events = list(read_lines(run_dir / "events.jsonl"))
    return {
        "name": str(config.get("name") or run_dir.resolve().name),
        "facts": _facts(config, rows),
        "cards": _cards(rows),
        "health": _health(rows, events, msgspec.convert(config.get("guard", {}), GuardConfig)),
        "charts": draw(rows),
        "attribution": attribution_section(list(read_lines(run_dir / "probes.jsonl"))),
        "table": _table(rows),
        "config": config_text,
        "events": events,
        "samples": samples,
        "samples_note": note,
    }


def _facts(config: dict[str, Any], rows: Sequence[Row]) -> list[str]:
    planned = config.get("steps")
    done = sum("time/step_s" in row for row in rows)  # the last evaluation has a row of its own, and is no step
    facts = [f"{done} of {planned} steps" if planned else _steps(done)]
    for section in ("model", "task"):
        settings = config.get(section)
        words = (
            [value for value in settings.values() if isinstance(value, str) and value]
            if isinstance(settings, dict)
            else []
        )
        if words:
            facts.append(f"{section} {words[0]}")
    if "seed" in config:
        facts.append(f"seed {config['seed']}")
    return facts


def _steps(count: int) -> str:
    return "1 step" if count == 1 else f"{count} steps"


def seconds(value: float) -> str:
    """A duration for people: "85 ms", "2.41 s", "3 min 20 s", "5 h 04 min"."""
    if value < 1:
        return f"{value * 1e3:.3g} ms"
    if value < 60:
        return f"{value:.3g} s"
    minutes, rest = divmod(round(value), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def size(n_bytes: float) -> str:
    """Bytes for people: "56.8 GB"."""
    for unit in ("B", "kB", "MB", "GB"):
        if n_bytes < 1000:
            return f"{n_bytes:.3g} {unit}"
        n_bytes /= 1000
    return f"{n_bytes:.3g} TB"


def _cards(rows: Sequence[Row]) -> list[dict[str, str]]:
    """The figures on top: where the run ended, how far it came, what it cost."""
    cards = []

    def add(label: str, value: str, detail: str = "") -> None:
        cards.append({"label": label, "value": value, "detail": detail})

    if accuracy := column(rows, "engine/eval_accuracy"):
        best = f", best {max(accuracy):.1%}" if max(accuracy) > accuracy[-1] else ""
        change = f"{accuracy[0]:.1%} → {accuracy[-1]:.1%}{best}" if len(accuracy) > 1 else "one evaluation"
        add("Held-out accuracy", f"{accuracy[-1]:.1%}", change)
    if reward := column(rows, "engine/reward_mean"):
        edge = max(1, min(10, len(reward) // 2))  # steps averaged at either end: one step is noise
        first, last = statistics.fmean(reward[:edge]), statistics.fmean(reward[-edge:])
        add("Reward", f"{last:.3f}", f"{first:.3f} → {last:.3f}" if len(reward) > 1 else "one step")
    if steps := column(rows, "time/step_s"):
        total = sum(steps)
        add("Total time", seconds(total), f"in {_steps(len(steps))}")
        add("Median step", seconds(statistics.median(steps)), f"longest {seconds(max(steps))}")
    if swaps := column(rows, "sync/swap_s"):
        shipped = column(rows, "sync/bytes")
        share = f", {sum(swaps) / sum(steps):.1%} of the time" if steps and sum(steps) else ""
        add("Median swap", seconds(statistics.median(swaps)), (size(shipped[-1]) if shipped else "") + share)
    if speed := column(rows, "engine/tokens_per_s"):
        trained = column(rows, "trainer/tokens_per_s")
        detail = f"training {statistics.median(trained):,.0f} tokens/s" if trained else ""
        add("Rollout tokens/s", f"{statistics.median(speed):,.0f}", detail)
    return cards


def _health(rows: Sequence[Row], events: Sequence[Row], guard: GuardConfig) -> list[dict[str, str]]:
    """What a reader should know before trusting the curves; the limits are the run's own."""
    found = []

    def look(level: str, text: str, steps: list[int]) -> None:
        if steps:
            where = f"step {steps[0]}" if len(steps) == 1 else f"{len(steps)} steps, first {steps[0]}, last {steps[-1]}"
            found.append({"level": level, "text": f"{text} ({where})"})

    def above(name: str, limit: float) -> list[int]:
        return [row["step"] for row in rows if finite(row.get(name)) and row[name] > limit]

    broken = {name for row in rows for name, value in row.items() if value is None}
    for name in sorted(broken):
        look("bad", f"{name} was not finite", [row["step"] for row in rows if name in row and row[name] is None])
    k1, error = guard.mismatch_k1.above, guard.mismatch_prob_error.above
    look("bad", f"KL between engine and trainer above {k1:g}", above("trainer/mismatch_k1", k1))
    look("warn", f"probability error above {error:g}", above("trainer/mismatch_prob_error", error))
    look("warn", "rewards failed", above("engine/reward_failed_frac", 0.0))
    look("warn", "rewards timed out", above("engine/reward_timeout_frac", 0.0))
    look("warn", "responses aborted", above("engine/finish_abort_frac", 0.0))
    look("warn", "swap sent again", above("sync/retries", 0.0))
    kinds = Counter(event["kind"] for event in events if event["kind"] not in ROUTINE)
    if kinds:
        text = ", ".join(f"{kind} ×{count}" if count > 1 else kind for kind, count in kinds.items())
        found.append({"level": "warn", "text": f"Events: {text}"})
    if rows and not found:
        found.append({"level": "good", "text": "Every logged value is finite and within its limits"})
    return found


def _table(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Every metric the run logged, in registry order; names of other versions come last."""
    logged = {name for row in rows for name in row if "/" in name}
    table = []
    for name in [*(name for name in METRICS if name in logged), *sorted(logged - METRICS.keys())]:
        known = METRICS.get(name)
        values = column(rows, name)
        latest = next(row[name] for row in reversed(rows) if name in row)
        table.append(
            {
                "group": known.group if known else "Other", "name": name, "unit": known.unit if known else "",
                "meaning": known.meaning if known else "Not in the registry of this version.",
                "last": latest if finite(latest) else None, "first": values[0] if values else None,
                "low": min(values, default=None), "high": max(values, default=None),
            }
        )  # fmt: skip
    return table


def _samples(path: Path) -> tuple[list[Row], str]:
    """Samples for the page and a note on what was left out: the newest quarter whole, the rest evenly thinned."""
    count = count_lines(path)
    if count <= MAX_SAMPLES:
        chosen, note = None, ""
    else:
        recent = count - MAX_SAMPLES // 4
        older = MAX_SAMPLES - MAX_SAMPLES // 4
        chosen = {index * recent // older for index in range(older)} | set(range(recent, count))
        note = f"{len(chosen):,} of {count:,} samples are in this page; all are in samples.jsonl."
    samples = list(read_lines(path, lambda index: chosen is None or index in chosen))
    room = max(200, MAX_SAMPLE_CHARS // max(1, 2 * len(samples)))
    cut = 0
    for sample in samples:
        for name in ("prompt", "completion"):
            if len(sample.get(name) or "") > room:
                sample[name] = f"{sample[name][: room // 2]} […] {sample[name][-room // 2 :]}"
                cut += 1
    if cut:
        note += f" Long texts ({cut:,}) lost their middle."
    return samples, note.strip()


def main() -> None:
    if len(sys.argv) != 2:
        raise SystemExit("usage: python -m records.report RUN_DIR")
    try:
        print(write_report(Path(sys.argv[1])))
    except (OSError, ValueError) as error:
        raise SystemExit(str(error)) from error


if __name__ == "__main__":
    main()
