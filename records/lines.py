"""JSON lines that survive a crash: every record is one write, and a torn last line is dropped when the file is read.

The files of a run are the only truth; the log appends to them, the report reads them, and a resumed run cuts off what
lies beyond the step it resumes from.
"""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec


def records_error(path: Path, cause: OSError) -> OSError:
    """The same error, saying which record could not be written: a full disk rarely names the file."""
    return OSError(cause.errno, f"cannot write the records of the run ({cause.strerror or cause})", str(path))


def read_lines(path: Path, keep: Callable[[int], bool] = lambda index: True) -> Iterator[dict[str, Any]]:
    """The records of `path` in order; none if it does not exist. `keep(index)` says which lines to decode.

    A last line without its newline was torn by a crash and is left out. Raises ValueError naming file and line for any
    other broken line.
    """
    if not path.exists():
        return
    with path.open("rb") as file:
        for index, line in enumerate(file):
            if not line.endswith(b"\n"):
                return
            if not keep(index):
                continue
            try:
                yield msgspec.json.decode(line, type=dict[str, Any])
            except msgspec.DecodeError as error:
                raise ValueError(f"{path}, line {index + 1}: {error}") from error


def count_lines(path: Path) -> int:
    """How many whole records `path` holds, without decoding them."""
    if not path.exists():
        return 0
    with path.open("rb") as file:
        return sum(line.endswith(b"\n") for line in file)


class LineFile:
    """Appends records to one file. Non-finite floats are written as null.

    Opened with `keep`, the file first loses its torn last line and the records for which `keep` is false; `dropped`
    counts the latter. Raises OSError with the path when the file cannot be written.
    """

    def __init__(self, path: Path, keep: Callable[[dict[str, Any]], bool] | None = None):
        self.path = path
        self.dropped = 0
        try:
            if keep is not None and path.exists():
                self._rewrite(keep)
            # Unbuffered: a record is one system call, so a crash tears at most the last line.
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            raise records_error(path, error) from error

    def _rewrite(self, keep: Callable[[dict[str, Any]], bool]) -> None:
        kept = self.path.with_name(self.path.name + ".tmp")
        with kept.open("wb") as file:
            for record in read_lines(self.path):
                if keep(record):
                    file.write(msgspec.json.encode(record) + b"\n")
                else:
                    self.dropped += 1
        os.replace(kept, self.path)

    def append(self, record: dict[str, Any]) -> None:
        line = msgspec.json.encode(record) + b"\n"
        try:
            written = self._file.write(line)
            while written < len(line):  # a short write is how some file systems announce that they are full
                written += self._file.write(line[written:])
        except OSError as error:
            raise records_error(self.path, error) from error

    def close(self) -> None:
        self._file.close()
