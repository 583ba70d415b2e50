"""The engine's end of the swap: the fence, the checks, and the order of SGLang's update session.

States: serving(version) --Begin--> fenced(None) --Bucket…--> fenced --Commit--> serving(new version). Any error keeps
the fence up: an engine that may hold a mixture of old and new weights has no version.
"""

import contextlib
from typing import Protocol

import torch

from sync.buckets import checksum, nbytes
from sync.messages import Begin, Bucket, Commit, Done, Entry, Failed
from sync.shm import SharedBytes


class Updater(Protocol):
    """What the receiver needs from the engine, in this order. Each raises RuntimeError when the engine refuses."""

    async def begin(self, version: int) -> None: ...
    async def load(self, staging: torch.Tensor, entries: list[Entry], verify: bool) -> None: ...
    async def verified(self) -> int:
        """Parameters proved equal to what was loaded since `begin`; raises if one is not."""
        ...

    async def end(self) -> None: ...
    async def flush(self) -> None:
        """Forgets everything computed with the old weights."""
        ...


class Receiver:
    """Handles the swap messages of one engine. `version` is None while fenced."""

    def __init__(self, staging: SharedBytes, updater: Updater):
        self.version: int | None = None
        self._staging = torch.from_numpy(staging.array(0, "uint8", (staging.nbytes,)))
        self._updater = updater
        self._open = self._verify = False
        self._tensors = self._nbytes = 0

    async def handle(self, message: Begin | Bucket | Commit) -> Done | Failed:
        """Never raises: what went wrong is the reply, and the fence stays up."""
        try:
            if isinstance(message, Begin):
                await self._begin(message)
                return Done()
            if not self._open:
                return Failed("no swap is open: send Begin first")
            if isinstance(message, Bucket):
                await self._bucket(message)
                return Done()
            return Done(verified=await self._commit(message))
        except Exception as error:  # the reply carries it to the rank, which retries or stops the run
            return Failed(f"{type(error).__name__}: {error}")

    async def _begin(self, message: Begin) -> None:
        self.version = None
        if self._open:
            with contextlib.suppress(RuntimeError):  # the attempt that failed may have left the session in any state
                await self._updater.end()
        self._open = False
        await self._updater.begin(message.version)
        self._open, self._verify, self._tensors, self._nbytes = True, message.verify, 0, 0

    async def _bucket(self, message: Bucket) -> None:
        if checksum(self._staging[: message.nbytes]) != message.checksum:
            raise ValueError(f"bucket checksum differs over {message.nbytes} bytes")
        await self._updater.load(self._staging[: message.nbytes], message.entries, self._verify)
        self._tensors += len(message.entries)
        self._nbytes += sum(map(nbytes, message.entries))

    async def _commit(self, message: Commit) -> int:
        if (self._tensors, self._nbytes) != (message.tensors, message.nbytes):
            raise ValueError(
                f"received {self._tensors} tensors, {self._nbytes} bytes; sent {message.tensors}, {message.nbytes}"
            )
        verified = await self._updater.verified() if self._verify else 0
        await self._updater.end()
        self._open = False
        await self._updater.flush()
        self.version = message.version
        return verified
