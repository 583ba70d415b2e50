"""The rollout batch: packed numpy columns, the one thing that travels from the engine to the trainer.

The engine fills every column once, `check()` proves the invariants once, and nobody mutates them afterwards. Columns
rather than per-token Python lists: 524k tokens cross in 0.6 ms instead of 187 ms.

Shape letters: N sequences, T tokens over all sequences, L layers, K experts per token, S kept candidates per token.
Example with two sequences of 3 and 4 tokens:

    tokens  = [p p s | p s s s]        starts = [0, 3, 7]
    sampled = [0 0 1 | 0 1 1 1]        logprobs = [0 0 x | 0 x x x]
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

FINISH_REASONS = ("stop", "length", "abort")
NATIVE_EXPERT = 255  # u8 sentinel of `experts`: no record, route natively


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """N whole sequences (prompt and response), packed one after the other."""

    tokens: NDArray[Any]  # i32[T]   prompt and response ids; filled by the engine
    starts: NDArray[Any]  # i32[N+1] sequence i is tokens[starts[i]:starts[i+1]]
    sampled: NDArray[Any]  # bool[T]  True where the policy sampled the token (what the loss sees)
    logprobs: NDArray[Any]  # f32[T]   log-prob of the token under the rollout policy; 0 where not sampled
    rewards: NDArray[Any]  # f32[N]   task reward
    groups: NDArray[Any]  # i32[N]   sequences of one prompt share a group
    versions: NDArray[Any]  # i32[N]   weight version that sampled the sequence
    finish: NDArray[Any]  # u8[N]    index into FINISH_REASONS
    experts: NDArray[Any] | None = None  # u8[T,L,K], or i16 with -1 above 255 experts; None for dense models
    support: NDArray[Any] | None = None  # i32[T,S] candidate ids the sampler could choose from, -1 pads; None: full

    @property
    def n_sequences(self) -> int:
        return len(self.starts) - 1

    @property
    def n_tokens(self) -> int:
        return len(self.tokens)

    @property
    def lengths(self) -> NDArray[Any]:
        """Tokens per sequence, i64[N], prompt included."""
        return np.diff(self.starts.astype(np.int64))

    @property
    def sampled_lengths(self) -> NDArray[Any]:
        """Sampled tokens per sequence, i64[N]."""
        total = np.concatenate([[0], np.cumsum(self.sampled, dtype=np.int64)])
        return total[self.starts[1:]] - total[self.starts[:-1]]

    @property
    def sequence_ids(self) -> NDArray[Any]:
        """Sequence index of every token, i64[T]."""
        return np.repeat(np.arange(self.n_sequences), self.lengths)

    def check(self) -> "Batch":
        """Returns self; raises ValueError naming the column, or the sample with a non-finite log-prob or reward."""
        n, t = self.n_sequences, self.n_tokens
        expected = {
            "tokens": (np.int32, (t,)), "starts": (np.int32, (n + 1,)), "sampled": (np.bool_, (t,)),
            "logprobs": (np.float32, (t,)), "rewards": (np.float32, (n,)), "groups": (np.int32, (n,)),
            "versions": (np.int32, (n,)), "finish": (np.uint8, (n,)),
        }  # fmt: skip
        for name, (dtype, shape) in expected.items():
            column = getattr(self, name)
            if column.dtype != dtype or column.shape != shape:
                raise ValueError(
                    f"batch column {name}: {column.dtype}{list(column.shape)}, not {np.dtype(dtype)}{list(shape)}"
                )
        for name in ("experts", "support"):
            column = getattr(self, name)
            if column is not None and len(column) != t:
                raise ValueError(f"batch column {name}: {len(column)} rows for {t} tokens")
        if self.starts[0] != 0 or self.starts[-1] != t or (np.diff(self.starts) <= 0).any():
            raise ValueError("batch column starts: must rise strictly from 0 to the number of tokens")
        if bad := np.flatnonzero(~np.isfinite(self.logprobs)).tolist():
            sample = int(np.searchsorted(self.starts, bad[0], side="right")) - 1
            raise ValueError(
                f"sample {sample} has a non-finite log-prob at its token {bad[0] - int(self.starts[sample])}"
            )
        if bad := np.flatnonzero(~np.isfinite(self.rewards)).tolist():
            raise ValueError(f"sample {bad[0]} has a non-finite reward")
        if n and (self.finish >= len(FINISH_REASONS)).any():
            raise ValueError("batch column finish: unknown finish reason")
        return self

    def select(self, sequences: Sequence[int] | NDArray[Any]) -> "Batch":
        """The given sequences, in the given order."""
        index = np.asarray(sequences, np.int64)
        lengths = self.lengths[index]
        starts = np.concatenate([[0], np.cumsum(lengths)])
        rows = np.repeat(self.starts[index] - starts[:-1], lengths) + np.arange(starts[-1])
        per_token = {
            name: None if column is None else column[rows]
            for name in ("tokens", "sampled", "logprobs", "experts", "support")
            for column in [getattr(self, name)]
        }
        per_sequence = {name: getattr(self, name)[index] for name in ("rewards", "groups", "versions", "finish")}
        return Batch(starts=starts.astype(np.int32), **per_token, **per_sequence)

    def save(self, path: Path) -> None:
        """Writes an uncompressed .npz."""
        columns = {name: getattr(self, name) for name in self.__struct_fields__}
        np.savez(path, **{name: column for name, column in columns.items() if column is not None})

    @staticmethod
    def load(path: Path) -> "Batch":
        """Reads what `save` wrote; never unpickles."""
        with np.load(path, allow_pickle=False) as columns:
            return Batch(**dict(columns)).check()


def empty() -> Batch:
    """No sequences: what a rank that sampled nothing usable hands to the trainer."""
    dtypes = {
        "tokens": np.int32, "sampled": np.bool_, "logprobs": np.float32, "rewards": np.float32, "groups": np.int32,
        "versions": np.int32, "finish": np.uint8,
    }  # fmt: skip
    return Batch(starts=np.zeros(1, np.int32), **{name: np.empty(0, dtype) for name, dtype in dtypes.items()})


def concat(batches: Sequence[Batch]) -> Batch:
    """All sequences of `batches` in order. Groups must already be unique across them.

    Raises ValueError for no batches, or where some but not all carry `experts` or `support`.
    """
    if not batches:
        raise ValueError("concat needs at least one batch")
    columns: dict[str, Any] = {}
    for name in Batch.__struct_fields__:
        parts = [getattr(batch, name) for batch in batches]
        if name == "starts":
            offsets = np.concatenate([[0], np.cumsum([batch.n_tokens for batch in batches])])
            parts = [part[1:] + offset for part, offset in zip(parts, offsets, strict=False)]
            columns[name] = np.concatenate([[0], *parts]).astype(np.int32)
        elif any(part is None for part in parts):
            if not all(part is None for part in parts):
                raise ValueError(f"batch column {name}: present in some batches only")
            columns[name] = None
        else:
            columns[name] = np.concatenate(parts)
    return Batch(**columns)
