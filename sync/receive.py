"""The engine's end of the swap: the fence, and the order of messages.

States: serving(version) --Begin--> fenced --[Record → Attach]--> fenced --Bucket 0, 1, …--> fenced --Commit--> serving.
Any error keeps the fence up and ends the swap: an engine that may hold a mixture of old and new weights has no version.
"""

import contextlib
from typing import Any, Protocol

from sync.messages import Attach, Begin, Bucket, Commit, Done, Entry, Failed, FromEngine, Record, Recorded, ToEngine


class Updater(Protocol):
    """What the receiver needs from the engine. Each raises RuntimeError when the engine refuses."""

    async def begin(self, version: int) -> None: ...
    async def record(self, entries: list[Entry], plan: bool) -> list[str]:
        """Makes the copy plan; files with one `sync.plan.Recording` per engine process."""
        ...

    async def attach(self, stagings: list[list[Any]], files: list[str]) -> None: ...
    async def bucket(self, number: int, checksums: list[int], verify: bool) -> None:
        """Writes a bucket into the parameters. Bucket 0 begins anew."""
        ...

    async def finish(self, nbytes: list[int], verify: bool) -> int:
        """Checks what has been written; parameters proved right, 0 without `verify`."""
        ...

    async def end(self) -> None: ...
    async def flush(self) -> None:
        """Forgets everything computed with the old weights."""
        ...


class Receiver:
    """Handles the swap messages of one engine. `version` is None while fenced."""

    def __init__(self, updater: Updater):
        self.version: int | None = None
        self._updater = updater
        self._session = False  # the updater was told to begin, and not to end
        self._begun: Begin | None = None  # the swap that is going on
        self._attached = False
        self._buckets = 0  # taken in this swap

    def fence(self) -> None:
        """What the engine holds is undefined from now on: no version until a swap that begins later commits."""
        self.version = self._begun = None

    async def handle(self, message: ToEngine) -> FromEngine:
        """Never raises: what went wrong is the reply, and the fence stays up."""
        try:
            return await self._handle(message)
        except Exception as error:  # the reply carries it to the rank, which retries or stops the run
            self._begun = None
            return Failed(f"{type(error).__name__}: {error}")

    async def _handle(self, message: ToEngine) -> FromEngine:
        if isinstance(message, Begin):
            await self._begin(message)
            return Done()
        if self._begun is None:
            raise RuntimeError("no swap is open: send Begin first")
        match message:
            case Record() | Attach() if self._buckets:
                raise RuntimeError(f"{type(message).__name__} must come before the first bucket")
            case Record():
                self._attached = False
                return Recorded(await self._updater.record(message.entries, message.plan))
            case Attach():
                self._attached = False
                await self._updater.attach(message.stagings, message.files)
                self._attached = True
            case Bucket():
                await self._bucket(message, self._begun.verify)
            case Commit():
                return Done(verified=await self._commit(message, self._begun))
        return Done()

    async def _begin(self, message: Begin) -> None:
        self.version = self._begun = None
        if self._session:
            with contextlib.suppress(RuntimeError):  # the attempt that failed may have left the session in any state
                await self._updater.end()
        self._session = False
        await self._updater.begin(message.version)
        self._session, self._begun, self._buckets = True, message, 0

    async def _bucket(self, message: Bucket, verify: bool) -> None:
        if not self._attached:
            raise RuntimeError("no staging buffer is attached: send Record and Attach first")
        if message.number != self._buckets:
            raise ValueError(f"bucket {message.number} came where bucket {self._buckets} was due")
        await self._updater.bucket(message.number, message.checksums, verify)
        self._buckets += 1

    async def _commit(self, message: Commit, begun: Begin) -> int:
        if message.version != begun.version:
            raise ValueError(f"the swap to version {begun.version} cannot be committed as version {message.version}")
        if message.buckets != self._buckets:
            raise ValueError(f"received {self._buckets} buckets; sent {message.buckets}")
        verified = await self._updater.finish(message.nbytes, begun.verify)
        await self._updater.end()
        self._session, self._begun = False, None
        await self._updater.flush()
        self.version = message.version
        return verified
