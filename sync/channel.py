"""Typed messages over a private Unix socket: how a rank talks to the child process that owns its engine.

A frame is a 4-byte little-endian length and a msgpack body; file descriptors (shared memory) travel with the frame's
first byte. A socket pair has no name in the file system, so no other user can reach it (engine/team.py has the other
kind), and it closes with either end: a receive of None means that the other side is gone.
"""

import select
import socket
import struct
from typing import Any, Generic, TypeVar

import msgspec

_LENGTH = struct.Struct("<I")
_MAX_FDS = 4
M = TypeVar("M")


class Channel(Generic[M]):
    """One end of the pair. `M` is the union of the message structs that may arrive at this end."""

    def __init__(self, sock: socket.socket, incoming: Any):
        self.socket = sock
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(incoming)

    def send(self, message: msgspec.Struct, fds: tuple[int, ...] = ()) -> None:
        """Raises OSError (BrokenPipeError, TimeoutError) when the other side is gone or does not read."""
        body = self._encoder.encode(message)
        frame = _LENGTH.pack(len(body)) + body
        sent = socket.send_fds(self.socket, [frame], list(fds)) if fds else 0
        self.socket.sendall(memoryview(frame)[sent:])

    def receive(self, timeout: float | None = None) -> tuple[M | None, list[int]]:
        """The next message and the descriptors sent with it; (None, []) at end of file.

        Raises TimeoutError after `timeout` seconds without a byte, msgspec.ValidationError for a foreign message.
        """
        self.socket.settimeout(timeout)
        head, fds, _, _ = socket.recv_fds(self.socket, _LENGTH.size, _MAX_FDS)
        if not head:
            return None, []
        head += self._exactly(_LENGTH.size - len(head))
        body = self._exactly(_LENGTH.unpack(head)[0])
        return self._decoder.decode(body), fds

    def _exactly(self, n: int) -> bytes:
        parts = bytearray()
        while len(parts) < n:
            part = self.socket.recv(n - len(parts))
            if not part:
                raise ConnectionResetError("the other side closed in the middle of a message")
            parts += part
        return bytes(parts)

    @property
    def closed(self) -> bool:
        """Whether either side has closed it, even if something it sent is left to read."""
        if self.socket.fileno() < 0:
            return True
        poll = select.poll()
        poll.register(self.socket, 0)  # a hang-up is always reported
        return bool(poll.poll(0))

    def hang_up(self) -> None:
        """Ends both directions: also a `receive` that waits in another thread."""
        self.socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.socket.close()
