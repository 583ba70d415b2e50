"""Rows of a dataset on disk: jsonl, parquet, or a Hugging Face dataset directory, read with pyarrow.

A directory is either what `datasets.save_to_disk` wrote (arrow streams, perhaps one folder per split) or a folder of
parquet or jsonl files such as a clone of a dataset repository. The `datasets` library itself is not needed.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

SUFFIXES = (".jsonl", ".parquet", ".arrow")


def read_rows(path: Path, split: str | None, fields: Sequence[str]) -> list[dict[str, Any]]:
    """All rows in file order, each `{field: value}`. A dotted field reaches inside: `reward_model.ground_truth`.

    `split` picks the files whose name, or a folder above it inside `path`, begins with it; None takes `train` where
    there is one, else everything. Raises ValueError for a missing path, an unreadable row, a missing or null field
    (with its line or row number, from 1), or no rows at all.
    """
    rows = []
    for file in _data_files(path, split):
        for where, record in _records(file, sorted({field.split(".")[0] for field in fields})):
            rows.append({field: _pick(record, field, where) for field in fields})
    if not rows:
        raise ValueError(f"{path}: no rows")
    return rows


def _data_files(path: Path, split: str | None) -> list[Path]:
    if path.is_file():
        if path.suffix not in SUFFIXES:
            raise ValueError(f"{path}: unknown kind of file; known: {', '.join(SUFFIXES)} or a directory of them")
        return [path]
    if not path.is_dir():
        raise ValueError(f"{path}: no such file or directory")
    # cache-*.arrow are leftovers of datasets.map, not data
    files = sorted(
        file for file in path.rglob("*") if file.suffix in SUFFIXES and not file.name.startswith("cache-")
    )  # fmt: skip
    wanted = split or "train"
    chosen = [file for file in files if any(part.startswith(wanted) for part in file.relative_to(path).parts)]
    if not chosen and split is None:
        chosen = files
    if not chosen:
        found = ", ".join(str(file.relative_to(path)) for file in files[:5]) or "no data files"
        raise ValueError(f"{path}: no {wanted!r} split; found {found}")
    return chosen


def _records(file: Path, columns: list[str]) -> Iterator[tuple[str, Any]]:
    if file.suffix == ".jsonl":
        with file.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield f"{file} line {number}", _decode(line, f"{file} line {number}")
        return
    table = pq.read_table(file) if file.suffix == ".parquet" else _read_arrow(file)
    if missing := [column for column in columns if column not in table.column_names]:
        raise ValueError(f"{file}: no field {missing[0]!r}; it has {', '.join(table.column_names)}")
    for number, record in enumerate(table.select(columns).to_pylist(), 1):
        yield f"{file} row {number}", record


def _decode(line: bytes, where: str) -> Any:
    try:
        return msgspec.json.decode(line)
    except msgspec.DecodeError as error:
        raise ValueError(f"{where}: not JSON: {error}") from None


def _read_arrow(file: Path) -> pa.Table:
    with pa.memory_map(str(file)) as source:
        try:
            return pa.ipc.open_stream(source).read_all()  # what save_to_disk writes
        except pa.ArrowInvalid:
            source.seek(0)
            return pa.ipc.open_file(source).read_all()


def _pick(record: Any, field: str, where: str) -> Any:
    value = record
    for key in field.split("."):
        if not isinstance(value, dict) or value.get(key) is None:
            has = f"; it has {', '.join(map(str, record))}" if isinstance(record, dict) else ""
            raise ValueError(f"{where}: no field {field!r}{has}")
        value = value[key]
    return value
