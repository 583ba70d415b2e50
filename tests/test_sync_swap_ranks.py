"""The swap on 1 to 4 ranks, with engines of one process and of several: every byte, and that all ranks act as one."""

import sync_engine
import sync_ranks
import torch.distributed as dist
from sync_engine import FP8, PLAIN, Side, count, lose

from sync.messages import Bucket, Commit
from sync.push import SwapError


def on_ranks(rank, groups, directory):
    """Every number of ranks, alone and as tensor-parallel teams; the bytes of every rank against arithmetic."""
    for ranks, team in ((1, 1), (2, 1), (3, 1), (4, 1), (2, 2), (4, 2)):
        if rank >= ranks:
            continue
        for wire in (FP8, PLAIN):
            side = Side(directory / f"{ranks}-{team}", groups[ranks], wire, team, half=160_000)
            for seed in (1, 2):
                stats = side.swap(seed, seed)
                assert not side.differs(seed), (ranks, team, seed)
            assert stats["sync/buckets"] > 1
            want = expected_bytes(side, wire, team)
            assert (stats["sync/bytes_sent"], stats["sync/bytes_received"]) == want, (ranks, team, want)
    return True


def expected_bytes(side, wire, team):
    """(sent, received) by this rank: whole tensors to every engine, of which each process reads its own slices."""
    whole_to_all = ("norm.weight", "gate.weight")
    sent = received = 0
    for owner in range(side.ranks):
        for part in sync_engine.shards(owner, side.ranks):
            rows = part.bounds[owner + 1] - part.bounds[owner]
            if not rows:
                continue
            for piece in part.pieces:
                low = max(piece.row, part.bounds[owner])
                high = min(piece.row + piece.rows, part.bounds[owner + 1])
                if high <= low:
                    continue
                for name, tensor in pieces_on_the_wire(wire, piece):
                    scale = name.endswith("_scale_inv")
                    first, last = (low - piece.row, high - piece.row)
                    if scale:  # the rank of a block's first row sends its scale
                        first, last = -(-first // 128), -(-last // 128)
                    for to in range(side.ranks):
                        split = 1 if name.endswith(whole_to_all) else team
                        n = slice_bytes(tensor, name, first, last, to % split, split)
                        if owner == side.rank and to != owner:
                            sent += n
                        if to == side.rank and to != owner:
                            received += n
    return sent, received


def pieces_on_the_wire(wire, piece):
    if wire.fp8.is_quantized(piece.name, piece.shape, 1):
        n, k = piece.shape
        return [(piece.name, (n, k)), (piece.name + "_scale_inv", (-(-n // 128), -(-k // 128) * 4))]
    return [(piece.name, (piece.rows, 4 * (piece.shape[-1] if len(piece.shape) > 1 else 1)))]


def slice_bytes(form, name, first, last, process, split):
    """Bytes of rows first…last that a process of a tensor-parallel engine reads: a slice of rows, or of columns."""
    rows, width = form
    if "o_proj" in name or "down_proj" in name:
        return (last - first) * (width // split)
    each = rows // split
    return max(0, min(last, (process + 1) * each) - max(first, process * each)) * width


def test_any_number_of_ranks(tmp_path):
    assert sync_ranks.run(on_ranks, tmp_path) == [True] * 4


def one_rank_fails(rank, groups, directory):
    """Rank 1's engine breaks once, then for ever: no rank commits, and all go on together."""
    texts = []

    def agree(problem):
        box = [None] * 2
        dist.all_gather_object(box, problem, groups[2])
        return next((text for text in box if text), "")

    if rank >= 2:
        return texts
    side = Side(directory, groups[2], agree=agree)
    side.swap(1)
    for step in ("bucket", "finish"):  # before and after the ranks have agreed to commit
        if rank == 1:
            side.engine.updater.fail_on = step
        stats = side.swap(2, seed=3)
        assert stats["sync/retries"] == 1 and not side.differs(3) and side.engine.receiver.version == 2
    if rank == 1:
        side.engine.damage = lose(Bucket)(side)
    try:
        side.swap(3, seed=4)
    except SwapError as error:
        texts.append(str(error))
    assert side.engine.receiver.version is None and not count(side, Commit)

    def change(shards):
        if rank == 1:
            shards[5].local[0, 0] = float("nan")
        return shards

    side.engine.damage = lambda message: message
    try:
        side.swap(4, change=change)
    except ValueError as error:
        texts.append(str(error))
    side.swap(5, seed=6)
    assert not side.differs(6)
    return texts


def test_no_rank_commits_when_another_one_failed(tmp_path):
    first, second, *_ = sync_ranks.run(one_rank_fails, tmp_path)
    assert first == second and "nothing was sent" in first[0] and "down_proj" in first[1]
