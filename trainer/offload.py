"""Moves tensors to host memory and back in place, so that everything that refers to them stays valid.

It is their storages that move: emptied with `resize_(0)`, filled again later. A storage is shared by all views of it,
so FSDP2's flat `_sharded_param_data`, the DTensor over it and the optimizer's reference need no care of their own;
several gradients in one reduce-scatter buffer move together.
"""

from collections.abc import Iterable
from typing import Literal

import torch
from torch import Tensor, UntypedStorage, nn
from torch.cuda._pin_memory_utils import pin_memory, unpin_memory
from torch.distributed.tensor import DTensor

Part = Literal["params", "optimizer"]
_ALIGN = 512  # bytes, as torch's own allocations


def held(part: Part, optimizer: torch.optim.Optimizer, reference: nn.Module | None) -> list[Tensor]:
    """This rank's tensors of one part: the parameters, or what only training needs (gradients, optimizer state,
    reference policy). Step counts stay: they are scalars, each as costly to move as a matrix."""
    params: list[Tensor] = [p for group in optimizer.param_groups for p in group["params"]]
    tensors = params
    if part == "optimizer":
        tensors = [p.grad for p in params if p.grad is not None]
        tensors += [tensor for state in optimizer.state.values() for tensor in state.values() if tensor.ndim]
        tensors += [] if reference is None else reference.parameters()
    return [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]


class HostStore:
    """Where one set of tensors waits while the device serves others. Its host memory is kept for the next time."""

    def __init__(self, device: torch.device) -> None:
        """Host memory is pinned for a CUDA device."""
        self._device = device
        self._host = torch.empty(0, dtype=torch.uint8)
        self._out: list[tuple[UntypedStorage, Tensor]] = []  # the storages, and their bytes in `_host`

    def offload(self, tensors: Iterable[Tensor]) -> None:
        """Copies the storages of `tensors` (all of them on the device) out and frees them; until `onload`, none of
        their elements may be touched."""
        assert not self._out, "offloaded twice"
        storages = {storage.data_ptr(): storage for storage in (t.untyped_storage() for t in tensors)}
        moving = [storage for storage in storages.values() if storage.nbytes()]
        starts, end = [], 0
        for storage in moving:
            starts.append(end)
            end += -(-storage.nbytes() // _ALIGN) * _ALIGN
        self._reserve(end)
        self._out = [(s, self._host[start : start + s.nbytes()]) for s, start in zip(moving, starts, strict=True)]
        for storage, host in self._out:
            host.copy_(_bytes(storage, self._device), non_blocking=True)
        self._synchronize()
        for storage, _ in self._out:
            storage.resize_(0)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # else torch keeps the memory from the engine's process

    def onload(self) -> None:
        """Brings back what `offload` took, bit for bit."""
        for storage, host in self._out:
            storage.resize_(host.nbytes)
            _bytes(storage, self._device).copy_(host, non_blocking=True)
        self._synchronize()
        self._out = []

    def _reserve(self, nbytes: int) -> None:
        """Pinned by hand: torch's allocator of pinned memory rounds up to the next power of two."""
        if nbytes <= self._host.nbytes:
            return
        cuda = self._device.type == "cuda"
        if cuda and self._host.nbytes:
            unpin_memory(self._host.data_ptr())
        self._host = torch.empty(0, dtype=torch.uint8)  # freed before its successor is allocated
        self._host = torch.empty(nbytes, dtype=torch.uint8)
        if cuda:
            pin_memory(self._host.data_ptr(), nbytes)

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _bytes(storage: UntypedStorage, device: torch.device) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
