"""The files of a run: config, metrics, samples and events under runs/NAME/, TensorBoard, and the report made of them.

    config.yaml     the resolved config, secrets redacted
    metrics.jsonl   one object per step: {"step": 3, "time": 1764424805.2, "engine/reward_mean": 0.61, …}
    samples.jsonl   one object per sample: step, prompt, completion, reward, …
    probes.jsonl    one object per probe of the mismatch, see records/attribution.py
    events.jsonl    what happened between steps: {"time", "step", "kind": "engine restarted", "text"}
    tb/             TensorBoard
    report.html     one offline page, written by records/report.py from the files above

`time` is Unix seconds; null is a value that was not finite. Only rank 0 records; on other ranks the same object does
nothing, so the loop has no branch.
"""

import importlib
import importlib.util
import math
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any, Self

import msgspec
import yaml

from records.lines import LineFile, read_lines, records_error
from records.metrics import check_names
from records.redact import redact
from records.report import write_report
from sync.fields import doc


class RecordsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a run writes beside its metrics."""

    samples_per_step: Annotated[int, doc("Samples saved per step as text.", unit="samples", ge=0)] = 8
    report_every: Annotated[
        int, doc("Write report.html every so many steps; 0 = only at the end.", unit="steps", ge=0)
    ] = 0
    tensorboard: Annotated[bool, doc("Write TensorBoard files to tb/.")] = True
    wandb: Annotated[bool, doc("Also log to Weights & Biases (needs the package wandb).")] = False
    wandb_project: Annotated[str, doc("Weights & Biases project.", min_length=1)] = "hotswap-rl"

    def __post_init__(self) -> None:
        if self.wandb and importlib.util.find_spec("wandb") is None:
            raise ValueError("wandb: true needs the package wandb, which is not installed (pip install wandb)")


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One response as text, with what the trainer saw of it."""

    prompt: str
    completion: str
    reward: float
    group: int  # samples of one prompt share a group
    length: int  # sampled tokens
    finish: str  # one of sync.batch.FINISH_REASONS
    version: int  # weight version that sampled it


class RunLog:
    """Writes the records of one run; a context manager that writes the report when it ends, also after an error.

    `resolved` is the whole config as plain data. `resume_step` None starts a new run and raises ValueError where the
    directory already holds one; a number continues it, dropping what was recorded of that step and later, so that no
    step counts twice; infinity adds to it and drops nothing. Raises OSError with the path for an unwritable directory
    or a full disk.
    """

    def __init__(
        self,
        run_dir: Path,
        config: RecordsConfig,
        resolved: Mapping[str, Any],
        *,
        resume_step: float | None = None,
        active: bool = True,
    ):
        self.run_dir = run_dir
        self.config = config
        self.active = active
        self._last_step: int | None = None
        self._tensorboard: Any = None
        self._wandb: Any = None
        if not active:
            return
        if resume_step is None and any(True for _ in read_lines(run_dir / "metrics.jsonl")):
            raise ValueError(f"{run_dir} already holds a run: resume it, or choose another run directory")
        plain = redact(msgspec.to_builtins(dict(resolved)))
        path = run_dir / "config.yaml"
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
            path.write_text(yaml.safe_dump(plain, sort_keys=False, allow_unicode=True), encoding="utf-8")
        except OSError as error:
            raise records_error(path, error) from error
        self._open(resume_step or 0, plain)
        if resume_step is not None and resume_step < math.inf:
            self.event("resumed", f"at step {resume_step}; {self._metrics.dropped} later steps were dropped")

    def _open(self, start: float, plain: dict[str, Any]) -> None:
        def before(record: dict[str, Any]) -> bool:
            return record["step"] < start

        self._metrics = LineFile(self.run_dir / "metrics.jsonl", before)
        self._samples = LineFile(self.run_dir / "samples.jsonl", before)
        self._probes = LineFile(self.run_dir / "probes.jsonl", before)
        self._events = LineFile(self.run_dir / "events.jsonl", lambda record: True)
        if self.config.tensorboard:
            from torch.utils.tensorboard import SummaryWriter  # seconds to import: only where it is asked for

            try:
                self._tensorboard = SummaryWriter(
                    str(self.run_dir / "tb"), purge_step=int(start) if start < math.inf else None
                )
            except OSError as error:
                raise records_error(self.run_dir / "tb", error) from error
        if self.config.wandb:
            self._wandb = importlib.import_module("wandb").init(
                project=self.config.wandb_project, name=self.run_dir.name, dir=str(self.run_dir), config=plain
            )

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Records one step, once. Raises ValueError for a name that is not in records/metrics.py."""
        check_names(metrics)
        if not self.active:
            return
        assert self._last_step is None or step > self._last_step, f"step {step} after step {self._last_step}"
        values = {name: float(value) for name, value in metrics.items()}
        self._metrics.append({"step": step, "time": time.time(), **values})
        self._last_step = step
        if self._tensorboard is not None:
            for name, value in values.items():
                self._tensorboard.add_scalar(name, value, step)
        if self._wandb is not None:
            self._wandb.log(values, step=step)
        if self.config.report_every and (step + 1) % self.config.report_every == 0:
            write_report(self.run_dir)

    def choose(self, n_samples: int) -> list[int]:
        """Which of `n_samples` to decode and hand to `write_samples`: at most `samples_per_step`, evenly spread."""
        count = min(n_samples, self.config.samples_per_step) if self.active else 0
        return [index * n_samples // count for index in range(count)]

    def write_samples(self, step: int, samples: Iterable[Sample]) -> None:
        """Records the given samples of a step. Lone surrogates in the text become "?"."""
        if not self.active:
            return
        for sample in samples:
            record = {"step": step, **msgspec.structs.asdict(sample)}
            for name in ("prompt", "completion"):
                record[name] = record[name].encode("utf-8", "replace").decode()
            self._samples.append(record)

    def write_probe(self, step: int, probe: Mapping[str, Any]) -> None:
        """Records what a probe found, plain data as in records/attribution.py."""
        if self.active:
            self._probes.append({**probe, "step": step, "time": time.time()})

    def event(self, kind: str, text: str) -> None:
        """Records something that happened between steps: an engine restart, a swap sent again."""
        if self.active:
            self._events.append({"time": time.time(), "step": self._last_step, "kind": kind, "text": text})

    def close(self) -> None:
        """Closes every file and writes the report. Closing twice does nothing."""
        if not self.active:
            return
        self.active = False
        for file in (self._metrics, self._samples, self._probes, self._events):
            file.close()
        if self._tensorboard is not None:
            self._tensorboard.close()
        if self._wandb is not None:
            self._wandb.finish()
        write_report(self.run_dir)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.event("stopped", f"{type(error).__name__}: {error}"[:500])
        self.close()
