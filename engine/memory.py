"""Which parts of SGLang's memory are out, inside the child that owns the engine.

SGLang's scheduler dies of a release while it is busy, of a release of what is out already, and of a resume of what is
not. So all three are ruled out here and answered with `Failed`.
"""

import asyncio
from typing import Any

from engine.protocol import Sleep, Wake
from sync.messages import Done, Failed

_IDLE_S = 60.0  # longest wait for requests that were aborted to leave the scheduler
_POLL_S = 0.02


class Memory:
    """`asleep`: the tags whose memory is given back, or back in use with undefined contents only by `Wake`."""

    def __init__(self, manager: Any, io: Any) -> None:
        """`manager` is SGLang's TokenizerManager, `io` its module of request structs."""
        self.manager, self.io = manager, io
        self.asleep: set[str] = set()

    async def handle(self, message: Sleep | Wake) -> Done | Failed:
        tags = set(message.tags)
        if isinstance(message, Sleep):
            if again := tags & self.asleep:
                return Failed(f"asleep already: {', '.join(sorted(again))}")
            if not await self._idle():
                return Failed(f"SGLang still had requests after {_IDLE_S:.0f} s, so it gave back no memory")
            await self.manager.release_memory_occupation(self.io.ReleaseMemoryOccupationReqInput(tags=[*message.tags]))
            self.asleep |= tags
        else:
            if awake := tags - self.asleep:
                return Failed(f"awake already: {', '.join(sorted(awake))}")
            await self.manager.resume_memory_occupation(self.io.ResumeMemoryOccupationReqInput(tags=[*message.tags]))
            self.asleep -= tags
        return Done()

    async def _idle(self) -> bool:
        """A flush succeeds only when the scheduler is idle, which it is a moment after its last answer."""
        deadline = asyncio.get_running_loop().time() + _IDLE_S
        while not (await self.manager.flush_cache()).success:
            if asyncio.get_running_loop().time() > deadline:
                return False
            await asyncio.sleep(_POLL_S)
        return True
