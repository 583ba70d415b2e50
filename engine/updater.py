"""In the engine's child: SGLang's own update session, behind the interface that `sync.receive` drives.

Each command (engine/hotswap.py) is one call of SGLang's custom weight loader, with a payload for each of its processes.
SGLang passes on no more than success, so every process answers with a file of its own.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from engine.hotswap import Command, Finish, Note, Open, Reply, Take, encode, load
from sync.messages import Entry

LOADER = f"{load.__module__}.{load.__name__}"  # as sglang.Engine wants to be told at its start


class Updater:
    """Implements `sync.receive.Updater`. Each method raises RuntimeError with the reason of the first that refused."""

    def __init__(self, manager: Any, reports: Path):
        """`manager`: SGLang's TokenizerManager. `reports`: an existing directory for the answers."""
        from sglang.srt.managers import io_struct

        self.manager, self.io, self.reports = manager, io_struct, reports
        self.processes = int(manager.server_args.tp_size)
        self.sessions = hasattr(manager, "begin_weight_update")  # from 0.5.21 on
        self.version = -1  # of the open session; SGLang stamps samples with it

    async def begin(self, version: int) -> None:
        self.version = version
        if self.sessions:
            _check(await self.manager.begin_weight_update(self.io.BeginWeightUpdateReqInput()))

    async def record(self, entries: list[Entry], plan: bool) -> list[str]:
        files, _ = await self._command("recording", [lambda reply: Note(reply, entries, plan)] * self.processes)
        return [str(file) for file in files]

    async def attach(self, stagings: list[list[Any]], files: list[str]) -> None:
        self._one_each(stagings)
        await self._run(
            [lambda reply, h=handle, f=file: Open(reply, h, f) for handle, file in zip(stagings, files, strict=True)]
        )

    async def bucket(self, number: int, checksums: list[int], verify: bool) -> None:
        self._one_each(checksums)
        await self._run([lambda reply, c=checksum: Take(reply, number, c, verify) for checksum in checksums])

    async def finish(self, nbytes: list[int], verify: bool) -> int:
        self._one_each(nbytes)
        replies = await self._run([lambda reply, n=count: Finish(reply, n, verify) for count in nbytes])
        for kind, what in (("wrong", "differ from what was sent"), ("unwritten", "were left out by SGLang's loader")):
            if names := sorted({name for reply in replies for name in getattr(reply, kind)}):
                raise RuntimeError(f"{len(names)} engine parameters {what}: {', '.join(names[:4])}")
        return min(reply.verified for reply in replies)

    async def end(self) -> None:
        if self.sessions:
            _check(await self.manager.end_weight_update(self.io.EndWeightUpdateReqInput()))

    async def flush(self) -> None:
        if not (result := await self.manager.flush_cache()).success:
            raise RuntimeError(f"SGLang did not flush its prefix cache: {result.message}")

    def _one_each(self, items: Sequence[Any]) -> None:
        if len(items) != self.processes:
            raise ValueError(f"{len(items)} given, but the engine has {self.processes} processes")

    async def _run(self, commands: list[Callable[[str], Command]]) -> list[Reply]:
        """One command per process; their replies, whose files are removed."""
        files, replies = await self._command("reply", commands)
        for file in files:
            file.unlink()
        return replies

    async def _command(self, name: str, commands: list[Callable[[str], Command]]) -> tuple[list[Path], list[Reply]]:
        from sglang.srt.utils import MultiprocessingSerializer

        files = [self.reports / f"{name}-{process}" for process in range(self.processes)]
        for file in files:
            file.unlink(missing_ok=True)
        payloads = [MultiprocessingSerializer.serialize(encode(make(str(f)))) for make, f in zip(commands, files)]
        request = self.io.UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=payloads, load_format=LOADER, flush_cache=False, weight_version=str(self.version)
        )
        _check(await self.manager.update_weights_from_tensor(request))
        replies = [msgspec.msgpack.decode(file.read_bytes(), type=Reply) for file in files]
        for process, reply in enumerate(replies):
            if reply.error is not None:
                raise RuntimeError(f"engine process {process}: {reply.error}" if self.processes > 1 else reply.error)
        return files, replies


def _check(result: tuple[bool, str]) -> None:
    ok, message = result
    if not ok:
        raise RuntimeError(f"SGLang refused the update: {message}")
