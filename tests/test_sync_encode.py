"""Quantizing on the shard is quantizing the whole tensor, to the bit: 1 to 4 ranks, every granularity, any borders."""

import itertools

import numpy as np
import pytest
import sync_ranks
import torch

from sync.encode import Wire, encode, exchange_edges
from sync.layout import Share, _cut_rows, _parts
from sync.plan import row_form
from sync.quantize import Fp8Config, quantize
from sync.shards import Piece, Shard

HALF = 1 << 20


def shard(name, weights, bounds, rank):
    """A parameter that stacks `weights` (equal shapes), of which the rank holds rows bounds[rank]:bounds[rank+1]."""
    rows = torch.cat([w.reshape(-1, w.shape[-1]) for w in weights])
    n = len(rows) // len(weights)
    pieces = tuple(Piece(f"{name}.{i}.down_proj.weight", tuple(w.shape), i * n) for i, w in enumerate(weights))
    return Shard(pieces, bounds, rows[bounds[rank] : bounds[rank + 1]].clone())


def cases(ranks, seed):
    """Stacks and matrices with borders between ranks anywhere: at 128 rows, inside a block, two in one block."""
    rng = np.random.default_rng(seed)
    for n, k, pieces in [
        (128, 128, 4),
        (256, 200, 1),
        (300, 130, 1),
        (70, 64, 3),
        (513, 128, 2),
        (1, 5, 1),
        (130, 300, 2),
    ]:
        total = n * pieces
        cut = [min(r * -(-total // ranks), total) for r in range(1, ranks)]
        if rng.integers(2):
            cut = sorted(rng.integers(0, total + 1, ranks - 1).tolist())
        sizes = 10.0 ** rng.integers(-3, 3, pieces)
        weights = [torch.from_numpy(rng.standard_normal((n, k), np.float32)) * size for size in sizes]
        yield weights, (0, *cut, total)


def on_a_rank(rank, groups):
    done = 0
    for ranks, group in groups.items():
        if rank >= ranks:
            continue
        for granularity in ("block", "rowwise", "tensor"):
            for scales in ("fp32", "pow2"):
                wire = Wire(Fp8Config(granularity=granularity, scales=scales), 1, torch.bfloat16)
                given = list(cases(ranks, seed=ranks))
                shards = [shard(f"p{i}", weights, bounds, rank) for i, (weights, bounds) in enumerate(given)]
                forms = [wire.form(s) for s in shards]
                edges = exchange_edges(wire, forms, shards, rank, group)
                for number, (weights, _) in enumerate(given):
                    done += check(wire, number, forms[number], shards[number], rank, edges, weights)
    return done


def check(wire, number, form, part, rank, edges, weights):
    """Every part of this rank's rows against the rows of the whole tensors' codes and scales."""
    whole = [quantize(w, wire.fp8.granularity, wire.fp8.scales) for w in weights]
    codes = torch.cat([c.view(torch.uint8) for c, _ in whole])
    scales = torch.cat([s for _, s in whole])
    height, n = form.block_rows, len(weights[0])
    first_rows = [i * n + j * height for i in range(len(weights)) for j in range(len(whole[0][1]))]
    for parts in (1, _parts(form, 40_000), 3):
        cuts = _cut_rows(form, parts)[rank].tolist()
        for low, high in itertools.pairwise(cuts):
            if low == high:
                continue
            mine = [i for i, row in enumerate(first_rows) if low <= row < high]
            n_codes, width = (high - low) * codes.shape[1], row_form(form.scales[0])[1]
            at = -(-n_codes // 4) * 4
            space = torch.full((at + len(mine) * width + 64,), 7, dtype=torch.uint8)
            encode(wire, Share(number, (low, high), 0, at), form, part, rank, edges, space)
            assert torch.equal(space[:n_codes].view(high - low, -1), codes[low:high]), (form.codes[0].name, low, high)
            end = at + len(mine) * width
            held = [i for i, row in enumerate(first_rows) if part.bounds[rank] <= row < part.bounds[rank + 1]]
            made = torch.full_like(space, 7)  # from codes and scales that are there already
            local = codes[part.bounds[rank] : part.bounds[rank + 1]].view(torch.float8_e4m3fn)
            ready = part._replace(local=local, scale=scales[held])
            first = held.index(mine[0]) if mine else 0
            rows = (first, first + len(mine))
            encode(wire, Share(number, (low, high), 0, at, rows), form, ready, rank, edges, made)
            assert torch.equal(made[:n_codes], space[:n_codes]) and torch.equal(made[at:end], space[at:end])
            assert torch.equal(space[at:end].view(torch.float32).view(scales[mine].shape), scales[mine])
            assert (space[end:] == 7).all(), "a scale too many"
    return 1


def test_bit_equal_to_the_whole_tensor_on_any_number_of_ranks():
    assert sync_ranks.run(on_a_rank) == [7 * 6 * n for n in (4, 3, 2, 1)]


def test_what_is_not_quantized_is_cast():
    wire = Wire(Fp8Config(enabled=False), 1, torch.bfloat16)
    part = shard("p", [torch.randn(10, 7)], (0, 4, 10), 1)
    form = wire.form(part)
    assert form.codes[0].dtype == "bfloat16" and not form.scales
    space = torch.zeros(3 * 7 * 2, dtype=torch.uint8)
    encode(wire, Share(0, (5, 8), 0, 0), form, part, 1, {}, space)
    assert torch.equal(space.view(torch.bfloat16).view(3, 7), part.local[1:4].bfloat16())


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("enabled", [True, False])
def test_a_nan_names_its_tensor(bad, enabled):
    wire = Wire(Fp8Config(enabled=enabled), 1, torch.bfloat16)
    part = shard("p", [torch.randn(128, 128), torch.randn(128, 128)], (0, 256), 0)
    part.local[200, 3] = bad
    form = wire.form(part)
    with pytest.raises(ValueError, match=r"p\.1\.down_proj\.weight"):
        encode(wire, Share(0, (128, 256), 0, 0), form, part, 0, {}, torch.zeros(1 << 16, dtype=torch.uint8))


def nan_on_one_rank(rank, groups):
    """A NaN in a block that two ranks share is noticed by both, wherever it lies."""
    wire = Wire(Fp8Config(), 1, torch.bfloat16)
    if rank >= 2:
        return ""
    part = shard("p", [torch.randn(256, 128)], (0, 200, 256), rank)
    if rank == 1:
        part.local[0, 0] = float("nan")
    edges = exchange_edges(wire, [wire.form(part)], [part], rank, groups[2])
    rows = ((0, 200), (200, 256))[rank]
    try:
        encode(
            wire,
            Share(0, rows, 0, 200 * 128),
            wire.form(part),
            part,
            rank,
            edges,
            torch.zeros(1 << 16, dtype=torch.uint8),
        )
    except ValueError as error:
        return str(error)
    return "nothing"


def test_a_nan_in_a_shared_block():
    first, second, *_ = sync_ranks.run(nan_on_one_rank)
    assert "p.0.down_proj.weight" in first and "p.0.down_proj.weight" in second
