"""Arithmetic and digit puzzles: offline, endless, instant. What the demo and most tests learn.

Prompts use only `0-9 + - = > ` and answers only digits and `-`, so a tiny character tokenizer is enough:

    sort     "31415="  -> "11345"       add  "12+34=" -> "46"
    reverse  "31415>"  -> "51413"       sub  "12-34=" -> "-22"

A problem belongs to training or to the held-out set by a hash of its prompt, so the two never share one, whatever the
seed. Held-out problems do not depend on the seed.
"""

import hashlib
import random
from typing import Annotated, Any, Literal

import msgspec

from engine.tasks.base import Example, read_params
from sync.fields import doc

HELD_OUT_SHARE = 8  # one problem in 8 is never trained on
MAX_TRIES = 1000  # chance that all tries land in the wrong part: (7/8)^1000


class ArithmeticParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    kind: Annotated[Literal["sort", "add", "sub", "reverse"], doc("What to compute.")] = "sort"
    digits: Annotated[int, doc("Digits of each number, at most for add and sub.", unit="digits", ge=2, le=64)] = 5
    distinct: Annotated[bool, doc("No digit twice in a number (sort and reverse).")] = False
    partial: Annotated[bool, doc("Reward the fraction of right characters instead of the exact answer.")] = False

    def __post_init__(self) -> None:
        if self.distinct and (self.digits > 10 or self.kind not in ("sort", "reverse")):
            raise ValueError("distinct needs kind sort or reverse and at most 10 digits")


class Arithmetic:
    """See the module docstring. `params` as in `ArithmeticParams`; ValueError for anything else."""

    def __init__(self, params: dict[str, Any], n_held_out: int, seed: int):
        self.params = read_params(ArithmeticParams, params)
        self.n_train = None
        self.n_held_out = n_held_out
        self._seed = seed

    def train(self, index: int) -> Example:
        return self._draw(f"train/{self._seed}/{index}", held_out=False)

    def held_out(self, index: int) -> Example:
        return self._draw(f"held_out/{index}", held_out=True)

    def reward(self, example: Example, completion: str) -> float:
        """1 for the exact answer, else 0; with `partial`, right characters over the longer of the two lengths."""
        given = completion.strip()
        if given == example.answer or not self.params.partial:
            return float(given == example.answer)
        right = sum(a == b for a, b in zip(given, example.answer))
        return right / max(len(given), len(example.answer))

    def _draw(self, stream: str, held_out: bool) -> Example:
        rng = random.Random(stream)
        for _ in range(MAX_TRIES):
            prompt, answer = _problem(self.params, rng)
            if _is_held_out(prompt) == held_out:
                return Example(prompt=prompt, answer=answer, demonstration=answer)
        raise ValueError(f"task.params: too few {self.params.kind} problems with {self.params.digits} digits to split")


def _problem(params: ArithmeticParams, rng: random.Random) -> tuple[str, str]:
    kind, digits = params.kind, params.digits
    if kind in ("sort", "reverse"):
        text = "".join(rng.sample("0123456789", digits) if params.distinct else rng.choices("0123456789", k=digits))
        return (text + "=", "".join(sorted(text))) if kind == "sort" else (text + ">", text[::-1])
    a, b = rng.randrange(10**digits), rng.randrange(10**digits)
    return (f"{a}+{b}=", str(a + b)) if kind == "add" else (f"{a}-{b}=", str(a - b))


def _is_held_out(prompt: str) -> bool:
    return hashlib.blake2b(prompt.encode(), digest_size=1).digest()[0] % HELD_OUT_SHARE == 0
