"""Packing: every sampled token is predicted exactly once, from its own context, within the budget."""

from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from trainer_cases import random_batch

from trainer.attention import layout_of, packed_attention
from trainer.pack import demonstrations, empty_micro_batch, micro_batches, update_shares


def contexts(micro):
    """The tokens each row may look at, read off the slots of the layout, keyed by the batch index of its target."""
    found = {}
    bounds = micro.layout.cu_seqlens.tolist()
    for a, b in pairwise(bounds):  # dense slots
        rows = micro.layout.gather[a:b]
        assert micro.positions[rows].tolist() == list(range(b - a))
        for end in range(b - a):
            found.setdefault(int(rows[end]), []).append(micro.tokens[rows[: end + 1]].tolist())
    return [found[int(row)] for row in micro.rows]


@pytest.mark.parametrize("budget", [1, 25, 60, 10_000])
@pytest.mark.parametrize("gaps", [False, True])
def test_every_sampled_token_is_predicted_once_from_its_context(budget, gaps):
    batch = random_batch(seed=3, groups=5, gaps=gaps)
    sequences = np.array([1, 2, 3, 4, 5, 7, 9, 14, 18, 19])
    micros = micro_batches(batch, sequences, budget, padded=False)
    seen = np.concatenate([micro.source for micro in micros])
    wanted = np.flatnonzero(batch.sampled & np.isin(batch.sequence_ids, sequences))
    assert sorted(seen.tolist()) == wanted.tolist()
    for micro in micros:
        assert len(micro.tokens) <= budget or len(micro.sequences) == 1
        assert (micro.targets.numpy() == batch.tokens[micro.source]).all()
        assert (micro.sequences[micro.sequence] == batch.sequence_ids[micro.source]).all()
        for source, allowed in zip(micro.source, contexts(micro)):
            start = batch.starts[batch.sequence_ids[source]]
            assert all(context == batch.tokens[start:source].tolist() for context in allowed)


def test_a_shared_prompt_is_fed_once_and_only_within_its_group():
    batch = random_batch(groups=2, per_group=4)
    fed = sum(len(micro.tokens) for micro in micro_batches(batch, range(8), 10_000, padded=True))
    prompts = batch.lengths - batch.sampled_lengths
    assert fed == (batch.sampled_lengths - 1).sum() + prompts[[0, 4]].sum()


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 6), st.integers(1, 16), st.integers(1, 120), st.booleans())
def test_tokens_and_attention_slots_are_bounded(seed, groups, per_group, budget, padded):
    """Also where many short responses share a long prompt: few fed tokens, many slots."""
    batch = random_batch(seed, groups, per_group)
    micros = micro_batches(batch, range(batch.n_sequences), budget, padded)
    assert sorted(np.concatenate([m.sequences for m in micros]).tolist()) == list(range(batch.n_sequences))
    for micro in micros:
        slots = int(micro.layout.cu_seqlens[-1])
        assert slots == (batch.lengths[micro.sequences] - 1).sum()
        assert len(micro.sequences) == 1 or (len(micro.tokens) <= budget and slots <= 2 * budget)


def test_a_micro_batch_is_not_closed_early():
    """Sixteen responses of one token to a prompt of 30: 30 fed tokens, of which three make 90 slots."""
    prompt, n = list(range(2, 32)), 16
    batch = demonstrations([(prompt, [5])] * n)
    batch.groups[:] = 0
    assert [len(m.sequences) for m in micro_batches(batch, range(n), 30, padded=False)] == [2] * 8
    assert [len(m.sequences) for m in micro_batches(batch, range(n), 45, padded=False)] == [3, 3, 3, 3, 3, 1]
    assert [len(m.sequences) for m in micro_batches(batch, range(n), 240, padded=False)] == [16]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 5), max_size=9), st.integers(1, 6))
def test_updates_get_whole_groups(sizes, updates):
    groups = np.repeat(np.arange(len(sizes)) * 3, sizes)
    shares = update_shares(SimpleNamespace(groups=groups, n_sequences=len(groups)), updates)
    assert len(shares) == updates
    assert np.concatenate(shares).tolist() == list(range(len(groups)))  # neighbours stay together
    if len(sizes) >= updates:
        held = [set(groups[share].tolist()) for share in shares]
        assert sum(map(len, held)) == len(sizes)  # no group in two updates
        assert max(map(len, held)) - min(map(len, held)) <= 1
    else:
        assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_sequences_without_samples_and_empty_shares_feed_nothing():
    batch = random_batch()
    batch.sampled[batch.starts[2] : batch.starts[3]] = False
    assert 2 not in np.concatenate([m.sequences for m in micro_batches(batch, range(12), 64, padded=True)])
    assert micro_batches(batch, [], 64, padded=True) == []
    assert len(empty_micro_batch(padded=True).rows) == 0


def test_impossible_samples_are_refused():
    batch = random_batch()
    batch.sampled[batch.starts[1]] = True
    with pytest.raises(ValueError, match="first token"):
        micro_batches(batch, range(12), 64, padded=True)


def test_a_token_outside_its_support_is_refused():
    import msgspec

    batch = random_batch()
    support = np.stack([batch.tokens, np.full_like(batch.tokens, -1)], 1)
    ok = msgspec.structs.replace(batch, support=support)
    micro = micro_batches(ok, range(12), 10_000, padded=True)[0]
    assert (micro.support[:, 0] == micro.targets).all()
    token = int(np.flatnonzero(batch.sampled)[4])
    support[token, 0] += 1
    with pytest.raises(ValueError, match=f"token {token} "):
        micro_batches(ok, range(12), 64, padded=True)


def test_demonstrations_are_a_valid_batch():
    batch = demonstrations([([5, 6], [7]), ([8], [9, 10, 1])]).check()
    assert batch.tokens.tolist() == [5, 6, 7, 8, 9, 10, 1]
    assert batch.sampled.tolist() == [False, False, True, False, True, True, True]
    assert demonstrations([]).check().n_sequences == 0
    with pytest.raises(ValueError, match="at least one"):
        demonstrations([([], [7])])


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2)])
def test_padded_attention_is_a_softmax_over_the_past(window, heads):
    """Against scores, mask and softmax written out in f64, forward and backward, with rows shared by two sequences."""
    torch.manual_seed(0)
    rows = np.array([0, 1, 2, 3, 4, 5, 6, 0, 1, 7, 8, 9, 10])  # lengths 7, 4 (sharing rows 0 and 1), 2
    lengths = np.array([7, 4, 2])
    layout = layout_of(rows, lengths, padded=True)
    assert layout.buckets == ((1, 7), (1, 4), (1, 2)) and layout_of(rows, lengths, True, 9.0).buckets == ((3, 7),)
    query = torch.randn(1, heads[0], 11, 8, requires_grad=True)
    key, value = (torch.randn(1, heads[1], 11, 8, requires_grad=True) for _ in range(2))
    exact = [x.detach().double().requires_grad_() for x in (query, key, value)]
    expected = torch.zeros(11, heads[0], 8, dtype=torch.float64)
    for part in np.split(rows, np.cumsum(lengths)[:-1]):
        for end, row in enumerate(part):
            past = part[max(0, end + 1 - (window or 99)) : end + 1]
            for head in range(heads[0]):
                q, k, v = exact[0][0, head], *(x[0, head * heads[1] // heads[0]] for x in exact[1:])
                expected[row, head] = torch.softmax(k[past] @ q[row] * 0.3, 0) @ v[past]
    upstream = torch.randn(11, heads[0], 8)
    (expected * upstream.double()).sum().backward()
    for padding in (0.25, 9.0):
        for x in (query, key, value):
            x.grad = None
        got, _ = packed_attention(
            SimpleNamespace(), query, key, value, None, layout=layout_of(rows, lengths, True, padding),
            scaling=0.3, sliding_window=window,
        )  # fmt: skip
        torch.testing.assert_close(got[0].double(), expected, rtol=1e-5, atol=1e-6)
        (got[0] * upstream).sum().backward()
        for x, want in zip((query, key, value), exact):
            torch.testing.assert_close(x.grad.double(), want.grad, rtol=1e-5, atol=1e-5)


def test_attention_refuses_what_it_would_get_wrong():
    x = torch.zeros(1, 1, 1, 8)
    layout = layout_of(np.zeros(1, np.int64), np.ones(1, np.int64), padded=True)
    for wrong in ({"softcap": 30.0}, {"s_aux": x}, {"dropout": 0.1}):
        with pytest.raises(ValueError, match="supports no"):
            packed_attention(SimpleNamespace(), x, x, x, None, layout=layout, **wrong)
