"""What a rank and its engine child say to each other, and the shared-memory arena in which samples cross.

A `Generate` message carries an arena: the rank has written the prompts into it, the child writes each finished sample
into the sample's own slot and announces it. Only sample numbers travel in messages; tokens, log-probs and routed
experts are columns that both ends see. Swap messages are `sync.messages`.
"""

from typing import Any

import msgspec
import numpy as np
from numpy.typing import DTypeLike, NDArray

from sync.messages import FromEngine, ToEngine
from sync.shm import SharedBytes, layout


class Sampling(msgspec.Struct, frozen=True):
    """How tokens are drawn, in SGLang's terms. `top_k` 0 and `top_p` 1 keep every token."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop_token_ids: tuple[int, ...] = ()
    support: int = 0  # candidates recorded per token (the kept ones); 0 records none


class Start(msgspec.Struct, frozen=True, tag=True):
    """First message."""

    server_args: dict[str, Any]
    seed: int
    reports: str  # directory for the answers of SGLang's processes to swap commands
    ranks: int = 1  # that share the engine: so many channels to serve


class Join(msgspec.Struct, frozen=True, tag=True):
    """First message of a rank that shares the engine which another rank started. Answered by Ready, like Start."""

    place: int  # of the rank among those of the engine


class Ready(msgspec.Struct, frozen=True, tag=True):
    sglang: str  # version


class Slots(msgspec.Struct, frozen=True):
    """Sizes from which both ends compute the same arena."""

    samples: int
    prompt_tokens: int  # over all samples
    max_tokens: int  # sampled tokens per sample
    layers: int = 0  # of routed experts; 0: none are recorded
    top_k: int = 0
    wide: bool = False  # more than 255 experts: i16 instead of u8
    support: int = 0


class Generate(msgspec.Struct, frozen=True, tag=True):
    """Comes with the descriptor of the arena."""

    slots: Slots
    sampling: Sampling


class Finished(msgspec.Struct, frozen=True, tag=True):
    samples: list[int]


class Generated(msgspec.Struct, frozen=True, tag=True):
    """All samples of the last `Generate` have been announced."""


class Sleep(msgspec.Struct, frozen=True, tag=True):
    """Give back the memory of SGLang's `tags` and forget what is in it. Answered by Done or Failed, like `Wake`."""

    tags: tuple[str, ...]


class Wake(msgspec.Struct, frozen=True, tag=True):
    """Take memory for `tags` again; weights are undefined until a swap commits."""

    tags: tuple[str, ...]


class Skip(msgspec.Struct, frozen=True, tag=True):
    """Instead of a swap message, from a rank that has a problem, to the other ranks of the engine: Failed for all."""


class Stop(msgspec.Struct, frozen=True, tag=True):
    pass


ToChild = Start | Join | Generate | Sleep | Wake | Skip | Stop | ToEngine
FromChild = Ready | Finished | Generated | FromEngine


class Arena:
    """Columns of one generation (shape letters: N samples, P prompt tokens in all, M `max_tokens`, S `support`)."""

    def __init__(self, memory: SharedBytes, slots: Slots):
        columns, offsets, _ = _columns(slots)
        view: dict[str, NDArray[Any]] = {n: memory.array(offsets[n], *columns[n]) for n in columns}
        self.slots = slots
        self.prompts, self.prompt_starts = view["prompts"], view["prompt_starts"]
        self.tokens, self.logprobs = view["tokens"], view["logprobs"]
        self.lengths, self.finish, self.versions = view["lengths"], view["finish"], view["versions"]
        self.experts, self.support = view["experts"], view["support"]

    @classmethod
    def create(cls, slots: Slots) -> tuple["Arena", SharedBytes]:
        memory = SharedBytes(_columns(slots)[2])
        return cls(memory, slots), memory

    def prompt(self, sample: int) -> NDArray[Any]:
        """i32[prompt length] of one sample."""
        return self.prompts[self.prompt_starts[sample] : self.prompt_starts[sample + 1]]

    def expert_rows(self, sample: int, rows: int) -> NDArray[Any]:
        """u8 or i16 [rows, L, K]: room for the prompt and every sampled token of one sample."""
        start = int(self.prompt_starts[sample]) + sample * self.slots.max_tokens
        return self.experts[start : start + rows]


def _columns(s: Slots) -> tuple[dict[str, tuple[DTypeLike, tuple[int, ...]]], dict[str, int], int]:
    columns: dict[str, tuple[DTypeLike, tuple[int, ...]]] = {
        "prompts": (np.int32, (s.prompt_tokens,)),
        "prompt_starts": (np.int32, (s.samples + 1,)),
        "tokens": (np.int32, (s.samples, s.max_tokens)),
        "logprobs": (np.float32, (s.samples, s.max_tokens)),
        "lengths": (np.int32, (s.samples,)),
        "finish": (np.uint8, (s.samples,)),
        "versions": (np.int32, (s.samples,)),
        "experts": (
            np.int16 if s.wide else np.uint8,
            (s.prompt_tokens + s.samples * s.max_tokens, s.layers, s.top_k),
        ),
        "support": (np.int32, (s.samples, s.max_tokens, s.support)),
    }
    offsets, size = layout(columns)
    return columns, offsets, size
