"""The child process of a rank that owns `sglang.Engine`: `python -m engine.child FD PARENT`.

SGLang kills the process that created the engine when one of its schedulers fails, so that process must not be the
trainer. It serves one channel and ends when that closes.
"""

import asyncio
import base64
import ctypes
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from engine.memory import Memory
from engine.protocol import (
    Arena,
    Finished,
    Generate,
    Generated,
    Ready,
    Sampling,
    Sleep,
    Start,
    Stop,
    ToChild,
    Wake,
)
from engine.updater import LOADER, Updater
from sync.batch import FINISH_REASONS
from sync.channel import Channel
from sync.messages import Failed, ToEngine
from sync.receive import Receiver
from sync.shm import SharedBytes

_ANNOUNCE_S = 0.004  # finished samples are announced together, to spare the rank a message each
_PR_SET_PDEATHSIG = 1


def main(fd: int, parent: int) -> None:
    """Serves the channel on descriptor `fd` until it closes. The kernel ends the process with its `parent`."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return  # the parent was gone before the kernel knew whom to watch
    channel: Channel[Any] = Channel(socket.socket(fileno=fd), ToChild)
    start, _ = channel.receive()
    assert isinstance(start, Start), start
    import sglang

    engine = sglang.Engine(**start.server_args, custom_weight_loader=[LOADER], random_seed=start.seed)
    child = _Child(engine, channel, Path(start.reports))
    channel.send(Ready(sglang.__version__))
    engine.loop.run_until_complete(child.serve())
    engine.shutdown()


class _Child:
    def __init__(self, engine: Any, channel: "Channel[Any]", reports: Path):
        from sglang.srt.managers import io_struct

        self.engine, self.channel, self.io = engine, channel, io_struct
        self.receiver = Receiver(Updater(engine.tokenizer_manager, reports))
        self.memory = Memory(engine.tokenizer_manager, io_struct)
        self.finished: list[int] = []

    async def serve(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            message, fds = await loop.run_in_executor(None, self.channel.receive)
            if message is None or isinstance(message, Stop):
                return
            if isinstance(message, Generate):
                await self._generate(message, SharedBytes.attach(fds[0]))
            elif isinstance(message, Sleep | Wake):
                if "weights" in message.tags:
                    self.receiver.fence()  # until a swap has brought them back
                self.channel.send(await self.memory.handle(message))
            elif "weights" in self.memory.asleep:
                self.channel.send(Failed("the engine's weights are asleep: there is no memory to write them to"))
            elif isinstance(message, ToEngine):
                self.channel.send(await self.receiver.handle(message))

    async def _generate(self, message: Generate, memory: SharedBytes) -> None:
        if self.receiver.version is None:
            self.channel.send(Failed("the engine is fenced: no committed weights since the last swap began"))
            memory.close()
            return
        if self.memory.asleep:
            self.channel.send(Failed(f"the engine sleeps: {', '.join(sorted(self.memory.asleep))}"))
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
