"""Mends SGLang's Llama loaders, which lose the scales of block FP8; installed in every SGLang process by plugin.py.

SGLang 0.5.23 loads a Llama's `….weight_scale_inv` under the name `….weight_scale`, which is what per-tensor FP8 calls
its one scale. A layer quantized in blocks calls it `weight_scale_inv`, so no parameter is found. models/llama.py
(`_legacy_load_weights`) then drops the tensor with a warning in the log, and the engine goes on with the new codes and
the scales it had before; the loader behind SGLANG_ENABLE_WEIGHT_LOADER_V2 (model_loader/auto_loader.py, `_llama_remap`)
raises. All classes that inherit the first are concerned: Llama, Mistral, Ministral3, Phi-3, InternLM3, TeleFLM, ...

Here the layers' own name counts, and only where a loader was seen to drop it: models without block scales, and loaders
that find them, run as SGLang wrote them.
"""

import dataclasses
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

BLOCK, TENSOR = ".weight_scale_inv", ".weight_scale"
_LOST = "_loses_block_scales"  # attribute of the model: what `loses` found


def load_weights(original: Callable[..., Any], model: Any, weights: Iterable[tuple[str, Any]]) -> Any:
    """Around `LlamaForCausalLM._legacy_load_weights`: it also finds block scales under the name it looks for."""
    if _LOST not in vars(model):
        setattr(model, _LOST, loses(original, model))
    return original(_Renamed(model) if getattr(model, _LOST) else model, weights)


def loses(original: Callable[..., Any], model: Any) -> bool:
    """Whether this loader drops a block scale of this model.

    It is asked with one name and no tensor, so nothing moves; a loader that drops it logs a warning.
    """
    name = next((name for name, _ in model.named_parameters() if name.endswith(BLOCK)), None)
    if name is None:
        return False
    found: list[Any] = []
    parameter = SimpleNamespace(weight_loader=lambda *arguments: found.append(arguments))
    original(_Alone(model, name, parameter), [(name, None)])
    return not found


def weight_remap(mapper: Any, model: Any) -> Any:
    """After `get_weight_remap`: without the renaming of names that the model itself has. None: leave it as it is."""
    if mapper is None or mapper.orig_to_new_suffix.get(BLOCK) != TENSOR:
        return None
    if not any(name.endswith(BLOCK) for name, _ in model.named_parameters()):
        return None
    kept = {old: new for old, new in mapper.orig_to_new_suffix.items() if old != BLOCK}
    return dataclasses.replace(mapper, orig_to_new_suffix=kept)


class _Seen:
    """A model as its loader sees it: other parameters, all else the same."""

    def __init__(self, model: Any):
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


class _Renamed(_Seen):
    """Block scales under both names, unless the model has something else by the other one."""

    def named_parameters(self) -> list[tuple[str, Any]]:
        named = dict(self._model.named_parameters())
        renamed = {name.removesuffix(BLOCK) + TENSOR: p for name, p in named.items() if name.endswith(BLOCK)}
        return list((renamed | named).items())


class _Alone(_Seen):
    """One parameter, which notes that it is loaded."""

    def __init__(self, model: Any, name: str, parameter: Any):
        super().__init__(model)
        self._named = [(name, parameter)]

    def named_parameters(self) -> list[tuple[str, Any]]:
        return self._named
