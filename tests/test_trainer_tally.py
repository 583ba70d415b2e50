"""Tally: sums over micro-batches and over real gloo ranks, and ranks that disagree."""

import json
import multiprocessing

import pytest
import torch
import torch.distributed as dist

from trainer.algo.parts import Max, Mean, masked_max, masked_mean
from trainer.tally import MAXIMA_CAPACITY, Tally

CHUNKS = [[1.0, 4.0, -2.0], [], [0.25], [9.0, 3.0]]


def parts_of(chunk):
    x = torch.tensor(chunk)
    everything = torch.ones(len(chunk), dtype=torch.bool)
    return {
        "b_mean": masked_mean(x, everything),
        "a_positive": masked_mean(x, x > 0),
        "c_max": masked_max(x.abs(), everything),
        "a_max": masked_max(x.abs(), x < 0),
    }


def expected(chunks):
    values = [v for chunk in chunks for v in chunk]
    positive = [v for v in values if v > 0]
    return {
        "a_max": max([-v for v in values if v < 0], default=0.0),
        "a_positive": sum(positive) / len(positive),
        "b_mean": sum(values) / len(values),
        "c_max": max(map(abs, values)),
    }


def test_micro_batches_add_up():
    tally = Tally("cpu")
    for chunk in CHUNKS:
        tally.add(parts_of(chunk))
    stats = tally.result()
    assert stats == pytest.approx(expected(CHUNKS))
    assert list(stats) == sorted(stats)
    assert all(type(value) is float for value in stats.values())


def test_nothing_added_and_nothing_counted():
    assert Tally("cpu").result() == {}
    tally = Tally("cpu")
    tally.add(parts_of([]))
    assert tally.result() == {"a_max": 0.0, "a_positive": 0.0, "b_mean": 0.0, "c_max": 0.0}


def test_keeps_no_graph_and_sums_in_float64():
    x = torch.full((3,), 0.1, requires_grad=True)
    tally = Tally("cpu")
    tally.add({"m": Mean(x.sum(), torch.tensor(3.0)), "x": Max(x.max())})
    assert not any(t.requires_grad for t in [*tally._means.values(), *tally._maxima.values()])
    tally = Tally("cpu")
    for value in (2.0**30, 1.0, 1.0):
        tally.add({"m": Mean(torch.tensor(value), torch.tensor(1.0))})
    assert tally.result()["m"] * 3 == 2**30 + 2


def test_one_name_is_one_thing():
    tally = Tally("cpu")
    tally.add({"m": Max(torch.tensor(1.0))})
    with pytest.raises(AssertionError):
        tally.add({"m": Mean(torch.tensor(1.0), torch.tensor(1.0))})
    for i in range(MAXIMA_CAPACITY):
        tally.add({f"m{i}": Max(torch.tensor(1.0))})
    with pytest.raises(AssertionError, match="MAXIMA_CAPACITY"):
        tally.result()


def rank_main(rank, path):
    """Two rounds: ranks with unequal work (one empty, other order of names), then a rank with one name more."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}/store", rank=rank, world_size=3)
    tally = Tally("cpu")
    for chunk in ([CHUNKS[0], CHUNKS[2]], [[]], [CHUNKS[3]])[rank]:
        parts = parts_of(chunk)
        tally.add(parts if rank else dict(reversed(list(parts.items()))))
    out: dict[str, object] = {"stats": tally.result()}
    if rank == 1:
        tally.add({"extra": Mean(torch.tensor(1.0), torch.tensor(1.0))})
    try:
        tally.result()
    except RuntimeError as error:
        out["error"] = str(error)
    out["sums_still_work"] = float(dist.get_world_size())
    (path / f"{rank}.json").write_text(json.dumps(out))
    dist.destroy_process_group()


def test_ranks_add_up_and_a_rank_that_disagrees_stops_all(tmp_path):
    context = multiprocessing.get_context("fork")  # a spawned process would import torch anew, for seconds
    ranks = [context.Process(target=rank_main, args=(rank, tmp_path)) for rank in range(3)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(60)
        if process.is_alive():
            process.kill()
    results = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(3)]
    for result in results:
        assert result["stats"] == pytest.approx(expected(CHUNKS))
        assert "different metrics" in result["error"]
    assert "extra" in results[1]["error"] and "extra" not in results[0]["error"]
