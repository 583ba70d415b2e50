"""The verifier can fail: lost, misplaced and altered bytes are found, whatever the loader does with the tensors."""

import json

import msgspec
import pytest
import torch

from engine.verifier import BUCKET, ENTRIES, REPORT, verify
from sync.buckets import align
from sync.messages import Entry


class Model(torch.nn.Module):
    """Loads like SGLang: q and k into one tensor, column slices, a dtype conversion."""

    def __init__(self):
        super().__init__()
        self.qk = torch.nn.Parameter(torch.zeros(8, 6), requires_grad=False)
        self.right = torch.nn.Parameter(torch.zeros(4, 3, dtype=torch.bfloat16), requires_grad=False)
        self.columns = torch.nn.Parameter(torch.zeros(5, 4), requires_grad=False)
        self.skip = ""

    def load_weights(self, named):
        for name, tensor in named:
            if name == self.skip:
                continue
            target = {
                "q": self.qk.data[:4], "k": self.qk.data[4:], "right": self.right.data,
                "c0": self.columns.data[:, :2], "c1": self.columns.data[:, 2:],
            }[name]  # fmt: skip
            target.copy_(tensor[:, 3:] if name == "right" else tensor)


def tensors():
    torch.manual_seed(0)
    return [("q", torch.randn(4, 6)), ("k", torch.randn(4, 6)), ("right", torch.randn(4, 6)),
            ("c0", torch.randn(5, 2)), ("c1", torch.randn(5, 2))]  # fmt: skip


def uint8(data):
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def sent(named):
    """A bucket as the engine's child hands it to the verifier."""
    entries, parts, end = [], [], 0
    for name, tensor in named:
        room = torch.zeros(align(tensor.nbytes), dtype=torch.uint8)
        room[: tensor.nbytes] = tensor.contiguous().view(-1).view(torch.uint8)
        entries.append(Entry(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), end))
        parts.append(room)
        end += len(room)
    return [(BUCKET, torch.cat(parts)), (ENTRIES, uint8(msgspec.msgpack.encode(entries)))]


def report(model, buckets, directory, before_last=lambda: None):
    for bucket in buckets:
        model.load_weights(bucket)
        verify(model, sent(bucket))
    before_last()
    verify(model, [(REPORT, uint8(str(directory).encode()))])
    (path,) = directory.iterdir()
    return json.loads(path.read_text())


def test_a_good_load_verifies_all_parameters(tmp_path):
    named = tensors()
    assert report(Model(), [named[:3], named[3:]], tmp_path) == {"verified": 3, "wrong": [], "unwritten": []}


def test_verifying_writes_nothing(tmp_path):
    model, named = Model(), tensors()
    verify(model, sent(named))
    assert not any(p.any() for p in model.parameters())


@pytest.mark.parametrize("parameter", ["qk", "right", "columns"])
def test_one_altered_element_is_found(tmp_path, parameter):
    model = Model()

    def alter():
        getattr(model, parameter).data[-1, -1] += 1

    assert report(model, [tensors()], tmp_path, alter) == {"verified": 2, "wrong": [parameter], "unwritten": []}


@pytest.mark.parametrize(("skip", "parameter"), [("k", "qk"), ("c1", "columns"), ("right", "right")])
def test_a_tensor_that_the_loader_drops_is_found(tmp_path, skip, parameter):
    model = Model()
    model.skip = skip
    assert report(model, [tensors()], tmp_path) == {"verified": 2, "wrong": [], "unwritten": [parameter]}


def test_a_parameter_that_was_exchanged_is_found(tmp_path):
    model = Model()

    def exchange():
        model.qk.data = torch.full_like(model.qk, 7.0)

    assert report(model, [tensors()], tmp_path, exchange) == {"verified": 2, "wrong": ["qk"], "unwritten": []}


def test_a_later_bucket_may_overwrite_an_earlier_one(tmp_path):
    named = tensors()
    assert report(Model(), [named, [("q", torch.ones(4, 6))]], tmp_path)["wrong"] == []
