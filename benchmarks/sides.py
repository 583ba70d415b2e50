"""Two programs measured in turns: each side is a process that does one step when its turn comes and says how long.

Both stay alive during the whole run and only one works at a time, so that what else happens on the machine meets both
alike. The peer's side runs in another environment and imports this file too: standard library and psutil only.
"""

import contextlib
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import psutil

_SAMPLE_S = 0.05


class Turns:
    """The process's end. Whatever else it prints goes to stderr."""

    def __init__(self) -> None:
        self._out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)

    def wait(self) -> bool:
        """Waits for the next turn; False: there is none, end."""
        return bool(sys.stdin.readline())

    def reply(self, **values: Any) -> None:
        """The first reply says that the side is ready, each further one ends a turn."""
        print(json.dumps(values), file=self._out, flush=True)


class Side:
    """The benchmark's end of one side."""

    def __init__(self, name: str, command: list[str], job: dict[str, Any], work: Path):
        """Starts `command` with `job` as its last argument, in JSON; it logs to a file in `work`."""
        self.name, self.log = name, work / f"{name}.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*command, json.dumps(job)],
                cwd=Path(__file__).resolve().parents[1],
                env=os.environ | {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        self.ready = self._reply()

    def __enter__(self) -> "Side":
        return self

    def __exit__(self, *exception: object) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def turn(self) -> dict[str, Any]:
        """One step; what the side replied, `seconds` among it. Raises RuntimeError if it ended instead."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            print("go", file=self.process.stdin, flush=True)
        return self._reply()

    def peak_mb(self) -> float:
        """One more turn, not to be timed: the largest memory during it, in MB (10^6 bytes).

        Proportional set size of the process and all its descendants: a page that several share counts once in all.
        """
        stop, peak = threading.Event(), 0
        processes: list[psutil.Process] = []

        def watch() -> None:
            nonlocal peak
            while not stop.is_set():
                peak = max(peak, sum(_pss(process) for process in processes))
                stop.wait(_SAMPLE_S)

        main = psutil.Process(self.process.pid)
        processes += [main, *main.children(recursive=True)]
        watcher = threading.Thread(target=watch)
        watcher.start()
        self.turn()
        stop.set()
        watcher.join()
        return peak / 1e6

    def _reply(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            tail = "\n  ".join(self.log.read_text(errors="replace").splitlines()[-12:])
            raise RuntimeError(f"{self.name} ended with exit status {self.process.wait()}:\n  {tail}")
        return json.loads(line)


def _pss(process: psutil.Process) -> int:
    try:
        return process.memory_full_info().pss
    except psutil.Error:  # it has ended
        return 0
