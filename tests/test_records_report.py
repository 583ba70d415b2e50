"""The report is built from files alone: whatever is missing, broken, huge or hostile in them, the page must hold."""

import base64
import gzip
import json
import math
import re
import sys
import time
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from records import report
from records.charts import CHARTS, MAX_POINTS, TIME_PARTS, moving_average, series, with_derived
from records.metrics import METRICS
from records.report import collect, seconds, size, write_report

HOSTILE = '</script><script>alert("x")</script><img src=x onerror=alert(1)> &amp; {{data}} \u2028 ende'


def fake_run(run_dir: Path, steps: int = 60, samples_per_step: int = 8, broken: bool = False) -> Path:
    """A run that learns to sort digits, as the log would have written it. Deterministic."""

    def noise(step: int, salt: float) -> float:
        return (math.sin(step * 12.9898 + salt * 78.233) * 43758.5453) % 1 - 0.5

    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "config.yaml").write_text(
        f"name: demo\nseed: 1\nsteps: {max(steps, 1)}\nmodel:\n  preset: tiny-qwen3-moe\ntask:\n  name: arithmetic\n"
    )
    with (run_dir / "metrics.jsonl").open("w") as metrics, (run_dir / "samples.jsonl").open("w") as samples:
        for step in range(steps):
            done = 1 - math.exp(-2.5 * step / max(steps - 1, 1))
            row: dict[str, Any] = {"step": step, "time": 1.764e9 + 2 * step}
            row |= {
                "engine/reward_mean": 0.55 + 0.4 * done + 0.06 * noise(step, 1),
                "engine/reward_std": 0.4 - 0.2 * done,
                "engine/tokens_per_s": 3100 + 300 * noise(step, 2),
                "trainer/tokens_per_s": 9100 + 500 * noise(step, 3),
                "engine/response_length_mean": 7 + noise(step, 4),
                "engine/response_length_max": 12.0,
                "engine/finish_length_frac": 0.02 * (1 - done),
                "engine/groups_degenerate_frac": 0.1 + 0.5 * done,
                "trainer/mismatch_k1": 0.002 * math.exp(noise(step, 5)),
                "trainer/mismatch_k3": 0.0012 * math.exp(noise(step, 6)),
                "trainer/mismatch_prob_error": 1.012 + 0.004 * noise(step, 7),
                "trainer/mismatch_outside_frac": 0.001,
                "trainer/correction_truncated_frac": 0.0005,
                "trainer/correction_ess": 0.98 + 0.01 * noise(step, 8),
                "trainer/clip_frac_pos": 0.01 + 0.006 * noise(step, 9),
                "trainer/clip_frac_neg": 0.02 + 0.01 * noise(step, 10),
                "trainer/entropy": 1.2 - 0.7 * done + 0.05 * noise(step, 11),
                "trainer/grad_norm": 0.6 * math.exp(noise(step, 12)),
                "trainer/lr": 1e-4 * min(1.0, (step + 1) / 10),
                "trainer/loss": 0.01 * noise(step, 13),
                "sync/swap_s": 0.085 + 0.01 * noise(step, 14),
                "sync/quantize_s": 0.02,
                "sync/bytes": 1.9e6,
                "sync/version": step + 1,
                "time/rollout_s": 0.8 + 0.1 * noise(step, 15),
                "time/reward_s": 0.02,
                "time/train_s": 0.45,
                "time/sync_s": 0.11,
                "time/step_s": 1.55 + 0.2 * noise(step, 16),
            }
            if step % 10 == 0 or step == steps - 1:
                row |= {"engine/eval_accuracy": 0.55 + 0.38 * done, "time/eval_s": 0.1}
            if broken and step == steps // 2:
                row |= {"trainer/grad_norm": None, "trainer/mismatch_k1": 1.7}
            metrics.write(json.dumps(row) + "\n")
            for index in range(samples_per_step):
                sample = {
                    "step": step,
                    "prompt": f"sort {index}{step % 10}4 2",
                    "completion": f"2 4 {index} {step % 10}",
                    "reward": float(noise(step, index) < 0.4 * done),
                    "group": index // 4,
                    "length": 7 + index % 3,
                    "finish": "stop",
                    "version": step,
                }
                samples.write(json.dumps(sample) + "\n")
    return run_dir


class Page(HTMLParser):
    """What a browser makes of the report: elements with their attributes, and the text of scripts by id."""

    def __init__(self, path: Path):
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: dict[str, str] = {}
        self._script: str | None = None
        self.text = path.read_text(encoding="utf-8")
        self.feed(self.text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._script = (dict(attrs).get("id") or "main") if tag == "script" else None

    def handle_data(self, data: str) -> None:
        if self._script:
            self.scripts[self._script] = self.scripts.get(self._script, "") + data

    def handle_endtag(self, tag: str) -> None:
        self._script = None


def test_page_loads_nothing_and_holds_the_data(tmp_path: Path) -> None:
    page = Page(write_report(fake_run(tmp_path / "demo")))
    for tag, attributes in page.elements:
        for name in ("src", "href", "action", "data", "srcset"):
            value = attributes.get(name) or ""
            assert value.startswith("#") or value in ("", "data:,"), (tag, name, value)
    assert not re.search(r"https?://|@import|url\(", re.sub(r'<script type="text/plain".*?</script>', "", page.text))
    assert "default-src 'none'" in page.text
    assert b"plotly.js" in gzip.decompress(base64.b64decode(page.scripts["plotly"]))[:200]
    data = json.loads(page.scripts["data"])
    assert [card["label"] for card in data["cards"]][:4] == ["Held-out accuracy", "Reward", "Total time", "Median step"]
    assert len(page.text) < 4_000_000


def test_hostile_text_stays_text(tmp_path: Path) -> None:
    run = fake_run(tmp_path / "demo", steps=2, samples_per_step=0)
    sample = {
        "step": 0,
        "prompt": HOSTILE,
        "completion": HOSTILE,
        "reward": 1.0,
        "group": 0,
        "length": 1,
        "finish": "stop",
    }
    (run / "samples.jsonl").write_text(json.dumps(sample) + "\n")
    (run / "config.yaml").write_text(json.dumps({"name": HOSTILE, "task": {"name": HOSTILE}}))
    (run / "events.jsonl").write_text(json.dumps({"time": 0, "step": 0, "kind": HOSTILE, "text": HOSTILE}) + "\n")
    page = Page(write_report(run))
    assert [tag for tag, _ in page.elements].count("script") == 3
    assert "img" not in [tag for tag, _ in page.elements]
    assert not any(name.startswith("on") for _, attributes in page.elements for name in attributes)
    data = json.loads(page.scripts["data"])
    assert data["samples"][0]["completion"] == HOSTILE and data["name"] == HOSTILE
    # The script must never build markup from data: no sink of HTML in it.
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(", page.scripts["main"])


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_short_runs(tmp_path: Path, steps: int) -> None:
    run = fake_run(tmp_path / "demo", steps=steps)
    data = json.loads(Page(write_report(run)).scripts["data"])
    assert bool(data["charts"]) == bool(data["cards"]) == bool(data["table"]) == (steps > 0)


def test_missing_files(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="holds no run"):
        write_report(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "time": 1.0, "time/step_s": 0.5}\n{"step": 1, "ti')
    data = collect(tmp_path)
    assert data["facts"] == ["1 step"] and [row["name"] for row in data["table"]] == ["time/step_s"]


def test_the_last_evaluation_is_no_step(tmp_path: Path) -> None:
    run = fake_run(tmp_path / "demo", steps=60)
    with (run / "metrics.jsonl").open("a") as metrics:
        metrics.write(json.dumps({"step": 60, "time": 1.8e9, "engine/eval_accuracy": 0.9, "time/eval_s": 0.1}) + "\n")
    assert collect(run)["facts"][0] == "60 of 60 steps"


def test_routine_events_are_no_warning(tmp_path: Path) -> None:
    run = fake_run(tmp_path / "demo", steps=3)
    events = [
        {"time": 0, "step": 0, "kind": kind, "text": "x"} for kind in ("sft", "resumed", "swap", "engine", "engine")
    ]
    (run / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events[:3]))
    assert [item["level"] for item in collect(run)["health"]] == ["good"]
    (run / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    assert collect(run)["health"] == [{"level": "warn", "text": "Events: engine ×2"}]
    assert len(collect(run)["events"]) == 5


def test_health_is_judged_by_the_limits_of_the_run(tmp_path: Path) -> None:
    run = fake_run(tmp_path / "demo", steps=3)
    with (run / "config.yaml").open("a") as config:
        config.write("guard: {mismatch_k1: {above: 1.0e-9, action: warn}}\n")
    assert [item["text"] for item in collect(run)["health"]] == [
        "KL between engine and trainer above 1e-09 (3 steps, first 0, last 2)"
    ]


def test_not_finite_is_reported(tmp_path: Path) -> None:
    data = json.loads(Page(write_report(fake_run(tmp_path / "demo", broken=True))).scripts["data"])
    texts = [item["text"] for item in data["health"]]
    assert texts == ["trainer/grad_norm was not finite (step 30)", "KL between engine and trainer above 1 (step 30)"]
    [chart] = [chart for chart in data["charts"] if chart["title"] == "Gradient norm"]
    assert chart["traces"][0]["y"][30] is None and chart["traces"][0]["x"][30] == 30


def test_long_run_stays_small(tmp_path: Path) -> None:
    run = fake_run(tmp_path / "demo", steps=5000, samples_per_step=2)
    began = time.perf_counter()
    page = Page(write_report(run))
    assert time.perf_counter() - began < 5.0
    assert len(page.text) < 5_000_000
    data = json.loads(page.scripts["data"])
    assert all(len(trace["x"]) <= MAX_POINTS for chart in data["charts"] for trace in chart["traces"])
    assert len(data["samples"]) <= report.MAX_SAMPLES and "of 10,000 samples" in data["samples_note"]
    shown = [sample["step"] for sample in data["samples"]]
    assert shown[0] == 0 and shown[-500:] == [step for step in range(4750, 5000) for _ in range(2)]


def test_long_texts_lose_their_middle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = fake_run(tmp_path / "demo", steps=1, samples_per_step=0)
    sample = {"step": 0, "prompt": "p", "completion": "a" + "b" * 5000 + "c", "reward": 1.0}
    (run / "samples.jsonl").write_text(json.dumps(sample) + "\n")
    monkeypatch.setattr(report, "MAX_SAMPLE_CHARS", 2000)
    data = collect(run)
    text = data["samples"][0]["completion"]
    assert text[0] == "a" and text[-1] == "c" and len(text) < 1100 and "(1) lost their middle" in data["samples_note"]


def test_series_means_gaps_and_sparse_points() -> None:
    rows = [{"step": step, "m": float(step), "m_max": float(step % 7)} for step in range(2 * MAX_POINTS)]
    line = series(rows, "m")
    assert line and line["x"][:2] == [0, 2] and line["y"][:2] == [0.5, 2.5] and len(line["x"]) == MAX_POINTS
    peak = series(rows, "m_max")
    assert peak and peak["y"][3] == 6.0
    sparse = series([{"step": 0, "e": 0.5}, {"step": 1}, {"step": 2, "e": None}, {"step": 3, "e": 0.7}], "e")
    assert sparse == {"x": [0, 2, 3], "y": [0.5, None, 0.7]}
    assert series([{"step": 0, "e": None}], "e") is None


def test_moving_average_against_direct_sum() -> None:
    y = [1.0, 5.0, None, 2.0]
    kept = [1.0, 5.0, 2.0]
    direct = [
        sum(0.9 ** (n - i) * kept[i] for i in range(n + 1)) / sum(0.9 ** (n - i) for i in range(n + 1))
        for n in range(3)
    ]
    smooth = moving_average(y, 0.9)
    assert smooth[2] is None and [smooth[0], smooth[1], smooth[3]] == pytest.approx(direct, rel=1e-4)


def test_derived_figures() -> None:
    row = with_derived(
        {"time/step_s": 10.0, "time/train_s": 4.0, "time/rollout_s": 5.0, "sync/bytes": 3e9, "sync/swap_s": 1.5}
    )
    assert row["other_s"] == pytest.approx(1.0) and row["swap_gb_per_s"] == pytest.approx(2.0)
    assert "swap_gb_per_s" not in with_derived({"sync/bytes": 3e9, "sync/swap_s": 0.0})


def test_the_parts_of_a_step_count_rewards_once() -> None:
    row = with_derived({"time/step_s": 10.0, "time/train_s": 4.0, "time/rollout_s": 5.0, "time/reward_s": 2.0})
    assert row["time/rollout_s"] == pytest.approx(3.0) and row["other_s"] == pytest.approx(1.0)
    assert with_derived({"time/rollout_s": 1.0, "time/reward_s": 1.5})["time/rollout_s"] == 0.0


def test_charts_name_only_registered_metrics() -> None:
    names = {name for chart in CHARTS for name in chart.lines if "/" in name}
    assert names <= METRICS.keys()
    assert set(TIME_PARTS) == {name for name in METRICS if name.startswith("time/")} - {"time/step_s"}


def test_figures_for_people() -> None:
    assert [seconds(value) for value in (0.0853, 2.413, 200, 18240)] == [
        "85.3 ms",
        "2.41 s",
        "3 min 20 s",
        "5 h 04 min",
    ]
    assert [size(value) for value in (12, 1.9e6, 56.8e9)] == ["12 B", "1.9 MB", "56.8 GB"]


def test_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run = fake_run(tmp_path / "demo", steps=1)
    monkeypatch.setattr(sys, "argv", ["records.report", str(run)])
    report.main()
    assert Path(capsys.readouterr().out.strip()) == run / "report.html"
    monkeypatch.setattr(sys, "argv", ["records.report", str(tmp_path / "nowhere")])
    with pytest.raises(SystemExit, match="holds no run"):
        report.main()
