"""The log's promises: one object per step, nothing counted twice after a crash, clear errors, no secrets on disk."""

import errno
import json
import math
import os
import re
import sys
import types
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import yaml

from records.lines import LineFile, count_lines, read_lines
from records.log import RecordsConfig, RunLog, Sample
from records.metrics import METRICS, check_names, markdown
from records.redact import REDACTED, redact

QUIET = RecordsConfig(tensorboard=False)


def sample(text: str = "4", **changes: Any) -> Sample:
    plain = {
        "prompt": "2+2=",
        "completion": text,
        "reward": 1.0,
        "group": 0,
        "length": 1,
        "finish": "stop",
        "version": 3,
    }
    return Sample(**{**plain, **changes})


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# ---- registry ----


def test_required_names_are_registered() -> None:
    needed = [
        "engine/reward_mean",
        "engine/eval_accuracy",
        "engine/tokens_per_s",
        "trainer/mismatch_k1",
        "trainer/mismatch_k3",
        "trainer/correction_truncated_frac",
        "trainer/clip_frac_pos",
        "trainer/clip_frac_neg",
        "trainer/entropy",
        "trainer/grad_norm",
        "trainer/tokens_per_s",
        "sync/swap_s",
        "sync/bytes",
        "sync/version",
        "time/rollout_s",
        "time/train_s",
        "time/sync_s",
        "time/step_s",
    ]
    check_names(needed)
    with pytest.raises(ValueError, match="engine/rewrad_mean"):
        check_names({"engine/rewrad_mean": 1.0, "time/step_s": 1.0})


def test_every_name_in_the_sources_is_registered() -> None:
    root = Path(__file__).parent.parent
    sources = [
        *(path for room in ("engine", "trainer", "sync") for path in (root / room).rglob("*.py")),
        root / "launch.py",
    ]
    text = "".join(path.read_text() for path in sources if path.exists())
    names = set(re.findall(r'"((?:engine|trainer|sync|time)/[a-z0-9_]+)"', text))
    # Means of squares only travel between ranks; they become a deviation or an effective sample size.
    check_names({name for name in names if not name.endswith("_square")})


def test_every_metric_is_explained() -> None:
    for name, metric in METRICS.items():
        assert name.split("/")[0] in ("engine", "trainer", "sync", "memory", "time"), name
        assert metric.meaning.endswith(".") and metric.group, name
        assert not name.endswith("_s") or "_per_" in name or metric.unit == "s", name
        assert name.endswith("_frac") <= (metric.unit == "frac"), name
    with pytest.raises(TypeError):
        METRICS["engine/new"] = METRICS["time/step_s"]  # type: ignore[index]


def test_markdown_table_is_whole() -> None:
    rows = markdown().splitlines()
    assert len(rows) == len(METRICS) + 2
    assert all(row.replace("\\|", "").count("|") == 5 for row in rows)


# ---- lines ----


def test_torn_last_line_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 0}\n{"step": 1}\n{"step": 2, "engi')
    assert [record["step"] for record in read_lines(path)] == [0, 1]
    assert count_lines(path) == 2
    file = LineFile(path, lambda record: True)
    file.append({"step": 2})
    file.close()
    assert [record["step"] for record in lines(path)] == [0, 1, 2] and file.dropped == 0
    assert not list(tmp_path.glob("*.tmp"))


def test_broken_line_in_the_middle_is_named(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 0}\n{"st\n{"step": 2}\n')
    with pytest.raises(ValueError, match=r"m\.jsonl, line 2"):
        list(read_lines(path))


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_full_disk_names_the_file(tmp_path: Path) -> None:
    os.symlink("/dev/full", tmp_path / "m.jsonl")
    file = LineFile(tmp_path / "m.jsonl")
    with pytest.raises(OSError, match="cannot write the records of the run") as raised:
        file.append({"step": 0})
    assert raised.value.errno == errno.ENOSPC and str(tmp_path / "m.jsonl") in str(raised.value)


# ---- the log ----


def test_a_run(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "demo"
    with RunLog(run, QUIET, {"name": "demo", "model": {"hf_token": "hf_abc"}}) as log:
        metrics: dict[str, Any] = {
            "engine/reward_mean": np.float32(0.5),
            "sync/version": 1,
            "trainer/grad_norm": math.nan,
        }
        log.write(0, metrics)
        assert len(lines(run / "metrics.jsonl")) == 1, "a line must be on disk before the run ends"
        log.write_samples(0, [sample(), sample("\ud800 <b>")])
        log.event("swap retried", "checksum of rank 1 differed")
        log.write(1, {"engine/reward_mean": 0.75, "sync/version": 2})
    first, second = lines(run / "metrics.jsonl")
    assert first.pop("time") <= second["time"]
    assert first == {"step": 0, "engine/reward_mean": 0.5, "sync/version": 1.0, "trainer/grad_norm": None}
    stored = lines(run / "samples.jsonl")
    assert [record["completion"] for record in stored] == ["4", "? <b>"]
    [event] = lines(run / "events.jsonl")
    assert (event["step"], event["kind"]) == (0, "swap retried")
    assert "hf_abc" not in "".join(path.read_text() for path in run.iterdir())
    assert (run / "report.html").exists()


def test_unregistered_metric_is_refused_on_every_rank(tmp_path: Path) -> None:
    for active in (True, False):
        log = RunLog(tmp_path / str(active), QUIET, {}, active=active)
        with pytest.raises(ValueError, match="engine/nonsense"):
            log.write(0, {"engine/nonsense": 1.0})
        log.close()


def test_resume_counts_nothing_twice(tmp_path: Path) -> None:
    with RunLog(tmp_path, QUIET, {}) as log:
        for step in range(5):
            log.write(step, {"time/step_s": float(step)})
            log.write_samples(step, [sample(str(step))])
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "torn')
    with RunLog(tmp_path, QUIET, {}, resume_step=3) as log:
        for step in (3, 4):
            log.write(step, {"time/step_s": 100.0 + step})
            log.write_samples(step, [sample(f"again {step}")])
    assert [(record["step"], record["time/step_s"]) for record in lines(tmp_path / "metrics.jsonl")] == [
        (0, 0.0), (1, 1.0), (2, 2.0), (3, 103.0), (4, 104.0),
    ]  # fmt: skip
    assert [record["completion"] for record in lines(tmp_path / "samples.jsonl")] == [
        "0",
        "1",
        "2",
        "again 3",
        "again 4",
    ]
    assert lines(tmp_path / "events.jsonl")[0]["text"] == "at step 3; 2 later steps were dropped"


def test_new_run_never_overwrites_an_old_one(tmp_path: Path) -> None:
    with RunLog(tmp_path, QUIET, {"seed": 1}) as log:
        log.write(0, {"time/step_s": 1.0})
    with pytest.raises(ValueError, match="already holds a run"):
        RunLog(tmp_path, QUIET, {"seed": 2})
    assert yaml.safe_load((tmp_path / "config.yaml").read_text()) == {"seed": 1}


def test_steps_only_rise(tmp_path: Path) -> None:
    with RunLog(tmp_path, QUIET, {}) as log:
        log.write(1, {})
        with pytest.raises(AssertionError):
            log.write(1, {})


def test_unwritable_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"cannot write the records of the run.*file"):
        RunLog(tmp_path / "file" / "run", QUIET, {})


def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    with RunLog(tmp_path / "run", QUIET, {}, active=False) as log:
        log.write(0, {"time/step_s": 1.0})
        log.write_samples(0, [sample()])
        log.event("x", "y")
        assert log.choose(10) == []
    assert not (tmp_path / "run").exists()


def test_an_error_leaves_event_and_report(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), RunLog(tmp_path, QUIET, {}) as log:
        log.write(0, {"time/step_s": 1.0})
        raise RuntimeError("engine lost")
    assert lines(tmp_path / "events.jsonl")[0]["text"] == "RuntimeError: engine lost"
    assert "engine lost" in (tmp_path / "report.html").read_text()


def test_choose_spreads_over_the_batch(tmp_path: Path) -> None:
    with RunLog(tmp_path, RecordsConfig(tensorboard=False, samples_per_step=4), {}) as log:
        assert log.choose(64) == [0, 16, 32, 48]
        assert log.choose(3) == [0, 1, 2]
        assert log.choose(0) == []


def test_report_every(tmp_path: Path) -> None:
    log = RunLog(tmp_path, RecordsConfig(tensorboard=False, report_every=2), {})
    log.write(0, {"time/step_s": 1.0})
    assert not (tmp_path / "report.html").exists()
    log.write(1, {"time/step_s": 1.0})
    assert (tmp_path / "report.html").exists()
    log.close()
    log.close()


def test_tensorboard_is_read_back(tmp_path: Path) -> None:
    with RunLog(tmp_path, RecordsConfig(), {}) as log:
        log.write(3, {"engine/reward_mean": 0.25})
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tb"))
    events.Reload()
    [scalar] = events.Scalars("engine/reward_mean")
    assert (scalar.step, scalar.value) == (3, 0.25)


def test_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)  # as if it were not installed
    with pytest.raises(msgspec.ValidationError, match="wandb: true needs the package wandb"):
        msgspec.convert({"wandb": True}, RecordsConfig)
    calls: list[Any] = []
    run = types.SimpleNamespace(
        log=lambda *args, **named: calls.append((args, named)), finish=lambda: calls.append("finish")
    )
    fake = types.ModuleType("wandb")
    fake.__spec__ = types.SimpleNamespace(name="wandb")  # type: ignore[assignment]
    monkeypatch.setattr(fake, "init", lambda **named: calls.append(named) or run, raising=False)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    config = RecordsConfig(tensorboard=False, wandb=True)
    with RunLog(tmp_path / "demo", config, {"api_key": "sk-1"}) as log:
        log.write(0, {"time/step_s": 1.0})
    assert calls[0]["name"] == "demo" and calls[0]["config"] == {"api_key": REDACTED}
    assert calls[1:] == [(({"time/step_s": 1.0},), {"step": 0}), "finish"]


# ---- secrets ----


@pytest.mark.parametrize(
    "name",
    [
        "hf_token",
        "token",
        "api_key",
        "APIKEY",
        "wandb-api-key",
        "password",
        "db_passwd",
        "client_secret",
        "credentials",
        "api_keys",
    ],
)
def test_secrets_go(name: str) -> None:
    plain = {"task": [{"args": {name: "s3cret", "other": {name: ["s3cret"]}}}]}
    assert "s3cret" not in str(redact(plain)) and "s3cret" in str(plain)


def test_settings_stay() -> None:
    plain = {
        "max_tokens": 64,
        "stop_tokens": ["</s>"],
        "pad_token": "<pad>",
        "answer_key": "answer",
        "prompt_key": "question",
        "micro_batch_tokens": 4096,
        "num_key_value_heads": 2,
        "token": None,
        "use_token": True,
        "path": "s3://bucket/x",
        "lr": 1e-4,
        "top_key": 3,
    }
    assert redact(plain) == plain
    assert redact({"password": 1234}) == {"password": REDACTED}
    assert redact({"url": "https://me:pw@host/x"}) == {"url": f"https://{REDACTED}@host/x"}
