"""The nouns every task shares: `Example`, the `Task` protocol, and reading `task.params`.

A leaf file, and a light one: reward workers import it, so neither torch nor transformers may come in from here.
"""

import importlib
import os
import sys
from collections.abc import Callable
from typing import Any, Protocol, TypeVar, runtime_checkable

import msgspec

Params = TypeVar("Params", bound=msgspec.Struct)


class Example(msgspec.Struct, frozen=True, kw_only=True):
    """One problem. Plain, picklable data: it travels to the reward worker.

    `Example(prompt="31415=", answer="11345", demonstration="11345")`
    """

    prompt: str | list[dict[str, str]]  # plain text, or chat messages [{"role": …, "content": …}]
    answer: str = ""  # what the reward compares with
    metadata: dict[str, Any] = {}  # whatever else the reward needs
    demonstration: str | None = None  # a good response, for the supervised warm start; None: the task has none


@runtime_checkable
class Task(Protocol):
    """Prompts and their reward. `train` and `held_out` are pure functions of the index and share no problem."""

    @property
    def n_train(self) -> int | None:
        """Training problems; None: endless, any index >= 0 will do."""
        ...

    @property
    def n_held_out(self) -> int:
        """Problems kept for evaluation."""
        ...

    def train(self, index: int) -> Example: ...

    def held_out(self, index: int) -> Example: ...

    def reward(self, example: Example, completion: str) -> float:
        """Reward of one completion, without special tokens. Runs in a worker process; it may raise."""
        ...


def read_params(kind: type[Params], params: dict[str, Any]) -> Params:
    """`task.params` as a struct of `kind`; ValueError names the key and lists what is allowed."""
    try:
        return msgspec.convert(params, kind)
    except msgspec.ValidationError as error:
        allowed = ", ".join(kind.__struct_fields__)
        raise ValueError(f"task.params: {error} (allowed keys: {allowed})") from None


def load_function(spec: str) -> Callable[..., Any]:
    """The function named `module:function`; modules are also looked for in the current directory.

    Raises ValueError where the module does not import or has no such function.
    """
    module_name, _, function_name = spec.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        function = getattr(importlib.import_module(module_name), function_name, None)
    except ImportError as error:
        raise ValueError(f"{spec!r}: cannot import {module_name!r}: {error}") from error
    if not callable(function):
        raise ValueError(f"{spec!r}: module {module_name!r} has no function {function_name!r}")
    return function


def after_thinking(completion: str) -> str:
    """The part that counts as the answer: what follows the last `</think>`, or everything, stripped."""
    return completion.rsplit("</think>", 1)[-1].strip()
