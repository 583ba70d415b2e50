"""Ranks that share one engine with tensor parallelism: how they meet its child process, how their messages become one.

Every rank has a channel of its own to the child. The first rank starts it and has the usual private channel; the others
connect to a socket in a directory that only this user may enter. The number of the start is part of its name, so that
no rank reaches a child that is about to end. Swap messages, Sleep and Wake are rounds: one message of each rank, acted
on once, answered to all.
"""

import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from engine.protocol import Join, Skip, ToChild
from sync.channel import Channel
from sync.messages import Attach, Bucket, Commit, FromEngine, Recorded

_PER_PROCESS = {Attach: ("stagings", "files"), Bucket: ("checksums",), Commit: ("nbytes",)}
_RETRY_S = 0.05


class Seat(NamedTuple):
    """A rank's place among the ranks that share an engine."""

    place: int = 0  # SGLang's process with which this rank shares its GPU; 0 starts the child
    ranks: int = 1
    folder: Path | None = None  # in which they meet: private, the same for all; a rank alone needs none

    def listen(self, start: int) -> socket.socket:
        """For the child of start number `start`. Raises OSError where the path is too long for a socket."""
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(self._path(start))
        listener.listen(self.ranks)
        return listener

    def connect(self, sock: socket.socket, start: int, timeout: float) -> None:
        """Waits for the child of start number `start` to listen. Raises TimeoutError after `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while True:
            try:
                return sock.connect(self._path(start))
            except (FileNotFoundError, ConnectionRefusedError):  # the first rank has not come so far, or it died
                if time.monotonic() > deadline:
                    raise TimeoutError from None
            time.sleep(_RETRY_S)

    def _path(self, start: int) -> str:
        assert self.folder is not None
        return str(self.folder / f"engine-{start}.sock")


def accept(listener: socket.socket, ranks: int) -> "list[Channel[Any]]":
    """The child's channels to all ranks but the first, in rank order. Waits for them: the first rank has the time."""
    channels: dict[int, Channel[Any]] = {}
    with listener:
        while len(channels) < ranks - 1:
            channel: Channel[Any] = Channel(listener.accept()[0], ToChild)
            message, _ = channel.receive()
            if isinstance(message, Join):
                channels[message.place] = channel
    assert sorted(channels) == list(range(1, ranks)), sorted(channels)
    return [channels[place] for place in sorted(channels)]


def merge(messages: Sequence[Any]) -> Any:
    """The message of a round, of one from each rank: lists with an element per process put together in rank order.

    Raises ValueError where a rank had nothing to say (Skip), or ranks say different things.
    """
    kinds = [type(message) for message in messages]
    if Skip in kinds:
        raise ValueError(f"rank {kinds.index(Skip)} of the engine's {len(messages)} has a problem and sent nothing")
    names = _PER_PROCESS.get(kinds[0], ()) if len(set(kinds)) == 1 else ()
    joined = {name: [item for message in messages for item in getattr(message, name)] for name in names}
    merged = [msgspec.structs.replace(message, **joined) for message in messages]
    if any(message != merged[0] for message in merged):
        raise ValueError(f"the engine's {len(messages)} ranks are out of step: {', '.join(map(_brief, messages))}")
    return merged[0]


def split(reply: FromEngine, ranks: int) -> list[FromEngine]:
    """What each rank is answered: of the files of a recording its own, else all the same."""
    if isinstance(reply, Recorded):
        assert len(reply.files) == ranks, reply
        return [Recorded([file]) for file in reply.files]
    return [reply] * ranks


def _brief(message: Any) -> str:
    number = getattr(message, "version", getattr(message, "number", ""))
    return f"{type(message).__name__} {number}".strip()
