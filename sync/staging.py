"""The staging buffer of a swap: bytes that a rank writes and an engine process reads, allocated and exported once.

On GPUs both see the same device memory through CUDA IPC; on CPUs the same pages of a memfd. Either way it has two
halves, so that one bucket is filled while the other is taken. Allocate it outside every torch_memory_saver region: such
memory cannot be exported.
"""

import mmap
import os
from typing import Any

import torch
from torch import Tensor

from sync.shm import SharedBytes

HALVES = 2
_ALIGN = 512  # bytes; what CUDA aligns allocations to


class Staging:
    """The rank's end. `halves[i]` is uint8[half]; `handle` is what the engine process opens."""

    def __init__(self, half: int, device: torch.device):
        """`half`: bytes of one bucket at most."""
        self.half = -(-half // _ALIGN) * _ALIGN
        if device.type == "cuda":
            self.bytes = torch.empty(HALVES * self.half, dtype=torch.uint8, device=device)
            self.handle: list[Any] = ["cuda", *self.bytes.untyped_storage()._share_cuda_()]
        else:
            self._memory = SharedBytes(HALVES * self.half)
            self.bytes = torch.from_numpy(self._memory.array(0, "uint8", (HALVES * self.half,)))
            self.handle = ["memfd", f"/proc/{os.getpid()}/fd/{self._memory.fd}"]
        self.halves = self.bytes.chunk(HALVES)

    def ready(self) -> None:
        """Call before telling the engine: what was written is really there."""
        if self.bytes.is_cuda:
            torch.cuda.synchronize(self.bytes.device)


def attach(handle: list[Any]) -> tuple[Tensor, ...]:
    """The engine process's end: the halves behind a handle, uint8. Raises OSError if the rank is gone."""
    kind, *rest = handle
    if kind == "cuda":
        storage = torch.UntypedStorage._new_shared_cuda(torch.cuda.current_device(), *rest[1:])
        whole = torch.empty(0, dtype=torch.uint8, device="cuda").set_(storage)  # type: ignore[reportArgumentType]
    else:
        descriptor = os.open(rest[0], os.O_RDWR)  # a rank may only be asked by its own user
        try:
            whole = torch.frombuffer(mmap.mmap(descriptor, 0), dtype=torch.uint8)
        finally:
            os.close(descriptor)
    return whole.chunk(HALVES)
