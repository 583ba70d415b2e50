"""The layout against a simulation: whatever the shards, plans and bucket sizes, every engine process ends up with the
bytes that its plan names, each rank sends what the layout says, and nothing is sent twice."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sync.layout import Form, build, entries_of
from sync.messages import Entry
from sync.plan import ARRIVAL, BLOCK, STOCK, row_form, strips, whole

HALF = 1 << 20


def form(name, shapes, ranks, scaled=True, cut=None):
    """A parameter of equal-width pieces, sharded like torch.chunk, or at the rows `cut`."""
    rows = [int(np.prod(shape[:-1])) if len(shape) > 1 else shape[0] for shape in shapes]
    total = sum(rows)
    each = -(-total // ranks)
    bounds = (0, *sorted(cut), total) if cut is not None else tuple(min(r * each, total) for r in range(ranks + 1))
    codes = tuple(Entry(f"{name}.{i}", "float8_e4m3fn" if scaled else "bfloat16", s) for i, s in enumerate(shapes))
    scales = tuple(
        Entry(f"{name}.{i}_scale_inv", "float32", (-(-s[0] // 128), -(-s[1] // 128))) for i, s in enumerate(shapes)
    )
    starts = tuple(int(x) for x in np.cumsum(rows) - rows)
    return Form(starts, bounds, codes, scales if scaled else (), 128 if scaled else 1)


def contents(entries, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 256, row_form(entry), np.uint8) for entry in entries]


def plan_for(entries, process, processes, seed):
    """Every tensor whole, or this process's slice of its rows or columns, into parameters in shuffled order."""
    rng = np.random.default_rng(seed)
    blocks, ends = [], {}
    for number in rng.permutation(len(entries)):
        rows, width = row_form(entries[number])
        kind, param = rng.integers(3), int(rng.integers(4))
        block = np.zeros(1, BLOCK)
        block["tensor"], block["param"] = number, param
        if kind == 0 and rows >= processes:
            each = rows // processes
            block["row"], block["rows"], block["width"] = process * each, each, width
        elif kind == 1 and width >= processes:
            each = width // processes
            block["rows"], block["column"], block["width"] = rows, process * each, each
        else:
            block["rows"], block["width"] = rows, width
        gap = int(rng.integers(2)) * 3
        block["target"], block["step"] = ends.get(param, 0), block["width"] + gap
        ends[param] = int(block["target"][0] + block["rows"][0] * block["step"][0])
        blocks.append(block)
    return np.concatenate(blocks)


def apply(blocks, tensors, read):
    """Parameters after copying `blocks`; `read(block)` gives the rows."""
    result = {p: np.zeros(1 << 20, np.uint8) for p in range(4)}
    for block in blocks:
        target = result[int(block["param"])]
        for i, row in enumerate(read(block)):
            at = int(block["target"] + i * block["step"])
            target[at : at + len(row)] = row
    return result


def rows_of(tensors):
    def read(b):
        t = tensors[int(b["tensor"])]
        return t[int(b["row"]) : int(b["row"] + b["rows"]), int(b["column"]) : int(b["column"] + b["width"])]

    return read


def simulate(forms, plans, half):
    """Layouts of all ranks, and what every engine process received in its buckets."""
    entries = entries_of(forms)
    tensors = contents(entries)
    layouts = [build(forms, plans, half, rank) for rank in range(len(plans))]
    number = {entry.name: i for i, entry in enumerate(entries)}
    buckets = [[np.zeros(b.nbytes, np.uint8) for b in layout.buckets] for layout in layouts]
    for source, layout in enumerate(layouts):
        for b, bucket in enumerate(layout.buckets):
            space = np.zeros(bucket.workspace, np.uint8)
            for share in bucket.shares:
                f = forms[share.form]
                wire = np.concatenate([tensors[number[e.name]] for e in f.codes])[share.rows[0] : share.rows[1]]
                space[share.codes : share.codes + wire.size] = wire.ravel()
                if f.scales:
                    rows = []
                    for scale, start in zip(f.scales, f.starts):
                        for j in range(row_form(scale)[0]):
                            if share.rows[0] <= start + j * f.block_rows < share.rows[1]:
                                rows.append(tensors[number[scale.name]][j])
                    wire = np.concatenate(rows) if rows else np.zeros(0, np.uint8)
                    space[share.scales : share.scales + wire.size] = wire
            for process, (pack, size) in enumerate(zip(bucket.pack, bucket.send)):
                segment = np.zeros(size, np.uint8)
                for o, t, r, w, s in zip(pack.offset, pack.target, pack.rows, pack.width, pack.step):
                    for i in range(r):
                        segment[o + i * w : o + (i + 1) * w] = space[t + i * s : t + i * s + w]
                if bucket.is_identity(process):
                    assert np.array_equal(segment, space)
                start, expected = layouts[process].buckets[b].receive[source]
                assert expected == size
                buckets[process][b][start : start + size] = segment
    return tensors, layouts, buckets


def check(forms, plans, half):
    tensors, layouts, buckets = simulate(forms, plans, half)
    for plan, layout, received in zip(plans, layouts, buckets):
        wanted = apply(plan, tensors, rows_of(tensors))

        def arrived(b, received=received):
            data = received[int(b["bucket"])][int(b["offset"]) :]
            return data[: int(b["rows"] * b["width"])].reshape(int(b["rows"]), int(b["width"]))

        got = apply(layout.arrivals, tensors, arrived)
        assert all(np.array_equal(got[p], wanted[p]) for p in wanted)
        for b in layout.arrivals:  # the source coordinates, with which tensors are put together again
            assert np.array_equal(arrived(b), rows_of(tensors)(b))
        merged = apply_strips(layout, received)
        assert all(np.array_equal(merged[p], wanted[p]) for p in wanted)
        total = int((plan["rows"] * plan["width"]).sum())
        assert sum(n for b in layout.buckets for _, n in b.receive) == total
        assert all(b.nbytes <= half for b in layout.buckets)
    assert sum(x.bytes_sent for x in layouts) == sum(x.bytes_received for x in layouts)
    return layouts


def apply_strips(layout, received):
    result = {p: np.zeros(1 << 20, np.uint8) for p in range(4)}
    for b, data in enumerate(received):
        s = strips(layout.arrivals[layout.arrivals["bucket"] == b])
        for o, p, t, r, w, step in zip(s.offset, s.param, s.target, s.rows, s.width, s.step):
            for i in range(r):
                result[p][t + i * step : t + i * step + w] = data[o + i * w : o + (i + 1) * w]
    return result


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_every_process_receives_exactly_its_plan(data):
    ranks = data.draw(st.integers(1, 4))
    forms = []
    for i in range(data.draw(st.integers(1, 4))):
        n, k, pieces = (data.draw(st.integers(1, x)) for x in (400, 200, 5))
        total = n * pieces
        cut = None
        if data.draw(st.booleans()):
            cut = data.draw(st.lists(st.integers(0, total), min_size=ranks - 1, max_size=ranks - 1))
        forms.append(form(f"p{i}", [(n, k)] * pieces, ranks, data.draw(st.booleans()), cut))
    entries = entries_of(forms)
    seed = data.draw(st.integers(0, 1000))
    same = data.draw(st.booleans())
    first = plan_for(entries, 0, 1, seed)
    plans = [first if same else plan_for(entries, r, ranks, seed) for r in range(ranks)]
    check(forms, plans, data.draw(st.sampled_from([HALF, 300_000, 120_000])) + 200 * 800)


def test_a_stack_of_experts_goes_in_one_piece():
    """Two ranks, 8 experts, gate over up: what each rank holds is one copy on both sides."""
    experts = form("experts", [(128, 128)] * 16, 2)
    entries = entries_of([experts])
    plan = np.zeros(32, BLOCK)
    plan["tensor"] = np.arange(32)
    plan["param"][16:] = 1
    plan["rows"][:16], plan["width"][:16], plan["step"][:16] = 128, 128, 128
    plan["rows"][16:], plan["width"][16:], plan["step"][16:] = 1, 4, 4
    plan["target"] = np.r_[np.arange(16) * 128 * 128, np.arange(16) * 4]
    layouts = check([experts], [plan, plan], HALF)
    assert [len(b.pack[0].offset) for x in layouts for b in x.buckets] == [1, 1]
    assert layouts[0].buckets[0].is_identity(0) and layouts[1].buckets[0].is_identity(0)
    assert len(strips(layouts[0].arrivals).offset) == 4  # two ranks, codes and scales
    half = (16 * 128 * 128 + 16 * 4) // 2
    assert [(x.bytes_sent, x.bytes_received) for x in layouts] == [(half, half)] * 2
    assert entries[16].name == "experts.0_scale_inv"


def test_tensor_parallel_halves_cost_half():
    """Two engine processes that take half of every row each: every rank sends one quarter away."""
    weights = form("w", [(256, 128)], 2, scaled=False)
    plans = []
    for process in range(2):
        plan = np.zeros(1, BLOCK)
        plan["rows"], plan["width"], plan["column"], plan["step"] = 256, 128, 128 * process, 128
        plans.append(plan)
    layouts = check([weights], plans, HALF)
    assert [x.bytes_sent for x in layouts] == [256 * 256 // 4] * 2


def test_stock_tensors_are_delivered_whole():
    weights = form("w", [(100, 30)], 2)
    plan = whole(entries_of([weights]), [0, 1])
    layout = build([weights], [plan, plan], HALF, 1)
    assert (layout.arrivals["param"] == STOCK).all() and layout.arrivals.dtype == ARRIVAL
    assert layout.arrivals["rows"][layout.arrivals["tensor"] == 0].sum() == 100
    assert len(strips(layout.arrivals).offset) == 0


def test_a_large_tensor_spreads_over_buckets_and_a_too_small_bucket_is_refused():
    weights = form("w", [(2000, 100)], 2, scaled=False)
    plan = plan_for(entries_of([weights]), 0, 1, 3)
    assert len(check([weights], [plan, plan], 100_000)[0].buckets) > 3
    with pytest.raises(ValueError, match=r"sync\.bucket_mb.*w\.0"):
        build([weights], [plan, plan], 300, 0)


def test_a_part_is_no_larger_than_blocks_and_buckets_ask_for():
    """175 rows of each rank go as 128 and 47: a bucket that holds four blocks of 128 rows is large enough."""
    weights = form("w", [(175, 200)] * 4, 4)
    plan = plan_for(entries_of([weights]), 0, 1, 3)
    check([weights], [plan] * 4, 4 * 128 * 200 + 4 * 2 * 4 + 200)


def test_a_rank_may_hold_nothing():
    check(
        [form("norm", [(3, 1)], 4, scaled=False)],
        [plan_for(entries_of([form("norm", [(3, 1)], 4, scaled=False)]), 0, 1, 1)] * 4,
        HALF,
    )
