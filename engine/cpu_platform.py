"""SGLang's out-of-tree CPU platform: the real engine on any CPU, no sgl_kernel and no CUDA.

SGLang then takes its "native" torch code paths; the layers that are too slow or missing there are ours
(cpu_layers.py). SGLang's own CPU platform needs sgl_kernel, which needs libcuda: leave SGLANG_USE_CPU_ENGINE unset.

SGLang loads this file in the middle of its own first imports, so its other modules are imported inside functions.
"""

import ctypes
import sys
from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import SRTPlatform
from sglang.srt.plugins.hook_registry import HookRegistry, HookType


class CpuPlatform(CpuDeviceMixin, SRTPlatform):  # pyright: ignore[reportIncompatibleMethodOverride]
    """Any CPU, no sgl_kernel."""

    _enum = PlatformEnum.OOT

    def get_default_attention_backend(self) -> str:
        return "torch_native"

    def get_dispatch_key_name(self) -> str:
        return "native"

    def get_quantization_config(self, quantization: str) -> type | None:
        from engine.cpu_layers import CpuFp8Config

        return CpuFp8Config if quantization == "fp8" else None

    def empty_cache(self) -> None:
        """There is no device cache. SGLang's version collects garbage, 0.3 s of every swap, and frees nothing here."""

    def init_backend(self) -> None:
        """In each scheduler: keep freed memory in the process.

        glibc gives large blocks back to the kernel at once, so every temporary tensor above 128 KiB costs page faults;
        batched attention runs 2 to 3 times faster without. Other C libraries do not have this call or this habit.
        """
        if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):
            m_trim_threshold, m_mmap_threshold = -1, -3
            libc.mallopt(m_mmap_threshold, 1 << 30)
            libc.mallopt(m_trim_threshold, (1 << 31) - 1)


def allocate(dims: tuple, dtype: torch.dtype, *_: Any, **__: Any) -> torch.Tensor:
    """Host memory of the routed-experts record; SGLang's version registers it with CUDA."""
    return torch.empty(dims, dtype=dtype)


def device_module(original: Callable[..., Any], device: Any = None) -> Any:
    """torch's default is the device it was built for: a CUDA build would synchronize a GPU that is not there."""
    return original("cpu" if device is None else device)


def install_hooks() -> None:
    """Registers what the platform class cannot say; called in every SGLang process before anything is built."""
    from sglang.srt.mem_cache.pool_host import common as pool_host

    from engine.cpu_layers import BatchedAttention, experts_forward

    native = "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend"
    HookRegistry.register(native, BatchedAttention, HookType.REPLACE)
    HookRegistry.register("sglang.srt.layers.moe.fused_moe_native.moe_forward_native", experts_forward, HookType.AROUND)
    HookRegistry.register("torch.get_device_module", device_module, HookType.AROUND)
    pool_host.ALLOC_MEMORY_FUNCS["cpu"] = allocate
