"""The console: the right figures on one line, and nothing but plain text where the output is no terminal."""

import io
import re

import pytest
from rich.cells import cell_len
from rich.text import Text

from records import console as console_module
from records.console import RunConsole, short, step_parts

METRICS = {
    "engine/reward_mean": 0.61234,
    "engine/eval_accuracy": 0.85,
    "trainer/mismatch_k1": 0.00123,
    "trainer/clip_frac_pos": 0.01,
    "trainer/clip_frac_neg": 0.02,
    "trainer/entropy": 1.21,
    "trainer/grad_norm": 0.42,
    "engine/response_length_mean": 7.25,
    "engine/tokens_per_s": 3120.0,
    "sync/swap_s": 0.085,
    "time/step_s": 1.55,
    "trainer/lr": 1e-4,
}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_plain_output_has_no_control_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    stream = io.StringIO()
    console = RunConsole(stream)
    console.header("demo", {"model": "tiny [moe]", "ranks": 2})
    console.step(7, 200, METRICS)
    console.note("engine restarted [rank 1]", warn=True)
    with console.progress("rollout", 4) as advance:
        advance(4)
    text = stream.getvalue()
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", text)
    assert text.splitlines() == [
        "demo: model tiny [moe], ranks 2",
        "step   7/200  reward  0.612  len   7.2  k1  1.2e-03  entropy    1.210  clip+  0.010  clip-  0.020"
        "  grad  0.420  tok/s 3.12k  swap 0.085s  took 1.550s  eval  0.850",
        "engine restarted [rank 1]",
    ]


def test_missing_metrics_are_left_out() -> None:
    labels = [label for label, _ in step_parts(0, 10, {"time/step_s": 1.0, "trainer/lr": 1.0})]
    assert labels == ["step", "took"]


def test_columns_align_over_steps() -> None:
    def offsets(step: int, metrics: dict[str, float]) -> list[int]:
        line = "  ".join(f"{label} {text}" for label, text in step_parts(step, 200, metrics))
        return [line.index(f" {label} ") for label in ("k1", "entropy", "clip-", "tok/s", "swap")]

    other = METRICS | {
        "engine/reward_mean": -0.2,
        "trainer/mismatch_k1": -3.4e-5,
        "engine/response_length_mean": 112.0,
        "engine/tokens_per_s": 812.0,
        "trainer/grad_norm": float("nan"),
    }
    assert offsets(0, METRICS) == offsets(117, other)


@pytest.mark.parametrize("width", [60, 80, 100, 200])
def test_terminal_line_fits_and_keeps_what_matters(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    stream = Terminal()
    RunConsole(stream).step(7, 200, METRICS)
    [line] = Text.from_ansi(stream.getvalue()).plain.splitlines()
    assert cell_len(line) <= width
    assert "reward" in line and "took" in line and "eval" in line
    assert ("swap" in line) == (width >= 80) and ("grad" in line) == (width == 200)


def test_terminal_header_escapes_markup() -> None:
    stream = Terminal()
    RunConsole(stream).header("demo", {"model": "[red]x[/red]"})
    assert "[red]x[/red]" in Text.from_ansi(stream.getvalue()).plain


def test_plain_progress_reports_long_work(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(console_module.time, "monotonic", lambda: now[0])
    stream = io.StringIO()
    with RunConsole(stream).progress("sft", 100) as advance:
        for _ in range(100):
            now[0] += 0.25
            advance(1)
    assert stream.getvalue().splitlines() == ["sft 40/100", "sft 80/100"]


def test_other_ranks_are_silent() -> None:
    stream = Terminal()
    console = RunConsole(stream, active=False)
    console.header("demo", {})
    console.step(0, 1, METRICS)
    console.note("x")
    with console.progress("x", 1) as advance:
        advance(1)
    assert stream.getvalue() == ""


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.61234, "", " 0.612"),
        (float("nan"), "", "   nan"),
        (1234.0, "", "1.2e+03"),
        (2e-5, "nats", " 2.0e-05"),
        (0.0, "nats", "   0.000"),
        (12.346, "s", "12.35s"),
        (812.0, "tokens/s", "812.0"),
        (52400.0, "tokens/s", "52.4k"),
    ],
)
def test_short(value: float, unit: str, text: str) -> None:
    assert short(value, unit) == text
