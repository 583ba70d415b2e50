"""Runs inside SGLang's scheduler processes: proves that every engine parameter holds the bytes that were sent.

SGLang's own `load_weights` decides where a tensor goes (fused qkv, `w13`, tensor-parallel slices). The verifier lets it
run a second time over the same bucket, but under a dispatch mode that swallows each copy into a parameter and notes
the checksum the target must have. After the last bucket, one more call compares all noted targets with what the
parameters hold now, and reports every parameter with a byte that is wrong or was never written.
"""

import json
import os
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from sync.buckets import checksum, views
from sync.messages import Entry

BUCKET, ENTRIES, REPORT = "bucket", "entries", "report"
ENGINES_OWN = ("attn.k_scale", "attn.v_scale")  # parameters that no checkpoint of a plain KV cache fills
_STATE = "_hotswap_expected"  # attribute of the model: what each written strip must hold


def verify(model: torch.nn.Module, named_tensors: list[tuple[str, Tensor]]) -> None:
    """SGLang's custom weight loader `engine.verifier.verify`.

    `named_tensors` are BUCKET (uint8) and ENTRIES (its msgpack list of `Entry`, as uint8), once per bucket, or REPORT
    alone (a directory, as uint8 text), once per swap: it writes `<pid>.json` = {"verified": parameters, "wrong":
    [names], "unwritten": [names]} there. Uint8 tensors are all that SGLang's loader interface carries.
    """
    given = dict(named_tensors)
    parameters = {name: parameter.data for name, parameter in model.named_parameters()}
    if REPORT in given:
        report = _compare(parameters, model.__dict__.pop(_STATE, {}))
        Path(_bytes(given[REPORT]).decode(), f"{os.getpid()}.json").write_text(json.dumps(report))
        return
    entries = msgspec.msgpack.decode(_bytes(given[ENTRIES]), type=list[Entry])
    with _NoteCopies(parameters, model.__dict__.setdefault(_STATE, {})):
        model.load_weights(list(views(given[BUCKET], entries)))  # type: ignore[operator]


def _bytes(tensor: Tensor) -> bytes:
    return tensor.cpu().numpy().tobytes()


class _NoteCopies(TorchDispatchMode):
    """Swallows `parameter_view.copy_(source)` and notes the checksum of what it would have written."""

    def __init__(self, parameters: dict[str, Tensor], expected: dict[tuple[str, int], tuple[Tensor, int]]):
        super().__init__()
        self.by_storage = {t.untyped_storage().data_ptr(): name for name, t in parameters.items()}
        self.expected = expected

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            target, source = args[0], args[1]
            name = self.by_storage.get(target.untyped_storage().data_ptr())
            if name is not None:
                source = source.to(target.device, target.dtype).expand(target.shape)
                for strip, part in zip(_strips(target), _strips(source, like=target), strict=True):
                    self.expected[name, int(strip.storage_offset())] = (strip, checksum(part))
                return target
        return func(*args, **(kwargs or {}))


def _strips(tensor: Tensor, like: Tensor | None = None) -> list[Tensor]:
    """`tensor` cut along leading dimensions until each piece of `like` (default: itself) is contiguous."""
    like = tensor if like is None else like
    if like.is_contiguous():
        return [tensor]
    return [strip for i in range(len(like)) for strip in _strips(tensor[i], like[i])]


def _compare(parameters: dict[str, Tensor], expected: dict[tuple[str, int], tuple[Tensor, int]]) -> dict[str, Any]:
    wrong, covered = set(), dict.fromkeys(parameters, 0)
    ends: dict[str, int] = {}
    for (name, offset), (strip, digest) in sorted(expected.items(), key=lambda item: item[0]):
        # A parameter whose data was exchanged for another tensor no longer holds what was loaded into the old one.
        moved = strip.untyped_storage().data_ptr() != parameters[name].untyped_storage().data_ptr()
        if moved or checksum(strip) != digest:
            wrong.add(name)
        covered[name] += max(0, offset + strip.numel() - max(offset, ends.get(name, 0)))
        ends[name] = max(ends.get(name, 0), offset + strip.numel())
    unwritten = {name for name, count in covered.items() if count != parameters[name].numel()}
    unwritten = {name for name in unwritten if covered[name] or not name.endswith(ENGINES_OWN)} - wrong
    verified = sum(covered[name] > 0 for name in parameters.keys() - wrong - unwritten)
    return {"verified": verified, "wrong": sorted(wrong), "unwritten": sorted(unwritten)}
