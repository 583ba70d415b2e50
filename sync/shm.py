"""Shared memory without names: a memfd mapped by both ends and freed by the kernel with the last of them.

Nothing to unlink after a crash, no name that another user could guess. Pages cost memory only once they are written,
so an arena may be sized for the worst case.
"""

import mmap
import os
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

_ALIGN = 64  # bytes; columns start on cache lines, as memcpy and torch like them


class SharedBytes:
    """`nbytes` of zeroed shared memory. Create it at one end, send `fd`, `attach` at the other."""

    def __init__(self, nbytes: int, fd: int | None = None):
        self.nbytes = max(nbytes, 1)
        self.fd = os.memfd_create("hotswap", os.MFD_CLOEXEC) if fd is None else fd
        if fd is None:
            os.ftruncate(self.fd, self.nbytes)
        self.map = mmap.mmap(self.fd, self.nbytes)

    @classmethod
    def attach(cls, fd: int) -> "SharedBytes":
        """Maps what the other end created; takes over `fd`."""
        return cls(os.fstat(fd).st_size, fd)

    def array(self, offset: int, dtype: DTypeLike, shape: tuple[int, ...]) -> NDArray[Any]:
        """A writable view; it keeps the mapping alive."""
        count = int(np.prod(shape))
        return np.frombuffer(self.map, dtype, count, offset).reshape(shape)

    def close(self) -> None:
        """Closes the descriptor. The mapping itself goes with its last view."""
        os.close(self.fd)


def layout(columns: dict[str, tuple[DTypeLike, tuple[int, ...]]]) -> tuple[dict[str, int], int]:
    """Offsets [bytes] of columns laid one after the other, and the total size [bytes]."""
    offsets, end = {}, 0
    for name, (dtype, shape) in columns.items():
        offsets[name] = end
        size = np.dtype(dtype).itemsize * int(np.prod(shape, dtype=np.int64))
        end += -(-size // _ALIGN) * _ALIGN
    return offsets, end
