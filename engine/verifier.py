"""Runs inside SGLang's scheduler processes: proves that every engine parameter holds the bytes that were sent.

SGLang's own `load_weights` decides where a tensor goes (fused qkv, `w13`, tensor-parallel slices). The verifier lets it
run a second time over the same bucket, but under a dispatch mode that swallows each copy into a parameter and notes
the checksum the target must have. After the session has ended, the last call compares all noted targets with what the
parameters hold now, and reports every parameter with a byte that is wrong or was never written.
"""

import json
import os
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_STATE = "_hotswap_expected"  # attribute of the model: what each written strip must hold


def verify(model: torch.nn.Module, named_tensors: list[tuple[str, Tensor]]) -> None:
    """SGLang's custom weight loader `engine.verifier.verify`.

    `named_tensors` is a bucket and ("__report__", directory as uint8 text). Without a bucket this is the last call of
    a swap: it writes `<pid>.json` = {"verified": parameters, "wrong": [names]} into the directory.
    """
    tensors = dict(named_tensors)
    directory = Path(bytes(tensors.pop("__report__").cpu().tolist()).decode())
    parameters = {name: parameter.data for name, parameter in model.named_parameters()}
    if tensors:
        expected = model.__dict__.setdefault(_STATE, {})
        with _NoteCopies(parameters, expected):
            model.load_weights(list(tensors.items()))  # type: ignore[operator]
        return
    report = _compare(parameters, model.__dict__.pop(_STATE, {}))
    (directory / f"{os.getpid()}.json").write_text(json.dumps(report))


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
                    self.expected[name, strip.storage_offset()] = (strip, checksum(part))
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
        if checksum(strip) != digest:
            wrong.add(name)
        covered[name] += max(0, offset + strip.numel() - max(offset, ends.get(name, 0)))
        ends[name] = max(ends.get(name, 0), offset + strip.numel())
    wrong |= {name for name, count in covered.items() if count != parameters[name].numel()}
    return {"verified": len(parameters) - len(wrong), "wrong": sorted(wrong)}


def checksum(tensor: Tensor) -> int:
    """XXH3 (64 bit) of the bytes of a tensor on any device."""
    return xxhash.xxh3_64_intdigest(tensor.detach().contiguous().cpu().view(-1).view(torch.uint8).numpy())
