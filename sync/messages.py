"""The swap protocol: what a rank sends its engine to replace all weights, and what comes back.

    rank:    Begin → [Record → Attach] → Bucket … Bucket → Commit          engine: Done | Recorded | Failed after each

`Record` and `Attach` come once per engine process (and again when its parameters changed): they make the copy plan
(sync/plan.py). From `Begin` until a good `Commit` the engine has no version and refuses to generate. A `Failed` ends
the session; the rank may begin again from the start, never in the middle.

An engine with tensor parallelism has several processes, each with a staging buffer of its own, filled by the rank it
shares a GPU with; lists below have one element per process. Large arrays travel as files beside the engine's log.
"""

import msgspec


class Entry(msgspec.Struct, frozen=True, array_like=True):
    """One tensor as SGLang's loader gets it, e.g. ("model.layers.0.mlp.down_proj.weight", "float8_e4m3fn", (128, 256)).

    Its number in the list of all entries is its name in the plan.
    """

    name: str  # Hugging Face checkpoint name
    dtype: str  # torch name
    shape: tuple[int, ...]


class Begin(msgspec.Struct, frozen=True, tag=True):
    version: int
    verify: bool  # compare the engine's parameters with what SGLang's own loader would have made of the buckets


class Record(msgspec.Struct, frozen=True, tag=True):
    """Run SGLang's loader on `entries` without moving a byte, and note what it would copy where."""

    entries: list[Entry]
    plan: bool  # False: note nothing, every tensor goes through SGLang's own loader (sync.method = stock)


class Recorded(msgspec.Struct, frozen=True, tag=True):
    files: list[str]  # one `sync.plan.Recording` (msgpack) per engine process


class Attach(msgspec.Struct, frozen=True, tag=True):
    """How the buckets of every later swap are laid out."""

    stagings: list[list]  # handles, see sync/staging.py
    files: list[str]  # one `sync.plan.Arrivals` (msgpack) per engine process


class Bucket(msgspec.Struct, frozen=True, tag=True):
    """Bucket `number` lies in half `number % 2` of every staging buffer; the engine may read it until it replies."""

    number: int
    checksums: list[int]  # of the bytes of the bucket, one per engine process


class Commit(msgspec.Struct, frozen=True, tag=True):
    version: int
    buckets: int
    nbytes: list[int]  # over all buckets; every engine process compares with what it copied


class Done(msgspec.Struct, frozen=True, tag=True):
    verified: int = 0  # Commit: engine parameters proved equal to what SGLang's own loader would have written


class Failed(msgspec.Struct, frozen=True, tag=True):
    reason: str


ToEngine = Begin | Record | Attach | Bucket | Commit
FromEngine = Done | Recorded | Failed
