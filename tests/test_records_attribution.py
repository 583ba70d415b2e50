"""A probe as people read it: the table, the record of it, what the page shows of it."""

import io
import json
import math

from records.attribution import HEADS, attribution_section, table, title
from records.console import RunConsole
from records.log import RecordsConfig, RunLog
from records.report import collect, write_report

PROBE = {
    "step": 3,
    "arms": [
        {"label": "as trained", "kl": 6e-4, "low": 2e-4, "high": 1.2e-3},
        {"label": "all matched", "kl": 1e-8, "low": 0.0, "high": 3e-8},
    ],
    "sources": [
        {"name": "weights", "label": "weights not in FP8", "kl": -3e-3, "low": -4e-3, "high": 7e-3, "open": True},
    ],
    "absent": {"kv": "fp8.kv_cache = off [none]"},
    "groups": 32,
    "tokens": 3184,
    "confidence": 0.95,
}  # fmt: skip
QUIET = RecordsConfig(tensorboard=False)


def test_the_table_has_arms_sources_and_what_is_absent():
    assert table(PROBE) == [
        ("as trained", "6.00e-04", "2.00e-04 … 1.20e-03", ""),
        ("all matched", "1.00e-08", "0.00e+00 … 3.00e-08", ""),
        ("+ weights not in FP8", "-3.00e-03", "-4.00e-03 … 7.00e-03", "open"),
        ("+ kv", "–", "", "fp8.kv_cache = off [none]"),
    ]
    assert title(PROBE) == "where the mismatch comes from: step 3, 3,184 tokens of 32 prompts, 95% intervals"


def test_the_console_prints_every_cell(monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    for stream in (io.StringIO(), Terminal()):
        RunConsole(stream).table(title(PROBE), HEADS, table(PROBE))
        text = " ".join(stream.getvalue().split())
        for row in table(PROBE):
            assert all(" ".join(cell.split()) in text for cell in row), row
    plain = io.StringIO()
    RunConsole(plain).table("t", HEADS, table(PROBE))
    columns = {line.index("e-0") for line in plain.getvalue().splitlines() if "e-0" in line}
    assert len(columns) == 1, "numbers stand in a column"
    silent = io.StringIO()
    RunConsole(silent, active=False).table("t", HEADS, table(PROBE))
    assert silent.getvalue() == ""


def test_bars_are_the_values_with_their_intervals():
    assert attribution_section([]) is None
    section = attribution_section([PROBE | {"step": 1, "sources": []}, PROBE])
    assert section is not None and "step 3" in section["title"]
    kinds = {bar["label"]: (bar["kl"] - bar["down"], bar["kl"] + bar["up"], bar["kind"]) for bar in section["bars"]}
    assert kinds["weights not in FP8"] == (-4e-3, 7e-3, "source")
    assert kinds["as trained"][2] == "arm" and math.isclose(kinds["as trained"][1], 1.2e-3)


def test_probes_are_recorded_resumed_and_shown(tmp_path):
    with RunLog(tmp_path, QUIET, {"name": "x"}) as log:
        for step in (0, 3):
            log.write(step, {"time/step_s": 1.0})
            log.write_probe(step, PROBE | {"step": step})
    with RunLog(tmp_path, QUIET, {"name": "x"}, resume_step=math.inf) as log:
        log.write_probe(4, PROBE | {"step": 4})
    steps = [json.loads(line)["step"] for line in (tmp_path / "probes.jsonl").read_text().splitlines()]
    assert steps == [0, 3, 4] and len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2
    assert collect(tmp_path)["attribution"]["title"] == title(PROBE | {"step": 4})
    assert "weights not in FP8" in write_report(tmp_path).read_text()
    assert "resumed" not in (tmp_path / "events.jsonl").read_text()
    with RunLog(tmp_path, QUIET, {"name": "x"}, resume_step=3) as log:
        pass
    assert len((tmp_path / "probes.jsonl").read_text().splitlines()) == 1
