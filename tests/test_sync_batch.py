"""Batch: the checks can fail, selection and concatenation keep rows together, files come back equal."""

import numpy as np
import pytest

from sync.batch import Batch, concat, empty


def make(lengths: list[int], seed: int = 0, experts: bool = False) -> Batch:
    rng = np.random.default_rng(seed)
    t, n = sum(lengths), len(lengths)
    sampled = np.ones(t, bool)
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    sampled[starts[:-1]] = False
    return Batch(
        tokens=rng.integers(0, 99, t).astype(np.int32),
        starts=starts,
        sampled=sampled,
        logprobs=np.where(sampled, -rng.random(t), 0).astype(np.float32),
        rewards=rng.random(n).astype(np.float32),
        groups=(np.arange(n) // 2).astype(np.int32),
        versions=np.zeros(n, np.int32),
        finish=np.zeros(n, np.uint8),
        experts=rng.integers(0, 8, (t, 3, 2)).astype(np.uint8) if experts else None,
    )


def same(a: Batch, b: Batch) -> bool:
    return all(
        (x is None and y is None) or np.array_equal(x, y)
        for x, y in ((getattr(a, f), getattr(b, f)) for f in Batch.__struct_fields__)
    )


def test_select_and_concat_undo_each_other():
    batch = make([3, 5, 2, 7], experts=True).check()
    parts = [batch.select([i]) for i in range(4)]
    assert same(concat(parts).check(), batch)
    picked = batch.select([3, 1]).check()
    np.testing.assert_array_equal(picked.tokens[:7], batch.tokens[10:])
    np.testing.assert_array_equal(picked.experts[7:], batch.experts[3:8])
    np.testing.assert_array_equal(picked.sampled_lengths, [6, 4])
    assert picked.sequence_ids.tolist() == [0] * 7 + [1] * 5


def test_save_and_load(tmp_path):
    batch = make([4, 2], experts=True)
    batch.save(tmp_path / "b.npz")
    assert same(Batch.load(tmp_path / "b.npz"), batch)


def test_empty_is_valid():
    assert empty().check().n_sequences == 0
    assert same(concat([make([3, 4]), make([2])]).select([0, 1]), make([3, 4]))


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("tokens", np.zeros(7, np.int64), "tokens: int64"),
        ("rewards", np.zeros(1, np.float32), "rewards: float32\\[1\\], not float32\\[2\\]"),
        ("starts", np.array([0, 0, 7], np.int32), "starts: must rise"),
        ("starts", np.array([0, 3, 6], np.int32), "starts: must rise"),
        ("logprobs", np.array([0, -1, -1, 0, -1, np.nan, -1], np.float32), "sample 1 has a non-finite .* token 2"),
        ("rewards", np.array([np.inf, 0], np.float32), "sample 0 has a non-finite reward"),
        ("finish", np.array([0, 9], np.uint8), "finish"),
        ("experts", np.zeros((6, 1, 1), np.uint8), "experts: 6 rows for 7 tokens"),
    ],
)  # fmt: skip
def test_check_names_what_is_wrong(column, value, message):
    columns = {f: getattr(make([3, 4]), f) for f in Batch.__struct_fields__} | {column: value}
    with pytest.raises(ValueError, match=message):
        Batch(**columns).check()


def test_concat_refuses_what_does_not_fit():
    with pytest.raises(ValueError, match="at least one"):
        concat([])
    with pytest.raises(ValueError, match="experts: present in some"):
        concat([make([3], experts=True), make([3])])
