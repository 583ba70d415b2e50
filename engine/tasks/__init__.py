"""Tasks: a task owns its prompts AND its reward. `load_task` finds one by name.

    arithmetic              built in, offline, instant          engine/tasks/arithmetic.py
    reasoning_gym:DATASET   procedural problems, endless        engine/tasks/reasoning.py
    math                    jsonl, parquet or a Hugging Face    engine/tasks/math.py
                            dataset directory; math-verify
    MODULE:FUNCTION         your own: FUNCTION(seed=…, **params) returns an object like `engine.tasks.base.Task`

Imports are lazy, because reward workers load this package and must stay light.
"""

import difflib
import inspect
from collections.abc import Callable
from typing import Annotated, Any

import msgspec

from engine.tasks.base import Example, Task, load_function
from sync.fields import doc

NAMES = ("arithmetic", "math")  # beside reasoning_gym:DATASET and MODULE:FUNCTION
GYM = "reasoning_gym:"


class TaskConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where prompts and rewards come from."""

    name: Annotated[str, doc("arithmetic, math, reasoning_gym:DATASET, or your own MODULE:FUNCTION.")] = "arithmetic"
    params: Annotated[dict[str, Any], doc("Parameters of the named task; each task checks its own.")] = {}
    held_out: Annotated[int, doc("Problems kept out of training for evaluation.", unit="problems", ge=1)] = 256
    chat_template: Annotated[
        bool | None, doc("Wrap prompts in the tokenizer's chat template; null: where it has one.")
    ] = None
    system_prompt: Annotated[str | None, doc("System message put before every prompt (needs a chat template).")] = None
    max_prompt_tokens: Annotated[
        int, doc("Longer prompts are skipped, or an error for an endless task.", unit="tokens", ge=1)
    ] = 1024
    reward_workers: Annotated[int, doc("Processes that compute rewards, per rank.", unit="processes", ge=1)] = 2
    reward_timeout_s: Annotated[float, doc("Time limit of one reward; past it the sample is lost.", "s", gt=0)] = 10.0
    reward_memory_mib: Annotated[int, doc("Data memory limit of one reward worker.", unit="MiB", ge=256)] = 4096

    def __post_init__(self) -> None:
        if self.name not in NAMES and ":" not in self.name:
            raise ValueError(_unknown(self.name, [*NAMES, GYM + "DATASET", "MODULE:FUNCTION"]))
        if self.system_prompt is not None and self.chat_template is False:
            raise ValueError("system_prompt needs a chat template: set chat_template to true or null")


def load_task(config: TaskConfig, seed: int) -> Task:
    """The task `config` names. Held-out problems do not depend on `seed`: every seed sits the same exam.

    Raises ValueError for an unknown name (with the nearest valid ones), bad params, or unreadable or empty data.
    """
    if config.name == "arithmetic":
        from engine.tasks.arithmetic import Arithmetic

        return Arithmetic(config.params, config.held_out, seed)
    if config.name == "math":
        from engine.tasks.math import Math

        return Math(config.params, config.held_out)
    if config.name.startswith(GYM):
        from engine.tasks.reasoning import ReasoningGym, dataset_names

        dataset = config.name.removeprefix(GYM)
        if dataset not in dataset_names():
            raise ValueError(_unknown(config.name, [GYM + name for name in dataset_names()]))
        return ReasoningGym(dataset, config.params, config.held_out, seed)
    return _user_task(config, seed)


def load_reward(config: TaskConfig, seed: int) -> Callable[[Example, str], float]:
    """The reward alone: what a worker needs. Reads no data files."""
    if config.name == "math":
        from engine.tasks.math import load_verifier

        return load_verifier(config.params)
    return load_task(config, seed).reward


def _user_task(config: TaskConfig, seed: int) -> Task:
    function = load_function(config.name)
    try:
        inspect.signature(function).bind(seed=seed, **config.params)
    except TypeError as error:
        raise ValueError(f"task {config.name!r} is called with seed and params: {error}") from None
    task = function(seed=seed, **config.params)
    wanted = ("n_train", "n_held_out", "train", "held_out", "reward")
    if missing := [name for name in wanted if not hasattr(task, name)]:
        raise ValueError(f"task {config.name!r} returned a {type(task).__name__} without {', '.join(missing)}")
    return task


def _unknown(name: str, valid: list[str]) -> str:
    nearest = difflib.get_close_matches(name, valid, n=3, cutoff=0.5) or valid[:4]
    return f"unknown task {name!r}; nearest: {', '.join(nearest)}"
