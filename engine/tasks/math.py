"""Problems from a file with a verifiable answer: math-verify by default, exact match, or your own function.

task:
  name: math
  params: {path: data/gsm8k, split: train, held_out_split: test, prompt: question}
"""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import msgspec

from engine.tasks.base import Example, after_thinking, load_function, read_params
from engine.tasks.rows import read_rows
from sync.fields import doc


class MathParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    path: Annotated[str, doc("A .jsonl or .parquet file, or a Hugging Face dataset directory.")]
    split: Annotated[str | None, doc("Split inside a directory; null: train where there is one, else all.")] = None
    held_out_path: Annotated[str | None, doc("Held-out data; null: the last task.held_out rows of path.")] = None
    held_out_split: Annotated[str | None, doc("Split of the held-out data; alone, it is read from path.")] = None
    prompt: Annotated[str, doc("Field with the prompt: text or chat messages. Dots reach inside objects.")] = "prompt"
    answer: Annotated[str, doc("Field with the answer.")] = "answer"
    demonstration: Annotated[str | None, doc("Field with a worked solution for the sft stage; null: none.")] = None
    template: Annotated[str, doc("Text around a plain prompt; {prompt} stands for it.")] = "{prompt}"
    verifier: Annotated[str, doc("math, exact, or MODULE:FUNCTION called with (example, completion).")] = "math"

    def __post_init__(self) -> None:
        if "{prompt}" not in self.template:
            raise ValueError("template must contain {prompt}")
        if self.verifier not in ("math", "exact") and ":" not in self.verifier:
            raise ValueError(f"verifier {self.verifier!r}: math, exact or MODULE:FUNCTION")


class Math:
    """A finite task over files. ValueError for unreadable data, or fewer rows than are held out."""

    def __init__(self, params: dict[str, Any], n_held_out: int):
        parsed = read_params(MathParams, params)
        self._verifier = load_verifier(params)
        self._train = _examples(parsed, parsed.path, parsed.split)
        if parsed.held_out_path or parsed.held_out_split:
            self._held_out = _examples(parsed, parsed.held_out_path or parsed.path, parsed.held_out_split)
        elif n_held_out < len(self._train):
            self._train, self._held_out = self._train[:-n_held_out], self._train[-n_held_out:]
        else:
            raise ValueError(
                f"{parsed.path}: {len(self._train)} rows, of which task.held_out = {n_held_out} are held out; "
                "lower it or give task.params.held_out_path"
            )
        self.n_train = len(self._train)
        self.n_held_out = len(self._held_out)

    def train(self, index: int) -> Example:
        return self._train[index]

    def held_out(self, index: int) -> Example:
        return self._held_out[index]

    def reward(self, example: Example, completion: str) -> float:
        return self._verifier(example, completion)


def load_verifier(params: dict[str, Any]) -> Callable[[Example, str], float]:
    """The reward function that `params.verifier` names; reads no data."""
    verifier = read_params(MathParams, params).verifier
    if verifier == "exact":
        return exact_reward
    if verifier == "math":
        # With its own timeouts off, math-verify warns once in each process; the reward pool keeps the time.
        logging.getLogger("math_verify").setLevel(logging.ERROR)
        return math_reward
    return load_function(verifier)


def exact_reward(example: Example, completion: str) -> float:
    """1 where the completion, after any thinking, is the answer up to surrounding space."""
    return float(after_thinking(completion) == example.answer.strip())


def math_reward(example: Example, completion: str) -> float:
    """1 where math-verify finds the completion equal to the answer (boxed, LaTeX or plain), else 0.

    The last \\boxed{} decides, or all of them as one set; without any, math-verify picks the expression to compare.
    Nothing outside a box counts beside one, or a response could try two answers. GSM8K's "… #### 72" works.
    """
    from math_verify import parse, verify

    answer = example.answer.rsplit("####", 1)[-1].strip()
    text = after_thinking(completion)
    if text == answer:
        return 1.0
    # math-verify reads bare LaTeX only inside an environment. It times itself by signal; the pool does that here.
    gold = parse(answer if "\\boxed" in answer else f"\\boxed{{{answer}}}", parsing_timeout=None)  # type: ignore[arg-type]
    boxed = boxes(text)
    for candidate in (boxed[-1], ", ".join(boxed)) if boxed else (text,):
        given = parse(candidate, parsing_timeout=None)  # type: ignore[arg-type]
        if given and verify(gold, given, timeout_seconds=None):
            return 1.0
    return 0.0


def boxes(text: str) -> list[str]:
    """Every complete `\\boxed{…}` of `text` in order, braces balanced, outermost only."""
    found, position = [], 0
    while (start := text.find("\\boxed{", position)) >= 0:
        depth, position = 1, start + len("\\boxed{")
        while depth and position < len(text):
            depth += {"{": 1, "}": -1}.get(text[position], 0)
            position += 1
        if depth == 0:
            found.append(text[start:position])
    return found


def _examples(params: MathParams, path: str, split: str | None) -> list[Example]:
    fields = [params.prompt, params.answer] + ([params.demonstration] if params.demonstration else [])
    examples = []
    for row in read_rows(Path(path).expanduser(), split, fields):
        demonstration = str(row[params.demonstration]) if params.demonstration else None
        prompt = _prompt(row[params.prompt], params)
        examples.append(Example(prompt=prompt, answer=str(row[params.answer]), demonstration=demonstration))
    return examples


def _prompt(value: Any, params: MathParams) -> str | list[dict[str, str]]:
    if isinstance(value, str):
        return params.template.replace("{prompt}", value)
    try:
        return [{"role": str(message["role"]), "content": str(message["content"])} for message in value]
    except (TypeError, KeyError):
        raise ValueError(
            f"{params.path}: field {params.prompt!r} holds neither text nor chat messages: {str(value)[:80]}"
        ) from None
