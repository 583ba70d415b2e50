"""The child process that owns `sglang.Engine`, for one rank or several: `python -m engine.child FD PARENT [LISTENER]`.

SGLang kills the process that created the engine when one of its schedulers fails, so that process must not be the
trainer. It serves one channel per rank and ends when any of them closes.
"""

import asyncio
import ctypes
import os
import signal
import socket
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

from engine.generation import Generation
from engine.memory import Memory
from engine.protocol import Generate, Ready, Sleep, Start, Stop, ToChild, Wake
from engine.team import accept, merge, split
from engine.updater import LOADER, Updater
from sync.channel import Channel
from sync.messages import Failed, FromEngine
from sync.receive import Receiver
from sync.shm import SharedBytes

_PR_SET_PDEATHSIG = 1


def main(fd: int, parent: int, listener: int | None = None) -> None:
    """Serves the channel on descriptor `fd`, and those of the ranks that connect to `listener`, until one closes.

    The kernel ends the process with its `parent`.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return  # the parent was gone before the kernel knew whom to watch
    channels: list[Channel[Any]] = [Channel(socket.socket(fileno=fd), ToChild)]
    start, _ = channels[0].receive()
    assert isinstance(start, Start), start
    import sglang

    engine = sglang.Engine(**start.server_args, custom_weight_loader=[LOADER], random_seed=start.seed)
    if listener is not None:
        channels += accept(socket.socket(fileno=listener), start.ranks)
    child = _Child(engine, channels, Path(start.reports))
    for channel in channels:
        channel.send(Ready(sglang.__version__))
    engine.loop.run_until_complete(child.serve())
    engine.shutdown()


class _Child:
    """Generations of different ranks run side by side; while a round acts on the engine, nothing else does."""

    def __init__(self, engine: Any, channels: "Sequence[Channel[Any]]", reports: Path):
        from sglang.srt.managers import io_struct

        self.manager, self.io, self.channels = engine.tokenizer_manager, io_struct, channels
        self.receiver = Receiver(Updater(self.manager, reports))
        self.memory = Memory(self.manager, io_struct)
        self.rounds: list[asyncio.Queue[Any]] = [asyncio.Queue() for _ in channels]  # messages not yet acted on
        self.generating = 0  # ranks
        self.changed = asyncio.Condition()  # held while a round acts on the engine; notified when a generation ends

    async def serve(self) -> None:
        """Until a rank says Stop or is gone."""
        with ThreadPoolExecutor(len(self.channels)) as threads:  # asyncio's own may be fewer than the channels
            tasks = [asyncio.create_task(self._act_on_rounds())]
            tasks += [asyncio.create_task(self._read(place, threads)) for place in range(len(self.channels))]
            try:
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
            finally:
                for channel in self.channels:
                    channel.hang_up()  # its thread waits for a message
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)  # the first to end has said why

    async def _read(self, place: int, threads: ThreadPoolExecutor) -> None:
        channel = self.channels[place]
        while True:
            message, fds = await asyncio.get_running_loop().run_in_executor(threads, channel.receive)
            if message is None or isinstance(message, Stop):
                return
            if isinstance(message, Generate):
                await self._generate(channel, message, SharedBytes.attach(fds[0]))
            else:
                self.rounds[place].put_nowait(message)

    async def _act_on_rounds(self) -> None:
        while True:
            messages = [await queue.get() for queue in self.rounds]
            async with self.changed:
                await self.changed.wait_for(lambda: not self.generating)
                reply = await self._act(messages)
            for channel, answer in zip(self.channels, split(reply, len(self.channels)), strict=True):
                channel.send(answer)

    async def _act(self, messages: list[Any]) -> FromEngine:
        try:
            message = merge(messages)
        except ValueError as error:
            self.receiver.fence()
            return Failed(str(error))
        if isinstance(message, Sleep | Wake):
            if "weights" in message.tags:
                self.receiver.fence()  # until a swap has brought them back
            return await self.memory.handle(message)
        if "weights" in self.memory.asleep:
            return Failed("the engine's weights are asleep: there is no memory to write them to")
        return await self.receiver.handle(message)

    async def _generate(self, channel: "Channel[Any]", message: Generate, memory: SharedBytes) -> None:
        async with self.changed:
            self.generating += 1
        try:
            if self.receiver.version is None:
                channel.send(Failed("the engine is fenced: no committed weights since the last swap began"))
            elif self.memory.asleep:
                channel.send(Failed(f"the engine sleeps: {', '.join(sorted(self.memory.asleep))}"))
            else:
                await Generation(self.manager, self.io, channel, message, memory).run(self.receiver.version)
        finally:
            memory.close()
            async with self.changed:
                self.generating -= 1
                self.changed.notify_all()


if __name__ == "__main__":
    descriptors = [int(sys.argv[1]), *map(int, sys.argv[3:])]
    for descriptor in descriptors:
        os.set_inheritable(descriptor, False)
    try:
        main(descriptors[0], int(sys.argv[2]), *descriptors[1:])
    except (BrokenPipeError, ConnectionResetError):
        sys.exit("a rank of this engine is gone")
    except msgspec.ValidationError as error:
        sys.exit(f"foreign message: {error}")
