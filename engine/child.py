"""The child process of a rank that owns `sglang.Engine`: `python -m engine.child FD PARENT`.

SGLang kills the process that created the engine when one of its schedulers fails, so that process must not be the
trainer. It serves one channel and ends when that closes.
"""

import asyncio
import base64
import ctypes
import json
import os
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from engine.protocol import (
    Arena,
    Finished,
    Generate,
    Generated,
    Ready,
    Sampling,
    Start,
    Stop,
    ToChild,
)
from engine.verifier import BUCKET, ENTRIES, REPORT
from sync.batch import FINISH_REASONS
from sync.buckets import views
from sync.channel import Channel
from sync.messages import Begin, Bucket, Commit, Entry, Failed
from sync.receive import Receiver
from sync.shm import SharedBytes

VERIFIER = "engine.verifier.verify"
_ANNOUNCE_S = 0.004  # finished samples are announced together, to spare the rank a message each
_PR_SET_PDEATHSIG = 1


def main(fd: int, parent: int) -> None:
    """Serves the channel on descriptor `fd` until it closes. The kernel ends the process with its `parent`."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return  # the parent was gone before the kernel knew whom to watch
    channel: Channel[Any] = Channel(socket.socket(fileno=fd), ToChild)
    start, fds = channel.receive()
    assert isinstance(start, Start), start
    import sglang

    engine = sglang.Engine(**start.server_args, custom_weight_loader=[VERIFIER], random_seed=start.seed)
    child = _Child(engine, channel, SharedBytes.attach(fds[0]), Path(start.reports))
    channel.send(Ready(sglang.__version__))
    engine.loop.run_until_complete(child.serve())
    engine.shutdown()


class _Child:
    def __init__(self, engine: Any, channel: "Channel[Any]", staging: SharedBytes, reports: Path):
        from sglang.srt.managers import io_struct

        self.engine, self.channel, self.io = engine, channel, io_struct
        self.receiver = Receiver(staging, _Updater(engine, reports))
        self.finished: list[int] = []

    async def serve(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            message, fds = await loop.run_in_executor(None, self.channel.receive)
            if message is None or isinstance(message, Stop):
                return
            if isinstance(message, Generate):
                await self._generate(message, SharedBytes.attach(fds[0]))
            elif isinstance(message, Begin | Bucket | Commit):
                self.channel.send(await self.receiver.handle(message))

    async def _generate(self, message: Generate, memory: SharedBytes) -> None:
        if self.receiver.version is None:
            self.channel.send(Failed("the engine is fenced: no committed weights since the last swap began"))
            memory.close()
            return
        arena = Arena(memory, message.slots)
        params = _sampling_params(message.sampling)
        try:
            async with asyncio.TaskGroup() as tasks:  # one that fails cancels the others
                for i in range(message.slots.samples):
                    tasks.create_task(self._sample(arena, i, params, message.sampling))
            self._announce()
            self.channel.send(Generated())
        except ExceptionGroup as group:  # a refused request: the rank raises it; the engine itself lives on
            self.engine.tokenizer_manager.abort_request(abort_all=True)
            self.finished = []
            self.channel.send(Failed("; ".join(f"{type(e).__name__}: {e}" for e in group.exceptions[:3])))
        finally:
            memory.close()

    async def _sample(self, arena: Arena, i: int, params: dict[str, Any], sampling: Sampling) -> None:
        prompt = arena.prompt(i).tolist()
        request = self.io.GenerateReqInput(  # Engine.async_generate has no return_sampling_mask
            input_ids=prompt,
            sampling_params=dict(params),
            return_logprob=True,
            return_sampling_mask=sampling.support > 0,
            return_routed_experts=arena.slots.layers > 0,
        )
        out = await anext(self.engine.tokenizer_manager.generate_request(request, None))
        meta = out["meta_info"]
        if meta["weight_version"] != str(self.receiver.version):
            raise RuntimeError(f"SGLang served weight version {meta['weight_version']}, not {self.receiver.version}")
        n = len(out["output_ids"])
        arena.tokens[i, :n] = out["output_ids"]
        arena.logprobs[i, :n] = [entry[0] for entry in meta["output_token_logprobs"]]
        if sampling.support and n:
            _record_support(arena, i, meta["output_token_sampling_mask"], meta["output_token_sampling_logprobs"])
        if arena.slots.layers and n:  # SGLang records nothing for a sample that was aborted before it began
            _record_experts(arena, i, len(prompt) + n, meta["routed_experts"])
        arena.versions[i] = self.receiver.version
        arena.finish[i] = FINISH_REASONS.index(meta["finish_reason"]["type"])
        arena.lengths[i] = n  # last: a length says that the rest is there
        if not self.finished:
            asyncio.get_running_loop().call_later(_ANNOUNCE_S, self._announce)
        self.finished.append(i)

    def _announce(self) -> None:
        if self.finished:
            self.channel.send(Finished(self.finished))
            self.finished = []


class _Updater:
    """SGLang's own update session, behind the interface that `sync.receive` drives."""

    def __init__(self, engine: Any, reports: Path):
        from sglang.srt.managers import io_struct

        self.manager, self.io, self.reports = engine.tokenizer_manager, io_struct, reports
        self.version = -1  # of the open session; SGLang stamps samples with it

    async def begin(self, version: int) -> None:
        self.version = version
        for report in self.reports.iterdir():
            report.unlink()
        _check(await self.manager.begin_weight_update(self.io.BeginWeightUpdateReqInput()))

    async def load(self, staging: torch.Tensor, entries: list[Entry], verify: bool) -> None:
        from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorMetadata

        metadata = [
            FlattenedTensorMetadata(
                name=entry.name,
                shape=tensor.shape,
                dtype=tensor.dtype,
                start_idx=entry.offset,
                end_idx=entry.offset + tensor.nbytes,
                numel=tensor.nbytes,
            )
            for entry, (_, tensor) in zip(entries, views(staging, entries), strict=True)
        ]
        await self._update("flattened_bucket", lambda: {"flattened_tensor": staging.clone(), "metadata": metadata})
        if verify:
            encoded = _uint8(msgspec.msgpack.encode(entries))
            await self._update(VERIFIER, lambda: [(BUCKET, staging.clone()), (ENTRIES, encoded.clone())])

    async def verified(self) -> int:
        where = _uint8(str(self.reports).encode())
        await self._update(VERIFIER, lambda: [(REPORT, where.clone())])
        reports = [json.loads(path.read_text()) for path in self.reports.iterdir()]
        if not reports:
            raise RuntimeError("the weight verifier left no report")
        for kind, what in (("wrong", "differ from what was sent"), ("unwritten", "were left out by SGLang's loader")):
            if names := sorted({name for report in reports for name in report[kind]}):
                raise RuntimeError(f"{len(names)} engine parameters {what}: {', '.join(names[:4])}")
        return min(report["verified"] for report in reports)

    async def end(self) -> None:
        _check(await self.manager.end_weight_update(self.io.EndWeightUpdateReqInput()))

    async def flush(self) -> None:
        if not (result := await self.manager.flush_cache()).success:
            raise RuntimeError(f"SGLang did not flush its prefix cache: {result.message}")

    async def _update(self, load_format: str, payload: Callable[[], Any]) -> None:
        """Calls SGLang's loader with a payload for each of its ranks.

        Serializing moves the tensors of a payload into shared memory of torch's own, whose handle serves one process:
        so they must be copies, one per rank.
        """
        from sglang.srt.utils import MultiprocessingSerializer

        request = self.io.UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=[
                MultiprocessingSerializer.serialize(payload()) for _ in range(self.manager.server_args.tp_size)
            ],
            load_format=load_format,
            flush_cache=False,
            weight_version=str(self.version),
        )
        _check(await self.manager.update_weights_from_tensor(request))


def _check(result: tuple[bool, str]) -> None:
    ok, message = result
    if not ok:
        raise RuntimeError(f"SGLang refused the update: {message}")


def _uint8(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _sampling_params(s: Sampling) -> dict[str, Any]:
    return {
        "max_new_tokens": s.max_tokens,
        "temperature": s.temperature,
        "top_p": s.top_p,
        "top_k": s.top_k or -1,
        "min_p": s.min_p,
        "stop_token_ids": list(s.stop_token_ids) or None,
    }


def _record_experts(arena: Arena, i: int, n_tokens: int, encoded: str) -> None:
    """SGLang's base64 int32 [n-1, L, K] into the sample's rows. The last token has no record: it gets the sentinel."""
    slots = arena.slots
    record = np.frombuffer(base64.b64decode(encoded), np.int32)
    if record.size != (n_tokens - 1) * slots.layers * slots.top_k:
        raise ValueError(
            f"sample {i}: routed experts hold {record.size} numbers for {n_tokens} tokens, "
            f"{slots.layers} layers, top-{slots.top_k}"
        )
    rows = arena.expert_rows(i, n_tokens)
    rows[:-1] = record.reshape(n_tokens - 1, slots.layers, slots.top_k)
    rows[-1] = -1 if slots.wide else 255


def _record_support(arena: Arena, i: int, kept: list[list[int]], logprobs: list[float]) -> None:
    """The candidates SGLang chose each token from, and the log-prob of the token among them."""
    if (widest := max(map(len, kept), default=0)) > arena.slots.support:
        raise ValueError(f"sample {i}: {widest} tokens were kept, more than top_k = {arena.slots.support}")
    arena.support[i, : len(kept)] = -1
    for row, ids in zip(arena.support[i], kept):
        row[: len(ids)] = ids
    arena.logprobs[i, : len(kept)] = logprobs


if __name__ == "__main__":
    os.set_inheritable(int(sys.argv[1]), False)
    try:
        main(int(sys.argv[1]), int(sys.argv[2]))
    except (BrokenPipeError, ConnectionResetError):
        sys.exit("the rank of this engine is gone")
    except msgspec.ValidationError as error:
        sys.exit(f"foreign message: {error}")
