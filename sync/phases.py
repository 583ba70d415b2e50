"""Memory phases: who holds memory while the engine samples, while the trainer works, and while weights cross.

    phase      engine: weights   KV cache, graphs      trainer: params   grads, optimizer
    rollout            in        in                             out      out
    train              out       out                            in       in
    sync               in (*)    out                            in       out
    start              an engine starts                         out      out

(*) undefined from their return until the swap commits: the engine's fence keeps it from generating meanwhile.

Entering a phase moves only what differs from what is in memory now, and releases before it claims, so that both owners
never hold their memory together. Nothing moves when a phase ends: entering it once more is free. What the engine holds
is derived, never assumed: a process just started holds everything, a dead one nothing. So a tag is woken only if this
very process was told to let it sleep (SGLang's scheduler dies of anything else).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal, Protocol

import msgspec

from sync.messages import Done, Failed

Part = Literal["params", "optimizer"]
PARTS: tuple[Part, ...] = ("params", "optimizer")  # gradients, optimizer state, what else only training needs
TAGS = ("weights", "kv_cache", "cuda_graph")  # SGLang's names; graphs are released only where SGLang was told so


class Engine(Protocol):
    """The engine as the phases see it. Each call waits for the reply; an engine that died or hangs answers `Failed`."""

    @property
    def alive(self) -> bool: ...
    @property
    def starts(self) -> int:
        """Processes started so far: another number, another process."""
        ...

    def sleep(self, tags: tuple[str, ...]) -> Done | Failed:
        """Gives back the memory of `tags`; what was in it is lost."""
        ...

    def wake(self, tags: tuple[str, ...]) -> Done | Failed:
        """Takes memory for `tags` again; its contents are undefined."""
        ...


class Trainer(Protocol):
    """The trainer as the phases see it; contents come back as they were."""

    def offload(self, part: Part) -> None: ...
    def onload(self, part: Part) -> None: ...


class PhaseError(RuntimeError):
    """Some rank's engine could not enter the phase; raised by all ranks alike."""


class Phase(msgspec.Struct, frozen=True):
    """What is in memory during a phase."""

    engine: frozenset[str]
    trainer: frozenset[Part]


ROLLOUT = Phase(frozenset(TAGS), frozenset())
TRAIN = Phase(frozenset(), frozenset(PARTS))
SYNC = Phase(frozenset({"weights"}), frozenset({"params"}))


class Phases:
    """One rank's memory. `rollout`, `train` and `sync` are collectives and raise PhaseError."""

    def __init__(
        self, engine: Engine, trainer: Trainer, agree: Callable[[bool], bool], measure: Callable[[str], None]
    ) -> None:
        """All of the trainer is in memory. `agree(ok)` returns whether all ranks passed True; `measure(name)` is called
        at the end of every phase that did not fail."""
        self._engine, self._trainer, self._agree, self._measure = engine, trainer, agree, measure
        self._starts = 0  # of the engine process that `_awake` speaks of
        self._awake: frozenset[str] = frozenset()
        self._in: set[Part] = set(PARTS)

    @contextmanager
    def rollout(self) -> Iterator[None]:
        """The engine samples; evaluation is a rollout too."""
        with self._phase("rollout", ROLLOUT):
            yield

    @contextmanager
    def train(self) -> Iterator[None]:
        """The trainer has everything. An engine that is dead is no obstacle."""
        with self._phase("train", TRAIN):
            yield

    @contextmanager
    def sync(self) -> Iterator[None]:
        """Weights cross."""
        with self._phase("sync", SYNC):
            yield

    @contextmanager
    def start(self) -> Iterator[None]:
        """This rank's engine starts, and measures how much memory is free. No collective."""
        self._move_trainer(frozenset())
        yield

    @contextmanager
    def _phase(self, name: str, phase: Phase) -> Iterator[None]:
        reason = self._enter(phase)
        if not self._agree(not reason):
            raise PhaseError(f"{name} phase: {reason or 'the engine of another rank failed'}")
        yield
        self._measure(name)

    def _enter(self, phase: Phase) -> str:
        """Empty, or why the engine did not follow."""
        reason = self._move_engine(self._engine.sleep, self._resident() - phase.engine)
        if reason and self._engine.alive:
            return reason  # it still holds what the trainer is about to claim
        self._move_trainer(phase.trainer)
        return self._move_engine(self._engine.wake, phase.engine - self._resident())

    def _resident(self) -> frozenset[str]:
        if not self._engine.alive:
            return frozenset()
        if self._engine.starts != self._starts:
            self._starts, self._awake = self._engine.starts, frozenset(TAGS)
        return self._awake

    def _move_engine(self, move: Callable[[tuple[str, ...]], Done | Failed], tags: frozenset[str]) -> str:
        if not tags:
            return ""
        reply = move(tuple(tag for tag in TAGS if tag in tags))
        if isinstance(reply, Failed):
            return reply.reason
        self._awake ^= tags
        return ""

    def _move_trainer(self, wanted: frozenset[Part]) -> None:
        for part in PARTS:
            if part in self._in and part not in wanted:
                self._trainer.offload(part)
                self._in.remove(part)
        for part in PARTS:
            if part in wanted and part not in self._in:
                self._trainer.onload(part)
                self._in.add(part)
