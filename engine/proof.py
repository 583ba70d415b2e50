"""Runs inside SGLang's scheduler processes: proves that every engine parameter holds the bytes that were sent.

SGLang's own `load_weights` decides where a tensor goes. It runs once more over what arrived, under a dispatch mode that
swallows each write into a parameter and notes the checksum the target must have. After the last bucket all noted
targets are compared with what the parameters hold now.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from engine.recorder import numbers_by_storage, parameters_of, written
from sync.buckets import checksum

ENGINES_OWN = ("attn.k_scale", "attn.v_scale")  # parameters that no checkpoint of a plain KV cache fills
Notes = dict[tuple[int, int], tuple[Tensor, int]]  # parameter's number, first byte → where to look, the checksum there


class NoteWrites(TorchDispatchMode):
    """Swallows writes into the parameters of `model`, and notes what they would have left there."""

    def __init__(self, model: torch.nn.Module, notes: Notes):
        super().__init__()
        self.numbers, self.notes = numbers_by_storage(parameters_of(model)), notes

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # see engine/recorder.py

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten.copy_.default:
            number = self.numbers.get(args[0].untyped_storage().data_ptr())
            if number is not None:
                self._note(number, args[0], args[1].to(args[0].device, args[0].dtype).expand_as(args[0]))
                return args[0]
        elif func._schema.is_mutable:
            for target in written(func, args, kwargs):
                if target is args[0] and (number := self.numbers.get(target.untyped_storage().data_ptr())) is not None:
                    self._note(number, target, func(target.clone(), *args[1:], **kwargs))  # fill_, zero_, ...
                    return target
        return func(*args, **kwargs)

    def _note(self, number: int, target: Tensor, source: Tensor) -> None:
        for strip, part in zip(_strips(target), _strips(source, like=target), strict=True):
            if strip.numel():
                self.notes[number, int(strip.storage_offset()) * strip.itemsize] = (strip, checksum(part))


def _strips(tensor: Tensor, like: Tensor | None = None) -> list[Tensor]:
    """`tensor` cut along leading dimensions until each piece of `like` (default: itself) is contiguous."""
    like = tensor if like is None else like
    if like.is_contiguous():
        return [tensor]
    return [strip for i in range(len(like)) for strip in _strips(tensor[i], like[i])]


def compare(model: torch.nn.Module, notes: Notes) -> tuple[int, list[str], list[str]]:
    """(parameters proved right, names of those with a wrong byte, names of those with a byte that was not written).

    Parameters that share a storage count as one, under the first name.
    """
    parameters = parameters_of(model)
    names, tensors, numbers = list(parameters), list(parameters.values()), numbers_by_storage(parameters)
    parts: dict[int, set[tuple[int, int]]] = {}  # of each storage: first byte, bytes
    for tensor in tensors:
        if tensor.numel():
            number = numbers[tensor.untyped_storage().data_ptr()]
            parts.setdefault(number, set()).add((int(tensor.storage_offset()) * tensor.itemsize, tensor.nbytes))
    wrong: set[str] = set()
    covered, ends = dict.fromkeys(parts, 0), dict.fromkeys(parts, 0)
    for (number, begin), (strip, digest) in sorted(notes.items(), key=lambda item: item[0]):
        # A parameter whose data was exchanged for another tensor no longer holds what was loaded into the old one.
        if numbers.get(strip.untyped_storage().data_ptr()) != number or checksum(strip) != digest:
            wrong.add(names[number])
        if number in covered:
            end = begin + strip.nbytes
            covered[number] += max(0, end - max(begin, ends[number]))
            ends[number] = max(ends[number], end)
    unwritten = {names[number] for number, part in parts.items() if covered[number] != sum(size for _, size in part)}
    written_some = {names[number] for number, count in covered.items() if count}
    unwritten = {name for name in unwritten if name in written_some or not name.endswith(ENGINES_OWN)} - wrong
    return len(written_some - wrong - unwritten), sorted(wrong), sorted(unwritten)
