"""Prompts: from a position in the data to token ids, with no state but the position.

`draw(cursor, n)` depends on the seed and the cursor alone. A checkpoint therefore stores one integer, and a resumed
run draws the prompts the first one would have drawn.
"""

from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from engine.tasks import TaskConfig
from engine.tasks.base import Example, Task


class Prompt(msgspec.Struct, frozen=True, kw_only=True):
    """An example and its prompt as the engine gets it."""

    example: Example
    ids: NDArray[Any]  # i32[P], P <= max_prompt_tokens


class Prompts:
    """The prompts of one task under one tokenizer (any Hugging Face tokenizer).

    A finite task is read through once at the start, to leave out prompts above `config.max_prompt_tokens`; `skipped`
    counts them. Raises ValueError where none is left, or where a chat template is needed and the tokenizer has none.
    """

    def __init__(self, task: Task, tokenizer: Any, config: TaskConfig, seed: int):
        self.tokenizer = tokenizer
        self._task, self._seed = task, seed
        self._limit, self._system = config.max_prompt_tokens, config.system_prompt
        self._chat = bool(tokenizer.chat_template) if config.chat_template is None else config.chat_template
        if self._chat and not tokenizer.chat_template:
            raise ValueError("task.chat_template is true, but the tokenizer has none")
        if self._system is not None and not self._chat:
            raise ValueError("task.system_prompt needs a chat template, and the tokenizer has none")
        self._train = None if task.n_train is None else self._fitting(task.train, task.n_train, "training")
        self._held_out = self._fitting(task.held_out, task.n_held_out, "held-out")
        kept = len(self._held_out) + (0 if self._train is None else len(self._train))
        self.skipped = task.n_held_out + (task.n_train or 0) - kept

    @property
    def n_held_out(self) -> int:
        return len(self._held_out)

    def draw(self, cursor: int, n: int) -> list[Prompt]:
        """Training prompts `cursor … cursor + n - 1` of the endless stream.

        A finite task is permuted anew in every epoch. An endless one is indexed; ValueError where a prompt is too long.
        """
        return [self._prompt(example) for example in self._examples(cursor, n)]

    def held_out(self, n: int) -> list[Prompt]:
        """The first n held-out prompts, or all of them where there are fewer: the same at every evaluation."""
        return [self._prompt(self._task.held_out(int(index))) for index in self._held_out[:n]]

    def demonstrations(self, cursor: int, n: int) -> list[tuple[NDArray[Any], NDArray[Any]]]:
        """`(prompt i32[P], response i32[R] with EOS)` of the examples that `draw(cursor, n)` gives.

        Raises ValueError where the task shows no demonstration.
        """
        pairs = []
        for example in self._examples(cursor, n):
            if example.demonstration is None:
                raise ValueError("the task has no demonstrations, which the sft stage needs")
            response = self.tokenizer(example.demonstration, add_special_tokens=False)["input_ids"]
            response = [*response, self.tokenizer.eos_token_id]
            pairs.append((self._prompt(example).ids, np.asarray(response, np.int32)))
        return pairs

    def _examples(self, cursor: int, n: int) -> list[Example]:
        if self._train is None:
            return [self._task.train(index) for index in range(cursor, cursor + n)]
        examples, size = [], len(self._train)
        for epoch in range(cursor // size, (cursor + n - 1) // size + 1):
            order = self._train[np.random.default_rng([self._seed, epoch]).permutation(size)]
            first, last = max(cursor - epoch * size, 0), min(cursor + n - epoch * size, size)
            examples += [self._task.train(int(index)) for index in order[first:last]]
        return examples

    def _fitting(self, get: Any, count: int, part: str) -> NDArray[Any]:
        lengths = np.asarray([len(self._encode(get(index))) for index in range(count)])
        fitting = np.flatnonzero(lengths <= self._limit)
        if len(fitting) == 0:
            shortest = f"; the shortest has {lengths.min()}" if count else ""
            raise ValueError(
                f"none of {count} {part} prompts has at most task.max_prompt_tokens = {self._limit} tokens{shortest}"
            )
        return fitting

    def _prompt(self, example: Example) -> Prompt:
        ids = self._encode(example)
        if len(ids) > self._limit:
            raise ValueError(f"a prompt has {len(ids)} tokens, above task.max_prompt_tokens = {self._limit}")
        return Prompt(example=example, ids=ids)

    def _encode(self, example: Example) -> NDArray[Any]:
        prompt = example.prompt
        if self._chat:
            messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
            if self._system is not None and messages[0]["role"] != "system":
                messages = [{"role": "system", "content": self._system}, *messages]
            text = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
            ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]  # the template wrote them already
        elif isinstance(prompt, str):
            ids = self.tokenizer(prompt)["input_ids"]
        else:
            raise ValueError("the task gives chat messages, which need task.chat_template and a tokenizer that has one")
        if len(ids) == 0:
            raise ValueError(f"a prompt has no tokens: {prompt!r}")
        return np.asarray(ids, np.int32)
