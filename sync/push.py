"""The trainer's end of the swap: quantize once, fill the staging buffer, send buckets, commit together.

Plain form: every rank gathers every parameter and its own engine receives all of them, through SGLang's own loader.
The seams for the fast form are `Wire` (what bytes a parameter becomes) and `_Packer` (where they lie in a bucket).
"""

import time
from collections.abc import Callable, Iterable
from typing import Annotated, Literal, Protocol

import msgspec
import torch
from torch import Tensor

from sync.buckets import align, checksum
from sync.fields import doc
from sync.messages import Begin, Bucket, Commit, Done, Entry, Failed
from sync.quantize import Fp8Config, quantize, scale_name
from sync.shm import SharedBytes


class SyncConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How weights travel from the trainer to the engine."""

    bucket_mb: Annotated[
        int, doc("Staging buffer of one engine; the largest tensor must fit into it.", unit="MiB", ge=1)
    ] = 512
    verify: Annotated[
        Literal["always", "first", "off"],
        doc(
            "Compare every engine parameter with the bytes sent: after each swap, after the first of an engine, never."
        ),
    ] = "always"
    attempts: Annotated[int, doc("Whole swaps tried before the run stops.", unit="swaps", ge=1)] = 2
    timeout_s: Annotated[float, doc("Longest wait for the engine to take one bucket or commit.", unit="s", gt=0)] = (
        600.0
    )


class SwapError(RuntimeError):
    """No attempt succeeded: some engine is fenced and must be restarted or the run stopped."""


class Receiver(Protocol):
    """The engine as the swap sees it."""

    staging: SharedBytes

    def request(self, message: Begin | Bucket | Commit, timeout: float) -> Done | Failed:
        """Sends and waits. An engine that died or hangs answers `Failed`."""
        ...


class Wire(msgspec.Struct, frozen=True):
    """The form in which a parameter reaches the engine: FP8 codes and scales, or the engine's own dtype."""

    fp8: Fp8Config
    n_layers: int
    dtype: torch.dtype  # of what is not quantized

    def encode(self, name: str, weight: Tensor) -> list[tuple[str, Tensor]]:
        """One parameter (fp32 master) as one or two named tensors. ValueError naming it if it holds a NaN or Inf."""
        if self.fp8.is_quantized(name, tuple(weight.shape), self.n_layers):
            codes, scale = quantize(
                weight, self.fp8.granularity, self.fp8.scales, amax_floor=self.fp8.amax_floor, name=name
            )
            return [(name, codes), (scale_name(name), scale)]
        if not torch.isfinite(weight).all():
            raise ValueError(f"{name} holds a NaN or Inf; it is not shipped to the engine")
        return [(name, weight.to(self.dtype))]


def push(
    weights: Callable[[], Iterable[tuple[str, Tensor]]],
    engine: Receiver,
    version: int,
    wire: Wire,
    config: SyncConfig,
    agree: Callable[[bool], bool],
    verify: bool,
) -> dict[str, float]:
    """Replaces all weights of `engine` by `weights()` and returns the `sync/…` metrics.

    `weights` is called once per attempt and may run collectives, so every rank walks it to the end even after its own
    engine has failed. `agree(ok)` returns whether all ranks passed True. Raises SwapError after the last attempt, and
    ValueError for a parameter that cannot be shipped.
    """
    started = time.perf_counter()
    reason = "another rank's engine failed"
    for attempt in range(config.attempts):
        session = _Session(engine, version, config, verify)
        quantize_s = 0.0
        for name, weight in weights():
            began = time.perf_counter()
            tensors = wire.encode(name, weight)
            quantize_s += time.perf_counter() - began
            session.add(tensors)
        session.flush()
        if agree(session.ok):
            session.send(Commit(version, session.tensors, session.nbytes))
            if agree(session.ok):
                return {
                    "sync/swap_s": time.perf_counter() - started,
                    "sync/quantize_s": quantize_s,
                    "sync/bytes": session.nbytes,
                    "sync/tensors": session.tensors,
                    "sync/version": version,
                    "sync/retries": attempt,
                    "sync/verified_params": session.verified,
                }
        reason = session.reason or reason
    raise SwapError(f"swap to version {version} failed {config.attempts} times, last: {reason}")


class _Session:
    """One attempt: packs tensors into the staging buffer and sends a bucket whenever it is full."""

    def __init__(self, engine: Receiver, version: int, config: SyncConfig, verify: bool):
        self.engine, self.timeout = engine, config.timeout_s
        self.bytes = torch.from_numpy(engine.staging.array(0, "uint8", (engine.staging.nbytes,)))
        self.entries: list[Entry] = []
        self.end = self.tensors = self.nbytes = self.verified = 0
        self.reason = ""
        self.send(Begin(version, verify))

    @property
    def ok(self) -> bool:
        return not self.reason

    def send(self, message: Begin | Bucket | Commit) -> None:
        if not self.ok:
            return  # the engine is fenced; only the collectives go on
        reply = self.engine.request(message, self.timeout)
        if isinstance(reply, Failed):
            self.reason = reply.reason
        else:
            self.verified += reply.verified

    def add(self, tensors: list[tuple[str, Tensor]]) -> None:
        sizes = [align(tensor.nbytes) for _, tensor in tensors]
        if sum(sizes) > len(self.bytes):
            raise ValueError(
                f"{tensors[0][0]} needs {sum(sizes) / 2**20:.0f} MiB: raise sync.bucket_mb "
                f"(now {len(self.bytes) / 2**20:.0f})"
            )
        if self.end + sum(sizes) > len(self.bytes):
            self.flush()
        for (name, tensor), size in zip(tensors, sizes, strict=True):
            self.bytes[self.end : self.end + tensor.nbytes].copy_(tensor.contiguous().view(-1).view(torch.uint8))
            self.entries.append(Entry(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), self.end))
            self.end += size
            self.tensors += 1
            self.nbytes += tensor.nbytes

    def flush(self) -> None:
        if self.entries:
            self.send(Bucket(self.entries, self.end, checksum(self.bytes[: self.end])))
        self.entries, self.end = [], 0
