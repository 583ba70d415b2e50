"""Packs the sequences of a Batch into micro-batches of a bounded number of tokens.

Only what the loss needs is fed: a sequence up to the token before its last sampled one (later tokens predict nothing
that was sampled), and the head runs only on rows whose next token was sampled. Sequences are sorted by length first, so
that neighbours in a micro-batch need little padding where the attention kernel pads (CPU).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sync.batch import Batch
from trainer.attention import Layout, layout_of


@dataclass(frozen=True)
class MicroBatch:
    """n sequences, T fed tokens, R rows whose next token was sampled.

    Example: the sequence [p p s s] feeds [p p s], and its rows 1 and 2 predict the two sampled tokens.
    """

    tokens: Tensor  # i64[T]
    positions: Tensor  # i64[T] position inside its own sequence
    layout: Layout
    rows: Tensor  # i64[R] indices into tokens
    targets: Tensor  # i64[R] the sampled next token
    support: Tensor | None  # i64[R, S] candidates of the sampler, -1 pads
    sequence: Tensor  # i64[R] index into `sequences`
    sequences: NDArray[Any]  # i64[n] indices into the batch
    source: NDArray[Any]  # i64[R] index of the sampled token in the batch's token columns

    def to(self, device: torch.device) -> "MicroBatch":
        """The same micro-batch with its tensors on `device`."""
        moved = {
            name: None if value is None else value.to(device)
            for name in ("tokens", "positions", "layout", "rows", "targets", "support", "sequence")
            for value in [getattr(self, name)]
        }
        return replace(self, **moved)


def micro_batches(batch: Batch, sequences: Sequence[int] | NDArray[Any], token_budget: int) -> list[MicroBatch]:
    """Micro-batches of at most `token_budget` fed tokens that hold each of `sequences` (indices) once, longest first.

    A longer sequence gets a micro-batch of its own; a sequence without sampled tokens is left out. Raises ValueError if
    a first token is marked as sampled (nothing predicts it) or a sampled token is outside its own support.
    """
    index = np.asarray(sequences, np.int64)
    starts = batch.starts.astype(np.int64)
    if batch.sampled[starts[:-1]].any():
        raise ValueError("the first token of a sequence cannot be sampled: nothing precedes it")
    last_sampled = np.full(batch.n_sequences, -1)
    where = np.flatnonzero(batch.sampled)
    last_sampled[batch.sequence_ids[where]] = where  # the last write per sequence wins
    fed = np.maximum(last_sampled - starts[:-1], 0)[index]
    order = np.argsort(-fed, kind="stable")
    index, fed = index[order][: np.count_nonzero(fed)], fed[order][: np.count_nonzero(fed)]
    result, first = [], 0
    while first < len(index):
        total = np.cumsum(fed[first:])
        count = max(1, int(np.searchsorted(total, token_budget, side="right")))
        result.append(_micro_batch(batch, index[first : first + count], fed[first : first + count]))
        first += count
    return result


def demonstrations(pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> Batch:
    """A Batch of (prompt ids, response ids), one group each, whose response tokens count as sampled; no rewards.

    Raises ValueError for an empty prompt or response.
    """
    if any(not len(prompt) or not len(response) for prompt, response in pairs):
        raise ValueError("a demonstration needs at least one prompt token and one response token")
    n = len(pairs)
    starts = np.concatenate([[0], np.cumsum([len(prompt) + len(response) for prompt, response in pairs])])
    flags = [np.arange(len(prompt) + len(response)) >= len(prompt) for prompt, response in pairs]
    return Batch(
        tokens=np.array([token for pair in pairs for part in pair for token in part], np.int32),
        starts=starts.astype(np.int32),
        sampled=np.concatenate(flags) if flags else np.empty(0, bool),
        logprobs=np.zeros(int(starts[-1]), np.float32),
        rewards=np.zeros(n, np.float32),
        groups=np.arange(n, dtype=np.int32),
        versions=np.zeros(n, np.int32),
        finish=np.zeros(n, np.uint8),
    )


def empty_micro_batch() -> MicroBatch:
    """One token and no rows: lets a rank with nothing left to do take part in the collectives of the forward."""
    none = torch.empty(0, dtype=torch.int64)
    zero = torch.zeros(1, dtype=torch.int64)
    return MicroBatch(
        tokens=zero, positions=zero, layout=layout_of(np.ones(1, np.int64)), rows=none, targets=none, support=None,
        sequence=none, sequences=np.empty(0, np.int64), source=np.empty(0, np.int64),
    )  # fmt: skip


def _micro_batch(batch: Batch, index: NDArray[Any], fed: NDArray[Any]) -> MicroBatch:
    packed_starts = np.concatenate([[0], np.cumsum(fed)])
    positions = np.arange(packed_starts[-1]) - np.repeat(packed_starts[:-1], fed)
    token_index = np.repeat(batch.starts[index].astype(np.int64), fed) + positions
    rows = np.flatnonzero(batch.sampled[token_index + 1])
    source = token_index[rows] + 1
    support = None
    if batch.support is not None:
        support = batch.support[source].astype(np.int64)
        outside = ~(support == batch.tokens[source][:, None]).any(1)
        if outside.any():
            raise ValueError(f"sampled token {int(source[outside.argmax()])} of the batch is outside its own support")
        support = torch.from_numpy(support)
    return MicroBatch(
        tokens=torch.from_numpy(batch.tokens[token_index].astype(np.int64)),
        positions=torch.from_numpy(positions),
        layout=layout_of(fed),
        rows=torch.from_numpy(rows),
        targets=torch.from_numpy(batch.tokens[source].astype(np.int64)),
        support=support,
        sequence=torch.from_numpy(np.repeat(np.arange(len(index)), fed)[rows]),
        sequences=index,
        source=source,
    )
