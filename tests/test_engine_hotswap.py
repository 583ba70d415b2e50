"""The copy plan against the loader it was recorded from: after a swap every parameter holds, bit for bit, what the
model's own `load_weights` makes of the same tensors; what is lost, damaged or misplaced is found.

The model here loads in every way known from SGLang's, and some that are not. Its real models: test_engine_host.py.
"""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from engine import hotswap
from engine.hotswap import Finish, Note, Open, Reply, Take, encode
from sync.buckets import checksum, word_sum
from sync.messages import Entry
from sync.plan import ARRIVAL, STOCK, Arrivals, Recording, blocks_of, row_form, strips, whole
from sync.staging import Staging

E4M3 = torch.float8_e4m3fn


class Model(torch.nn.Module):
    """Parameters and what is done with each tensor of the checkpoint are a table, so that a test can change it."""

    def __init__(self, tp_rank=0):
        super().__init__()
        self.loaders = {}

        def param(name, *shape, dtype=torch.float32):
            self.register_parameter(name, torch.nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=False))
            return getattr(self, name).data

        qk, columns, experts = param("qk", 8, 6), param("columns", 5, 4), param("experts", 3, 4, 6, dtype=E4M3)
        converted, cloned, turned = (
            param("converted", 4, 6, dtype=torch.bfloat16),
            param("cloned", 4),
            param("turned", 6, 4),
        )
        scalar, one, tied, padded = param("scalar"), param("one", 1), param("tied", 7, 2), param("padded", 8, 3)
        self.register_parameter("tied_again", torch.nn.Parameter(self.tied.data, requires_grad=False))
        _, sliced, vector = param("stack", 3, 2, 4), param("sliced", 3, 4, 2), param("vector", 4, 2)
        filled, mid = param("filled", 4, 3, dtype=torch.bfloat16), param("mid", 10)
        self.register_buffer("bias", torch.zeros(4))
        half = slice(3 * tp_rank, 3 * tp_rank + 3)
        copies = {
            "q": lambda t: qk[:4].copy_(t),
            "k": lambda t: qk[4:].copy_(t),
            "c0": lambda t: columns[:, :2].copy_(t),
            "c1": lambda t: columns[:, 2:].copy_(t),
            "tied": lambda t: tied.copy_(t),
            "scalar": lambda t: scalar.copy_(t),
            "one": lambda t: one.copy_(t),
            "stack": lambda t: self.stack.data.copy_(t),
            "sliced": lambda t: sliced.copy_(t[:, :, half][:, :, :2]),
            "vector": lambda t: vector[:, 1].copy_(t),
            "vectors": lambda t: vector[:, 0].copy_(t),
            "mid": lambda t: mid.copy_(t.view(-1)[3:13]),
            "never": lambda t: None,
        } | {
            f"experts.{i}.w{j}": lambda t, i=i, j=j: experts[i, 2 * j : 2 * j + 2].copy_(t)
            for i in range(3)
            for j in (0, 1)
        }
        stock = {
            "converted": lambda t: converted.copy_(t),
            "cloned": lambda t: cloned.copy_(t.clone() + 1),
            "turned": lambda t: turned.copy_(t.t()),
            "bias": lambda t: self.bias.copy_(t),
            "padded": lambda t: (padded[5:].zero_(), padded[:5].copy_(t)),
            "filled": lambda t: filled.fill_(t.item()),
        }  # fmt: skip
        self.stock, self.loaders = set(stock), copies | stock

    def load_weights(self, named):
        for name, tensor in named:
            self.loaders[name](tensor)


SHAPES = {
    "q": (4, 6), "k": (4, 6), "c0": (5, 2), "c1": (5, 2), "tied": (7, 2), "scalar": (), "one": (), "stack": (3, 2, 4),
    "sliced": (3, 4, 6), "vector": (4,), "vectors": (4,), "mid": (3, 5), "never": (3,), "converted": (4, 6),
    "cloned": (4,), "turned": (4, 6), "bias": (4,), "padded": (5, 3), "filled": (1,),
} | {f"experts.{i}.w{j}": (2, 6) for i in range(3) for j in (0, 1)}  # fmt: skip


def tensors(seed=0):
    torch.manual_seed(seed)
    return {n: torch.randn(s).to(E4M3 if n.startswith("experts") else torch.float32) for n, s in SHAPES.items()}


def as_entries(named):
    return [Entry(n, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for n, t in named.items()]


class Rank:
    """The other end: sends commands, decodes the answers, cuts and places blocks, fills buckets."""

    def __init__(self, model, named, directory, plan=True, n_buckets=1, split=0, sabotage=lambda blocks: blocks):
        self.model, self.named, self.directory = model, named, directory
        self.entries = as_entries(named)
        self.recording = self.ask(Note(self.reply, self.entries, plan), Recording)
        blocks = blocks_of(self.recording.blocks)
        blocks = sabotage(np.concatenate([blocks, whole(self.entries, list(self.recording.stock))]))
        self.arrivals, self.nbytes = place(blocks, n_buckets, split)
        (directory / "arrivals").write_bytes(msgspec.msgpack.encode(Arrivals(self.arrivals.tobytes(), self.nbytes)))
        self.staging = Staging(max(self.nbytes), torch.device("cpu"))
        self.ask(Open(self.reply, self.staging.handle, str(directory / "arrivals")))

    @property
    def reply(self):
        return str(self.directory / "reply")

    def ask(self, command, kind=Reply):
        hotswap.load(self.model, encode(command))
        data = Path(self.reply).read_bytes()
        if error := msgspec.msgpack.decode(data, type=Reply).error:
            raise RuntimeError(error)
        return msgspec.msgpack.decode(data, type=kind)

    def fill(self, number):
        half = self.staging.halves[number % 2]
        half.fill_(0xFF)
        for b in self.arrivals[self.arrivals["bucket"] == number]:
            tensor = self.named[self.entries[b["tensor"]].name].contiguous()
            rows, width = row_form(self.entries[b["tensor"]])
            source = tensor.view(-1).view(torch.uint8).view(rows, width)
            part = source[b["row"] : b["row"] + b["rows"], b["column"] : b["column"] + b["width"]]
            half[b["offset"] : b["offset"] + part.numel()].view(part.shape).copy_(part)
        return half[: self.nbytes[number]]

    def swap(self, verify=True, flip=None):
        for number in range(len(self.nbytes)):
            data = self.fill(number)
            digest = checksum(data)
            if flip == number:
                data[1] ^= 1
            self.ask(Take(self.reply, number, digest, verify))
        return self.ask(Finish(self.reply, self.sent, verify))

    @property
    def sent(self):
        return int((self.arrivals["rows"] * self.arrivals["width"]).sum())


def place(blocks, n_buckets, split):
    """Blocks in the order of their targets, cut every `split` rows, dealt out to buckets round robin."""
    pieces = []
    for b in blocks[np.lexsort((blocks["target"], blocks["param"]))]:
        step = split or int(b["rows"])
        for low in range(0, int(b["rows"]), step):
            piece = b.copy()
            piece["row"] += low
            piece["target"] += low * b["step"]
            piece["rows"] = min(step, b["rows"] - low)
            pieces.append(piece)
    arrivals = np.zeros(len(pieces), ARRIVAL)
    ends = [0] * n_buckets
    for i, piece in enumerate(pieces):
        for field in piece.dtype.names:
            arrivals[field][i] = piece[field]
        bucket = i * n_buckets // len(pieces) if not split else i % n_buckets
        arrivals["bucket"][i], arrivals["offset"][i] = bucket, ends[bucket]
        ends[bucket] += int(piece["rows"] * piece["width"])
    return arrivals, ends


def loaded(model, named):
    """State of such a model after its own loader."""
    other = type(model)()
    other.load_weights(list(named.items()))
    return other.state_dict()


def bits(tensor):
    return tensor.contiguous().view(-1).view(torch.uint8)


def same(model, expected):
    return {name: torch.equal(bits(t), bits(expected[name])) for name, t in model.state_dict().items()}


@pytest.mark.parametrize(("n_buckets", "split"), [(1, 0), (3, 0), (2, 1), (5, 2)])
@pytest.mark.parametrize("plan", [True, False])
@pytest.mark.parametrize("verify", [True, False])
def test_a_swap_leaves_what_the_models_own_loader_leaves(tmp_path, n_buckets, split, plan, verify):
    model = Model()
    rank = Rank(model, tensors(), tmp_path, plan, n_buckets, split)
    for seed in (1, 2, 3):  # the staging and the copies are used again
        rank.named = tensors(seed)
        reply = rank.swap(verify)
        assert all(same(model, loaded(model, rank.named)).values()), same(model, loaded(model, rank.named))
        assert reply == Reply(verified=15 if verify else 0)  # tied parameters count once


def test_what_is_copied_is_planned_and_the_rest_says_why(tmp_path):
    rank = Rank(Model(), tensors(), tmp_path)
    names = {rank.entries[i].name: why for i, why in rank.recording.stock.items()}
    assert set(names) == Model().stock
    assert names == {
        "converted": "converted from torch.float32 to torch.bfloat16",
        "cloned": "computed with: aten.clone.default",
        "turned": "transposed or strided",
        "bias": "computed with: aten.copy_.default",
        "padded": "padded is also written by aten.zero_.default",
        "filled": "computed with: aten._local_scalar_dense.default",
    }
    planned = {rank.entries[i].name for i in blocks_of(rank.recording.blocks)["tensor"]}
    assert planned == Model().loaders.keys() - Model().stock - {"never"}


def test_without_a_plan_everything_is_stock(tmp_path):
    rank = Rank(Model(), tensors(), tmp_path, plan=False)
    assert set(rank.recording.stock.values()) == {"sync.method = stock"} and not rank.recording.blocks
    assert len(rank.recording.stock) == len(SHAPES) and set(rank.arrivals["param"]) == {STOCK}


def test_neighbours_merge_and_only_what_is_read_is_sent(tmp_path):
    rank = Rank(Model(), tensors(), tmp_path)
    s = strips(rank.arrivals)
    experts = [name for name, _ in rank.model.named_parameters()].index("experts")
    assert s.width[s.param == experts].tolist() == [3 * 4 * 6]  # six tensors, one copy
    sliced = rank.arrivals["tensor"] == list(SHAPES).index("sliced")
    assert rank.arrivals[sliced]["width"].tolist() == [8] and rank.arrivals[sliced]["rows"].tolist() == [12]


def test_recording_writes_nothing_and_reads_nothing(tmp_path):
    model = Model()
    model.load_weights(list(tensors(5).items()))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    Rank(model, tensors(), tmp_path)
    assert all(same(model, before).values())


def test_recording_needs_no_memory_for_the_tensors(tmp_path):
    """4 TB of tensors: nothing of them may exist."""
    model = Model()
    model.loaders["huge"] = lambda t: None
    entries = [Entry("huge", "float8_e4m3fn", (1 << 21, 1 << 21)), *as_entries(tensors())]
    hotswap.load(model, encode(Note(str(tmp_path / "reply"), entries, True)))
    assert msgspec.msgpack.decode((tmp_path / "reply").read_bytes(), type=Reply).error is None


def test_an_exchanged_parameter_is_put_back_and_stock(tmp_path):
    model = Model()
    before = model.one.data_ptr()

    def exchange(t):
        model.one.data = t.view(1)

    model.loaders["one"] = exchange
    rank = Rank(model, tensors(), tmp_path)
    assert model.one.data_ptr() == before and "becomes the data of one" in rank.recording.stock.values()


def test_copies_in_a_thread_pool_are_seen(tmp_path):
    class Threaded(Model):
        def load_weights(self, named):
            with ThreadPoolExecutor() as pool:
                for future in [pool.submit(self.loaders[name], tensor) for name, tensor in named]:
                    future.result()

    model = Threaded()
    rank = Rank(model, tensors(), tmp_path)
    assert {rank.entries[i].name for i in rank.recording.stock} == model.stock
    assert not any(tensor.float().any() for tensor in model.state_dict().values())
    assert rank.swap().verified == 15
    assert all(same(model, loaded(model, rank.named)).values())


def test_a_tensor_for_two_parameters_is_planned_and_tensors_in_the_same_place_are_not(tmp_path):
    model = Model()
    q, stack = model.loaders["q"], model.stack.data.view(4, 6)
    model.loaders["q"] = lambda t: (q(t), stack.copy_(t))
    model.loaders["stack"] = lambda t: None
    model.loaders["c1"] = lambda t: model.columns.data[:, :2].copy_(t)  # the same place as c0, later
    model.loaders["vectors"] = lambda t: model.vector.data[1:3, 1].copy_(t[1:3])  # part of the place of `vector`
    model.loaders["mid"] = lambda t: (
        model.mid.data[:7].copy_(t.view(-1)[:7]),
        model.mid.data[7:].copy_(t.view(-1)[6:9]),
    )
    rank = Rank(model, tensors(), tmp_path)
    planned = [rank.entries[i].name for i in blocks_of(rank.recording.blocks)["tensor"]]
    assert planned.count("q") == 2
    why = {rank.entries[i].name: why for i, why in rank.recording.stock.items()}
    assert {why[name] for name in ("c0", "c1", "vector", "vectors")} == {
        "the loader writes some of the same bytes twice"
    }
    assert why["mid"] == "the loader reads some of the same bytes twice"
    rank.swap(verify=False)
    expected = tensors()
    assert torch.equal(model.stack.data.view(4, 6), expected["q"]) and torch.equal(model.qk.data[:4], expected["q"])
    assert torch.equal(model.columns.data[:, :2], expected["c1"])


# --- what goes wrong is found -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("bucket", [0, 1])
def test_a_flipped_byte_stops_the_bucket(tmp_path, bucket):
    model = Model()
    rank = Rank(model, tensors(), tmp_path, n_buckets=2)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(RuntimeError, match=f"bucket {bucket} was damaged"):
        rank.swap(flip=bucket)
    if bucket == 0:
        assert all(same(model, before).values())
    assert rank.swap().verified == 15  # the next attempt starts from scratch
    assert all(same(model, loaded(model, rank.named)).values())


def test_lost_bytes_are_counted(tmp_path):
    rank = Rank(Model(), tensors(), tmp_path, n_buckets=2)
    rank.ask(Take(rank.reply, 0, checksum(rank.fill(0)), False))
    with pytest.raises(RuntimeError, match=f"but {rank.sent} were sent"):
        rank.ask(Finish(rank.reply, rank.sent, False))


def test_a_bucket_before_the_first(tmp_path):
    rank = Rank(Model(), tensors(), tmp_path, n_buckets=2)
    with pytest.raises(RuntimeError, match="no swap has begun"):
        rank.ask(Take(rank.reply, 1, checksum(rank.fill(1)), False))


def move_target(blocks):
    """k one row too high, over the last row of q."""
    k = blocks["tensor"] == list(SHAPES).index("k")
    blocks["target"][k] -= 24
    return blocks


def drop(name):
    def sabotage(blocks):
        return blocks[blocks["tensor"] != list(SHAPES).index(name)]

    return sabotage


def drop_rows(blocks):
    q = blocks["tensor"] == list(SHAPES).index("q")
    blocks["rows"][q] = 3
    return blocks


@pytest.mark.parametrize(
    ("sabotage", "wrong", "unwritten"),
    [(move_target, ["qk"], []), (drop("c1"), [], ["columns"]), (drop("turned"), [], ["turned"]), 
     (drop_rows, ["qk"], []), (drop("experts.1.w0"), [], ["experts"])],
)  # fmt: skip
def test_verifying_finds_a_wrong_plan(tmp_path, sabotage, wrong, unwritten):
    rank = Rank(Model(), tensors(), tmp_path, sabotage=sabotage)
    reply = rank.swap()
    assert (reply.wrong, reply.unwritten, reply.verified) == (wrong, unwritten, 14)


@pytest.mark.parametrize("parameter", ["qk", "converted", "columns", "padded", "filled", "scalar"])
def test_one_altered_element_is_found(tmp_path, parameter):
    rank = Rank(Model(), tensors(), tmp_path)
    rank.ask(Take(rank.reply, 0, checksum(rank.fill(0)), True))
    getattr(rank.model, parameter).data.view(-1)[-1] += 1
    assert rank.ask(Finish(rank.reply, rank.sent, True)) == Reply(None, 14, [parameter], [])


def test_a_parameter_that_was_exchanged_during_the_swap_is_found(tmp_path):
    rank = Rank(Model(), tensors(), tmp_path)
    rank.ask(Take(rank.reply, 0, checksum(rank.fill(0)), True))
    rank.model.qk.data = rank.model.qk.data.clone()
    assert rank.ask(Finish(rank.reply, rank.sent, True)).wrong == ["qk"]


def test_parameters_may_move_between_swaps_but_not_change(tmp_path):
    model = Model()
    rank = Rank(model, tensors(), tmp_path)
    rank.swap()
    old = model.stack.data
    model.stack.data = torch.zeros_like(old)
    rank.named = tensors(9)
    assert rank.swap().verified == 15
    assert torch.equal(model.stack.data, rank.named["stack"]) and not torch.equal(old, rank.named["stack"])
    model.stack.data = model.stack.data.transpose(0, 1)
    with pytest.raises(RuntimeError, match="another layout than when the plan was recorded"):
        rank.swap()


def test_an_error_of_the_loader_is_the_reply(tmp_path):
    model = Model()
    del model.loaders["q"]
    with pytest.raises(RuntimeError, match="KeyError: 'q'"):
        Rank(model, tensors(), tmp_path)


def test_a_rank_that_is_gone(tmp_path):
    rank = Rank(Model(), tensors(), tmp_path)
    with pytest.raises(RuntimeError, match="FileNotFoundError"):
        rank.ask(Open(rank.reply, ["memfd", "/proc/self/fd/999999"], str(tmp_path / "arrivals")))


@pytest.mark.parametrize("nbytes", [0, 1, 7, 8, 9, 4096, 100_003])
def test_the_checksum_of_gpus_sees_every_change(nbytes):
    torch.manual_seed(0)
    data = torch.randint(0, 256, (nbytes,), dtype=torch.uint8)
    digest = word_sum(data)
    assert digest == word_sum(data.clone()) and 0 <= digest < 2**64
    factors = [(i * -0x61C8864680B583EB) % 2**64 for i in range(1, nbytes // 8 + 1)]
    signed = [f - 2**64 if f >= 2**63 else f for f in factors]
    words = data[: nbytes // 8 * 8].numpy().view("<i8").tolist()
    last = int.from_bytes(data[nbytes // 8 * 8 :].numpy().tobytes(), "little")
    assert digest == (sum(w * ((f ^ (f >> 29)) | 1) for w, f in zip(words, signed)) + 3 * last) % 2**64
    for place in range(0, nbytes, max(1, nbytes // 50)):
        data[place] ^= 0x80
        assert word_sum(data) != digest
        data[place] ^= 0x80
    if nbytes >= 16:
        swapped = torch.cat([data[8:16], data[:8], data[16:]])
        assert word_sum(swapped) != digest
        assert word_sum(data[1:]) == word_sum(data[1:].clone())  # at any address
