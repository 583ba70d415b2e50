"""What a person sees while a run goes: a header, one line per step, a bar for long work.

On a terminal through rich; where the output is a file or a pipe, the same as plain lines without a control code. Which
metrics stand on the step line, and under which label, is decided in records/metrics.py.
"""

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TextIO

from rich.console import Console
from rich.markup import escape
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from records.metrics import METRICS

PLAIN_EVERY_S = 10.0  # without a terminal, long work reports at most this often
# Left out first where the terminal is too narrow for the whole line.
_LEAST_NEEDED = ("trainer/grad_norm", "trainer/entropy", "engine/response_length_mean", "trainer/clip_frac_pos",
                 "trainer/clip_frac_neg", "engine/tokens_per_s", "trainer/mismatch_k1", "sync/swap_s")  # fmt: skip


class RunConsole:
    """Writes to `stream` (stdout by default) on rank 0; everywhere else (`active=False`) it does nothing."""

    def __init__(self, stream: TextIO | None = None, *, active: bool = True):
        self.active = active
        self._stream = stream if stream is not None else sys.stdout
        self.is_terminal = self._stream.isatty()
        self._rich = Console(file=self._stream, highlight=False)

    def header(self, title: str, facts: Mapping[str, object]) -> None:
        """The run's name and what it consists of (model, task, ranks, engine, …), once at the start."""
        if not self.active:
            return
        if not self.is_terminal:
            self._plain(f"{title}: " + ", ".join(f"{name} {value}" for name, value in facts.items()))
            return
        table = Table.grid(padding=(0, 2))
        for name, value in facts.items():
            table.add_row(f"[dim]{escape(name)}[/]", escape(str(value)))
        self._rich.print(Panel(table, title=f"[bold]{escape(title)}[/]", title_align="left", expand=False))

    def step(self, step: int, steps: int, metrics: Mapping[str, float]) -> None:
        """One line for a finished step; `step` counts from 0 and is shown as it is recorded."""
        if not self.active:
            return
        width = self._rich.width if self.is_terminal else None
        parts = step_parts(step, steps, metrics, width)
        if not self.is_terminal:
            self._plain("  ".join(f"{label} {text}".strip() for label, text in parts))
            return
        styled = (
            f"[dim]{label}[/] {text}" if label != "eval" else f"[bold green]{label} {text}[/]" for label, text in parts
        )
        self._rich.print("  ".join(styled), soft_wrap=True)

    def note(self, text: str, *, warn: bool = False) -> None:
        """A line that is no step: where the run is written, an engine that was restarted."""
        if not self.active:
            return
        if self.is_terminal:
            self._rich.print(f"[yellow]{escape(text)}[/]" if warn else escape(text), soft_wrap=True)
        else:
            self._plain(text)

    def table(self, title: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """A small table, its second column numbers."""
        if not self.active:
            return
        if not self.is_terminal:
            widths = [max(len(row[i]) for row in (heads, *rows)) for i in range(len(heads))]
            self._plain(title)
            for row in (heads, *rows):
                cells = (text.rjust(w) if i == 1 else text.ljust(w) for i, (text, w) in enumerate(zip(row, widths)))
                self._plain("  " + "  ".join(cells).rstrip())
            return
        table = Table(title=escape(title), title_justify="left", title_style="bold")
        for i, head in enumerate(heads):
            table.add_column(escape(head), justify="right" if i == 1 else "left")
        for row in rows:
            table.add_row(*map(escape, row))
        self._rich.print(table)

    @contextmanager
    def progress(self, title: str, total: float) -> Iterator[Callable[[float], None]]:
        """`with console.progress("rollout", 256) as advance: advance(1)`; the bar goes away when the work is done.

        One bar at a time. Without a terminal: a line at most every `PLAIN_EVERY_S` seconds, none for short work.
        """
        if not self.active:
            yield lambda amount: None
            return
        if not self.is_terminal:
            yield self._plain_progress(title, total)
            return
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=self._rich, transient=True) as bars:
            task = bars.add_task(escape(title), total=total)
            yield lambda amount: bars.advance(task, amount)

    def _plain_progress(self, title: str, total: float) -> Callable[[float], None]:
        done, told = 0.0, time.monotonic()

        def advance(amount: float) -> None:
            nonlocal done, told
            done += amount
            if time.monotonic() - told >= PLAIN_EVERY_S:
                told = time.monotonic()
                self._plain(f"{title} {done:g}/{total:g}")

        return advance

    def _plain(self, text: str) -> None:
        self._stream.write(text + "\n")
        self._stream.flush()


def step_parts(step: int, steps: int, metrics: Mapping[str, float], width: int | None = None) -> list[tuple[str, str]]:
    """(label, text) of the step line, eval last because most steps have none; within `width` columns if given.

    Missing metrics are left out. Texts have a fixed width, so that the lines of a run stand in columns.
    """
    names = [name for name, metric in METRICS.items() if metric.console and name in metrics]
    names.sort(key=lambda name: name == "engine/eval_accuracy")
    digits = len(str(steps))
    head = ("step", f"{step:>{digits}}/{steps}")
    texts = {name: (METRICS[name].console, short(metrics[name], METRICS[name].unit)) for name in names}
    for name in _LEAST_NEEDED:
        parts = [head, *texts.values()]
        if width is None or sum(len(label) + len(text) + 3 for label, text in parts) <= width:
            break
        texts.pop(name, None)
    return [head, *texts.values()]


def short(value: Any, unit: str) -> str:
    """A number of fixed width: " 0.612", "-0.002", " 1.2e-04" (nats), "12.3k" (tokens), "1.240s", "   nan"."""
    value = float(value)
    if unit == "s":
        return f"{value:5.{3 if value < 10 else 2 if value < 100 else 0}f}s"
    if unit in ("tokens", "tokens/s"):
        return f"{value:5.1f}" if value < 1000 else f"{value / 1000:4.3g}k"
    width = 8 if unit == "nats" else 6  # mismatches are tiny and signed: room for "-1.2e-05"
    exponent = abs(value) >= 100 or (unit == "nats" and 0 < abs(value) < 0.01)
    return f"{value:{width}.1e}" if exponent else f"{value:{width}.3f}"
