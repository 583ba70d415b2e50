"""The swap protocol: what a rank sends its engine to replace all weights, and what comes back.

    rank:    Begin(version) → Bucket … Bucket → Commit          engine: Done | Failed after each

From `Begin` until a good `Commit` the engine has no version and refuses to generate. A `Failed` ends the session; the
rank may begin again from the start, never in the middle.
"""

import msgspec


class Entry(msgspec.Struct, frozen=True, array_like=True):
    """One tensor of a bucket, e.g. ("model.layers.0.mlp.down_proj.weight", "float8_e4m3fn", (128, 256), 0)."""

    name: str  # Hugging Face checkpoint name
    dtype: str  # torch name
    shape: tuple[int, ...]
    offset: int  # bytes from the start of the staging buffer


class Begin(msgspec.Struct, frozen=True, tag=True):
    version: int
    verify: bool  # compare the engine's parameters with every bucket after loading it


class Bucket(msgspec.Struct, frozen=True, tag=True):
    """`nbytes` of the staging buffer are ready; the engine may read them until it replies."""

    entries: list[Entry]
    nbytes: int
    checksum: int  # XXH3 of the staging bytes


class Commit(msgspec.Struct, frozen=True, tag=True):
    version: int
    tensors: int  # over all buckets; the engine compares with what it received
    nbytes: int


class Done(msgspec.Struct, frozen=True, tag=True):
    verified: int = 0  # Commit: engine parameters proved equal to the bytes that were sent


class Failed(msgspec.Struct, frozen=True, tag=True):
    reason: str
