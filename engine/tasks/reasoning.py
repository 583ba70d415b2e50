"""reasoning_gym: procedural problems with their own scorers, as an endless task.

A reasoning_gym dataset derives item i from `seed + i`, and some of them build tables as long as `size`. So training
reads blocks of `BLOCK` items, each a dataset with its own range of seeds, far from the held-out range. Small problem
spaces repeat questions across seeds; a training question that is also held out is passed over.
"""

from functools import cached_property, lru_cache
from typing import Any

import reasoning_gym
from reasoning_gym.factory import DATASETS
from reasoning_gym.utils import extract_answer

from engine.tasks.base import Example, after_thinking

BLOCK = 1000  # items per generated dataset
SEEDS_PER_RUN = 1_000_000  # seeds 0… are held out; run seed s trains on SEEDS_PER_RUN * (s + 1) …
MAX_RUN_SEEDS = 4000  # numpy takes seeds below 2**32
MAX_TRIES = 100


def dataset_names() -> list[str]:
    return sorted(DATASETS)


class ReasoningGym:
    """Dataset `name` with `params` given to its config; `size` and `seed` are set here.

    The answer of a completion is what the last `<answer>…</answer>` holds, or else all of it after `</think>`.
    Raises ValueError for parameters the dataset refuses.
    """

    def __init__(self, name: str, params: dict[str, Any], n_held_out: int, seed: int):
        if taken := {"size", "seed"} & params.keys():
            raise ValueError(f"task.params: {sorted(taken)[0]!r} is set by the task; remove it")
        self.n_train = None
        self.n_held_out = n_held_out
        self._name, self._params = name, params
        self._first_seed = SEEDS_PER_RUN * (seed % MAX_RUN_SEEDS + 1)
        # Evaluation and training alternate: two blocks, and one to spare.
        self._block = lru_cache(maxsize=3)(self._create)
        self._scorer = self._create(0, 1)

    def train(self, index: int) -> Example:
        for candidate in range(index, index + MAX_TRIES):
            block, offset = divmod(candidate, BLOCK)
            example = _example(self._block(self._first_seed + block * BLOCK, BLOCK)[offset])
            if example.prompt not in self._held_out_questions:
                return example
        raise ValueError(
            f"reasoning_gym:{self._name} has too few distinct problems to hold out {self.n_held_out} of them; "
            "lower task.held_out or widen task.params"
        )

    def held_out(self, index: int) -> Example:
        return _example(self._block(0, self.n_held_out)[index])

    def reward(self, example: Example, completion: str) -> float:
        text = after_thinking(completion)
        answer = extract_answer(text)
        entry = {"question": example.prompt, "answer": example.answer, "metadata": example.metadata}
        return self._scorer.score_answer(text if answer is None else answer, entry)

    @cached_property
    def _held_out_questions(self) -> set[str]:
        return {str(self.held_out(index).prompt) for index in range(self.n_held_out)}

    def _create(self, seed: int, size: int) -> Any:
        try:
            return reasoning_gym.create_dataset(self._name, seed=seed, size=size, **self._params)
        except (TypeError, AssertionError, ValueError) as error:
            raise ValueError(f"task.params: reasoning_gym:{self._name} refuses them: {error}") from error


def _example(entry: dict[str, Any]) -> Example:
    answer = entry["answer"]
    return Example(
        prompt=entry["question"], answer=answer, metadata=entry["metadata"],
        demonstration=answer if isinstance(answer, str) else None,
    )  # fmt: skip
