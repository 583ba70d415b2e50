"""Shares a Batch out over updates, and packs sequences into micro-batches of a bounded number of tokens.

Only what the loss needs is fed, and once: a sequence up to the token before its last sampled one (later tokens predict
nothing that was sampled); a prompt that several sequences share a single time (in a causal model its hidden states are
the same for all of them, and their gradients add up). The head runs only on rows whose next token was sampled.
Families of similar length come together, so that little padding is needed where the attention kernel pads (CPU).
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

    Example: the sequences [p q s t] and [p q u] of one prompt feed [p q s]; rows 1 and 2 predict s and t, row 1 u.
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


@dataclass
class _Family:
    """Sequences with the same prompt, longest first, and how many tokens they feed."""

    members: NDArray[Any]  # i64 indices into the batch
    prompt: int  # tokens before the first sampled one
    tails: NDArray[Any]  # i64 fed tokens after the prompt, per member

    def fitting(self, tokens: int, slots: int) -> int:
        """How many members, the longest first, feed at most `tokens` tokens and fill at most `slots` slots."""
        fed, filled = self.prompt + np.cumsum(self.tails), np.cumsum(self.prompt + self.tails)
        return int(((fed <= tokens) & (filled <= slots)).sum())

    def split(self, count: int) -> "tuple[_Family, _Family]":
        """The first `count` members, and the rest."""
        return (
            _Family(self.members[:count], self.prompt, self.tails[:count]),
            _Family(self.members[count:], self.prompt, self.tails[count:]),
        )


def update_shares(batch: Batch, updates: int) -> list[NDArray[Any]]:
    """Indices of the sequences of each of `updates` updates: whole groups, so that each prompt is fed in one update.

    Neighbouring groups stay together; their numbers differ by at most one. With fewer groups than updates, sequences
    are shared out instead.
    """
    groups, group = np.unique(batch.groups, return_inverse=True)
    if len(groups) < updates:
        return np.array_split(np.arange(batch.n_sequences), updates)
    return [np.flatnonzero(group * updates // len(groups) == update) for update in range(updates)]


def micro_batches(
    batch: Batch, sequences: Sequence[int] | NDArray[Any], token_budget: int, padded: bool
) -> list[MicroBatch]:
    """Micro-batches of at most `token_budget` fed tokens that hold each of `sequences` (indices) once, longest first.

    Attention unpacks shared prompts into slots again: prompt and tail of every member. They are bounded too, by twice
    the budget (before padding). A longer sequence gets a micro-batch of its own; one without sampled tokens is left
    out. `padded`: as
    `attention.needs_padding` says. Raises ValueError if a first token is marked as sampled (nothing predicts it) or a
    sampled token is outside its own support.
    """
    result: list[MicroBatch] = []
    current: list[_Family] = []
    room = slots = 0  # fed tokens and slots that `current` has left
    for rest in _families(batch, np.asarray(sequences, np.int64)):
        whole = len(rest.members) == rest.fitting(token_budget, 2 * token_budget)
        while len(rest.members):
            count = rest.fitting(room, slots)
            if current and (not count or (whole and count < len(rest.members))):
                result.append(_micro_batch(batch, current, padded))
                current = []
            if not current:
                room, slots = token_budget, 2 * token_budget
                count = max(1, rest.fitting(room, slots))
            part, rest = rest.split(count)
            current.append(part)
            room -= part.prompt + int(part.tails.sum())
            slots -= int((part.prompt + part.tails).sum())
    if current:
        result.append(_micro_batch(batch, current, padded))
    return result


def _families(batch: Batch, index: NDArray[Any]) -> list[_Family]:
    """The families among the given sequences that have sampled tokens, the one with the longest member first."""
    starts = batch.starts.astype(np.int64)
    if batch.sampled[starts[:-1]].any():
        raise ValueError("the first token of a sequence cannot be sampled: nothing precedes it")
    where = np.flatnonzero(batch.sampled)
    sequence = batch.sequence_ids[where]
    first, last = np.full(batch.n_sequences, -1), np.full(batch.n_sequences, -1)
    first[sequence[::-1]], last[sequence] = where[::-1], where  # the last write of a sequence wins
    found: dict[tuple[int, bytes], list[int]] = {}
    for i in index[first[index] >= 0].tolist():
        found.setdefault((int(batch.groups[i]), batch.tokens[starts[i] : first[i]].tobytes()), []).append(i)
    families = []
    for members_list in found.values():
        members = np.array(members_list)
        tails = last[members] - first[members]
        order = np.argsort(-tails, kind="stable")
        families.append(_Family(members[order], int(first[members[0]] - starts[members[0]]), tails[order]))
    return sorted(families, key=lambda family: -(family.prompt + int(family.tails[0])))


def _ranges(starts: NDArray[Any], lengths: NDArray[Any]) -> NDArray[Any]:
    """arange(s, s + n) of every start and length, one after the other."""
    ends = np.cumsum(lengths)
    return np.arange(ends[-1] if len(ends) else 0) + np.repeat(starts - (ends - lengths), lengths)


def demonstrations(pairs: Sequence[tuple[NDArray[Any], NDArray[Any]]]) -> Batch:
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


def empty_micro_batch(padded: bool) -> MicroBatch:
    """One token and no rows: lets a rank with nothing left to do take part in the collectives of the forward."""
    none = torch.empty(0, dtype=torch.int64)
    zero = torch.zeros(1, dtype=torch.int64)
    return MicroBatch(
        tokens=zero,
        positions=zero,
        layout=layout_of(np.zeros(1, np.int64), np.ones(1, np.int64), padded),
        rows=none,
        targets=none,
        support=None,
        sequence=none,
        sequences=np.empty(0, np.int64),
        source=np.empty(0, np.int64),
    )


def _micro_batch(batch: Batch, families: list[_Family], padded: bool) -> MicroBatch:
    """Packs [prompt, tail, tail, …] of every family."""
    starts = batch.starts.astype(np.int64)
    members = np.concatenate([family.members for family in families])
    prompts = np.concatenate([np.full(len(family.members), family.prompt) for family in families])
    tails = np.concatenate([family.tails for family in families])
    leader = np.concatenate([np.arange(len(family.members)) == 0 for family in families])
    # Packed row at which each member's tail and its family's prompt begin.
    own = tails + np.where(leader, prompts, 0)
    tail_at = np.cumsum(own) - tails
    prompt_at = (tail_at - prompts)[leader][np.cumsum(leader) - 1]

    # From here on longest first. Pieces alternate: prompt of a member, tail of a member.
    order = np.argsort(-(prompts + tails), kind="stable")
    members, prompts, tails = members[order], prompts[order], tails[order]
    lengths = prompts + tails
    pieces = np.stack([prompt_at[order], tail_at[order]], 1).reshape(-1)
    rows_of_slots = _ranges(pieces, np.stack([prompts, tails], 1).reshape(-1))
    tokens_of_slots = _ranges(starts[members], lengths)
    fed = np.empty(own.sum(), np.int64)  # batch index of every packed token
    fed[rows_of_slots] = tokens_of_slots
    predicts = np.flatnonzero(batch.sampled[tokens_of_slots + 1])
    source = tokens_of_slots[predicts] + 1
    return MicroBatch(
        tokens=torch.from_numpy(batch.tokens[fed].astype(np.int64)),
        positions=torch.from_numpy(fed - starts[batch.sequence_ids[fed]]),
        layout=layout_of(rows_of_slots, lengths, padded),
        rows=torch.from_numpy(rows_of_slots[predicts]),
        targets=torch.from_numpy(batch.tokens[source].astype(np.int64)),
        support=_support(batch, source),
        sequence=torch.from_numpy(np.repeat(np.arange(len(members)), lengths)[predicts]),
        sequences=members,
        source=source,
    )


def _support(batch: Batch, source: NDArray[Any]) -> Tensor | None:
    if batch.support is None:
        return None
    support = batch.support[source].astype(np.int64)
    outside = ~(support == batch.tokens[source][:, None]).any(1)
    if outside.any():
        raise ValueError(f"sampled token {int(source[outside.argmax()])} of the batch is outside its own support")
    return torch.from_numpy(support)
