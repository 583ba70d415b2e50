"""Tasks: right answers, disjoint held-out sets, every file format, every kind of bad input, stateless prompts."""

import json
import pickle
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.tasks import TaskConfig, load_reward, load_task
from engine.tasks.base import Example, Task
from engine.tasks.math import boxes, exact_reward, math_reward
from engine.tasks.prompts import Prompts

KINDS = ("sort", "add", "sub", "reverse")


def arithmetic(seed: int = 0, held_out: int = 256, **params: Any) -> Task:
    return load_task(TaskConfig(name="arithmetic", params=params, held_out=held_out), seed)


# ---------------------------------------------------------------------------------------------- arithmetic


def solve(prompt: str) -> str:
    """Independent oracle: Python's own evaluation, and counting sort."""
    body, mark = prompt[:-1], prompt[-1]
    if mark == ">":
        return "".join(reversed(body))
    if re.fullmatch(r"\d+", body):
        return "".join(digit * count for digit, count in sorted(Counter(body).items()))
    return str(eval(re.sub(r"\b0+(?=\d)", "", body)))


@pytest.mark.parametrize("kind", KINDS)
def test_arithmetic_answers(kind: str) -> None:
    task = arithmetic(kind=kind, digits=4)
    for index in range(200):
        example = task.train(index)
        assert isinstance(example.prompt, str)
        assert example.answer == example.demonstration == solve(example.prompt)
        assert set(example.prompt + example.answer) <= set("0123456789+-*=<>,: ")
        assert task.reward(example, example.answer) == task.reward(example, f" {example.answer}\n") == 1.0
        assert task.reward(example, example.answer + "0") == task.reward(example, "") == 0.0
    assert task.train(7) == task.train(7) != task.train(8)
    assert pickle.loads(pickle.dumps(task.train(7))) == task.train(7)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("digits", [2, 5])
def test_arithmetic_train_and_held_out_are_disjoint(kind: str, digits: int) -> None:
    """For two digits the draws cover the whole problem space, so a shared problem would show."""
    tasks = [arithmetic(seed, kind=kind, digits=digits) for seed in (0, 1)]
    train = {str(task.train(i).prompt) for task in tasks for i in range(1500)}
    held_out = {str(tasks[0].held_out(i).prompt) for i in range(500)}
    assert not train & held_out
    assert [tasks[0].held_out(i) for i in range(20)] == [tasks[1].held_out(i) for i in range(20)]
    assert [tasks[0].train(i) for i in range(20)] != [tasks[1].train(i) for i in range(20)]
    if digits == 2 and kind in ("sort", "reverse"):
        assert len(train | held_out) == 100  # nothing is out of reach


def test_arithmetic_partial_credit() -> None:
    task, exact = arithmetic(partial=True), arithmetic()
    example = Example(prompt="31415=", answer="11345")
    assert task.reward(example, "11345") == 1.0
    assert task.reward(example, "11354") == pytest.approx(3 / 5)
    assert task.reward(example, "1134567890") == pytest.approx(5 / 10)
    assert task.reward(example, "") == 0.0
    assert exact.reward(example, "11354") == 0.0


# ------------------------------------------------------------------------------------------- reasoning_gym


@pytest.mark.parametrize("name", ["chain_sum", "number_sorting", "leg_counting", "knights_knaves"])
def test_reasoning_gym_scores_its_own_answers(name: str) -> None:
    task = load_task(TaskConfig(name=f"reasoning_gym:{name}", held_out=20), 3)
    for example in [task.train(i) for i in (0, 1, 999, 1000, 123_456)] + [task.held_out(i) for i in range(3)]:
        assert task.reward(example, example.answer) == 1.0
        tagged = f"<think>maybe <answer>42</answer></think> so <answer> {example.answer} </answer>"
        assert task.reward(example, tagged) == 1.0
        assert task.reward(example, "<answer>no idea</answer>") < 0.5
        pickle.dumps(example)
    assert task.n_train is None and task.n_held_out == 20
    assert task.train(999) == task.train(999)


def test_reasoning_gym_train_and_held_out_are_disjoint() -> None:
    """One-digit sums of two terms: about 200 questions, so equal ones under different seeds are certain."""
    params = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    config = TaskConfig(name="reasoning_gym:chain_sum", params=params, held_out=30)
    tasks = [load_task(config, seed) for seed in (0, 1)]
    held_out = [task.held_out(i).prompt for task in tasks[:1] for i in range(30)]
    assert held_out == [tasks[1].held_out(i).prompt for i in range(30)]
    trained = {str(task.train(i).prompt) for task in tasks for i in range(600)}
    assert len(trained) > 50 and not trained & set(map(str, held_out))
    everything = load_task(TaskConfig(name=config.name, params=params, held_out=5000), 0)
    with pytest.raises(ValueError, match="too few distinct problems"):
        everything.train(0)


def test_reasoning_gym_bad_params() -> None:
    with pytest.raises(ValueError, match=r"refuses them.*no_such"):
        load_task(TaskConfig(name="reasoning_gym:chain_sum", params={"no_such": 1}), 0)
    with pytest.raises(ValueError, match="refuses them"):
        load_task(TaskConfig(name="reasoning_gym:chain_sum", params={"min_terms": 9, "max_terms": 2}), 0)
    with pytest.raises(ValueError, match="'seed' is set by the task"):
        load_task(TaskConfig(name="reasoning_gym:chain_sum", params={"seed": 1}), 0)


# ----------------------------------------------------------------------------------------- math and files

EQUAL = [
    ("1/2", r"\boxed{0.5}"), (r"\frac{1}{2}", "The answer is 1/2."), (r"\frac12", r"so $\frac{2}{4}$"),
    ("1,000", "1000"), ("1000", "$1,000$"), (r"50\%", r"\boxed{0.5}"), (r"2\sqrt{2}", r"\boxed{\sqrt{8}}"),
    (r"\{1,2\}", r"\boxed{\{2,1\}}"), ("5", r"\boxed{x=5}"), ("x^2+2x+1", r"\boxed{(x+1)^2}"), ("[0,1)", r"$[0,1)$"),
    ("Monday", r"\boxed{\text{Monday}}"), ("Monday", "Monday"), ("-3", "\\boxed{−3}"),
    ("9*8=72\n#### 72", "9*8 is 72, so 72 apples"), (r"\boxed{72}", "72"), ("72", "#### 72"),
    ("8", r"\boxed{7}, no: \boxed{8}"), ("8", r"<think>\boxed{7}</think> \boxed{8}"), (r"(1,2)", r"\boxed{(1, 2)}"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\boxed{\begin{pmatrix}1\\2\end{pmatrix}}"), ("17", r"\boxed{\frac{34}{2}}"),
    (r"\{1,2\}", r"\boxed{2} and \boxed{1}"), ("1, 2", r"either \boxed{1} or, with $x<0$, \boxed{2}"),
]  # fmt: skip
DIFFERENT = [
    ("12", "-12"), ("12", ""), ("12", "no idea"), (r"\frac{1}{2}", r"\boxed{2}"), ("(1,2)", r"\boxed{(2,1)}"),
    ("[0,1)", "$[0,1]$"), ("7", r"\boxed{7}, no: \boxed{8}"), ("72", "71"), (r"\sqrt{2}", r"\boxed{1.41}"),
    ("3.14159", r"\boxed{\pi}"), ("8", r"<think>\boxed{8}</think> \boxed{7}"), ("x^2", r"\boxed{x^3}"),
    ("8", r"The final answer is $8$, I mean \boxed{7}"), ("8", r"\boxed{7}. The final answer is $8$."),
    ("100000", "100001"), ("A", r"\boxed{B}"),
]  # fmt: skip


@pytest.mark.parametrize(("gold", "completion"), EQUAL)
def test_math_equal(gold: str, completion: str) -> None:
    assert math_reward(Example(prompt="", answer=gold), completion) == 1.0


@pytest.mark.parametrize(("gold", "completion"), DIFFERENT)
def test_math_different(gold: str, completion: str) -> None:
    assert math_reward(Example(prompt="", answer=gold), completion) == 0.0


def test_boxes() -> None:
    assert boxes(r"a \boxed{1} b \boxed{\frac{1}{2}} c} \boxed{3") == [r"\boxed{1}", r"\boxed{\frac{1}{2}}"]
    assert boxes("none}") == []


def test_exact_verifier() -> None:
    example = Example(prompt="", answer="ab ")
    assert exact_reward(example, "<think>x</think>\nab") == 1.0
    assert exact_reward(example, "abc") == 0.0


ROWS = [{"prompt": f"{i}+{i}?", "answer": str(2 * i), "solution": f"it is {2 * i}"} for i in range(10)]


def write_jsonl(path: Path, rows: list[Any]) -> str:
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    return str(path)


def math_task(path: str | Path, held_out: int = 3, **params: Any) -> Task:
    return load_task(TaskConfig(name="math", params={"path": str(path), **params}, held_out=held_out), 0)


def write_arrow(path: Path, rows: list[Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.Table.from_pylist(rows)
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "arrow_directory", "parquet_directory"])
def test_every_format_gives_the_same_examples(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "data"
    if kind == "jsonl":
        path = tmp_path / "data.jsonl"
        write_jsonl(path, ROWS)
    elif kind == "parquet":
        path = tmp_path / "data.parquet"
        pq.write_table(pa.Table.from_pylist(ROWS), path)
    elif kind == "arrow_directory":  # as DatasetDict.save_to_disk leaves it, with a stale cache beside
        write_arrow(path / "train" / "data-00000-of-00002.arrow", ROWS[:6])
        write_arrow(path / "train" / "data-00001-of-00002.arrow", ROWS[6:])
        write_arrow(path / "train" / "cache-1234.arrow", ROWS)
        write_arrow(path / "test" / "data-00000-of-00001.arrow", [{"prompt": "t", "answer": "1", "solution": ""}])
        (path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    else:
        (path / "data").mkdir(parents=True)
        pq.write_table(pa.Table.from_pylist(ROWS[:4]), path / "data" / "train-00000-of-00002.parquet")
        pq.write_table(pa.Table.from_pylist(ROWS[4:]), path / "data" / "train-00001-of-00002.parquet")
        pq.write_table(pa.Table.from_pylist(ROWS[:1]), path / "data" / "test-00000-of-00001.parquet")
    task = math_task(path, demonstration="solution", template="{prompt} Box it: \\boxed{}.")
    assert (task.n_train, task.n_held_out) == (7, 3)
    examples = [task.train(i) for i in range(7)] + [task.held_out(i) for i in range(3)]
    assert [e.prompt for e in examples] == [f"{row['prompt']} Box it: \\boxed{{}}." for row in ROWS]
    assert [e.demonstration for e in examples] == [row["solution"] for row in ROWS]
    assert task.reward(examples[4], "\\boxed{8}") == 1.0
    if kind.endswith("directory"):
        assert math_task(path, held_out_split="test").n_held_out == 1
        assert math_task(path, held_out_split="test").n_train == 10
        with pytest.raises(ValueError, match=r"no 'valid' split; found .*te?"):
            math_task(path, split="valid")


def test_nested_fields_numbers_and_chat_messages(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "2+2?"}]
    path = tmp_path / "dapo.parquet"
    pq.write_table(pa.Table.from_pylist([{"prompt": messages, "reward_model": {"ground_truth": 4}}] * 3), path)
    task = math_task(path, held_out=1, answer="reward_model.ground_truth")
    assert task.train(0) == Example(prompt=messages, answer="4")
    held_out = write_jsonl(tmp_path / "exam.jsonl", [{"prompt": "q", "reward_model": {"ground_truth": "5"}}])
    task = math_task(path, answer="reward_model.ground_truth", held_out_path=held_out)
    assert (task.n_train, task.n_held_out, task.held_out(0).answer) == (3, 1, "5")


def test_bad_data(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    bad: list[tuple[list[Any] | str, dict[str, Any], str]] = [
        ([{"prompt": "a", "answer": "1"}, {"prompt": "b"}], {}, r"line 2: no field 'answer'; it has prompt"),
        ([{"prompt": "a", "answer": None}], {}, r"line 1: no field 'answer'"),
        ([["a", "1"]], {}, r"line 1: no field 'prompt'"),
        ('{"prompt": "a", "answer": "1"}\n\n{"prompt"', {}, r"line 3: not JSON"),
        ("\n", {}, "no rows"),
        (ROWS[:3], {}, r"3 rows, of which task.held_out = 3"),
        ([{"prompt": 5, "answer": "1"}] * 4, {}, "neither text nor chat messages: 5"),
        (ROWS, {"verifier": "maths"}, "verifier 'maths'"),
        (ROWS, {"template": "Solve it."}, r"template must contain \{prompt\}"),
        (ROWS, {"promt": "question"}, r"unknown field `promt` \(allowed keys: path, split"),
    ]
    for rows, params, message in bad:
        path.write_text(rows if isinstance(rows, str) else "\n".join(map(json.dumps, rows)))
        with pytest.raises(ValueError, match=message):
            math_task(path, **params)
    pq.write_table(pa.Table.from_pylist([{"question": "a", "answer": "1"}]), tmp_path / "data.parquet")
    (tmp_path / "empty").mkdir()
    (tmp_path / "data.csv").touch()
    for name, message in {
        "data.parquet": "no field 'prompt'; it has question, answer", "absent.jsonl": "no such file",
        "empty": "no data files", "data.csv": "unknown kind of file",
    }.items():  # fmt: skip
        with pytest.raises(ValueError, match=message):
            math_task(tmp_path / name)
    with pytest.raises(ValueError, match="missing required field `path`"):
        load_task(TaskConfig(name="math"), 0)


# --------------------------------------------------------------------------------- names and user functions


def test_unknown_names() -> None:
    with pytest.raises(ValueError, match=r"unknown task 'aritmetic'; nearest: arithmetic"):
        TaskConfig(name="aritmetic")
    with pytest.raises(ValueError, match=r"unknown task 'reasoning_gym:chain_sun'; nearest: reasoning_gym:chain_sum"):
        load_task(TaskConfig(name="reasoning_gym:chain_sun"), 0)
    with pytest.raises(ValueError, match=r"Invalid enum value 'sorted'.*allowed keys: kind, digits, distinct, partial"):
        arithmetic(kind="sorted")
    with pytest.raises(ValueError, match="system_prompt needs a chat template"):
        TaskConfig(chat_template=False, system_prompt="Be brief.")


USER = """
from engine.tasks.base import Example

class Echo:
    n_held_out = 2
    def __init__(self, seed, word, n): self.word, self.n_train = f"{word}{seed}", n
    def train(self, index): return Example(prompt=f"{self.word} {index}", answer=self.word)
    def held_out(self, index): return Example(prompt=f"exam {index}", answer=self.word)
    def reward(self, example, completion): return float(completion == example.answer)

def echo(seed, word, n=None): return Echo(seed, word, n)
def nothing(seed): return object()
def length(example, completion): return len(completion) / 10
"""


def test_user_functions_from_the_current_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "echo_task.py").write_text(USER)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [path for path in __import__("sys").path if path != str(tmp_path)])
    config = TaskConfig(name="echo_task:echo", params={"word": "hi"})
    task = load_task(config, 5)
    assert isinstance(task, Task)
    assert task.train(3) == Example(prompt="hi5 3", answer="hi5")
    assert load_reward(config, 5)(task.train(3), "hi5") == 1.0
    for name, params, message in [
        ("echo_task:echo", {}, "missing a required argument: 'word'"),
        ("echo_task:echo", {"word": "a", "wrod": 1}, "unexpected keyword argument 'wrod'"),
        ("echo_task:ehco", {}, "has no function 'ehco'"),
        ("no_such_module:f", {}, "cannot import 'no_such_module'"),
        ("echo_task:nothing", {}, "without n_train, n_held_out, train, held_out, reward"),
    ]:
        with pytest.raises(ValueError, match=message):
            load_task(TaskConfig(name=name, params=params), 0)
    path = write_jsonl(tmp_path / "data.jsonl", ROWS)
    assert math_task(path, verifier="echo_task:length").reward(Example(prompt=""), "12345") == 0.5


# -------------------------------------------------------------------------------------------------- prompts


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """A character tokenizer of the real library."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    characters = ["<pad>", "<eos>", "<unk>", *map(chr, range(32, 127)), "\n"]
    inner = Tokenizer(models.WordLevel({c: i for i, c in enumerate(characters)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), "isolated")  # type: ignore[assignment]
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<eos>", pad_token="<pad>", unk_token="<unk>")


@pytest.fixture
def chat_tokenizer(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    template = (
        "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    monkeypatch.setattr(tokenizer, "chat_template", template)
    return tokenizer


def text(tokenizer: Any, ids: Any) -> str:
    return "".join(tokenizer.convert_ids_to_tokens(list(map(int, ids))))


class Counting:
    """Finite: problem i is i letters 'a' after its number."""

    n_held_out = 4

    def __init__(self, n_train: int):
        self.n_train = n_train

    def train(self, index: int) -> Example:
        return Example(prompt=f"{index}" + "a" * index, answer=str(index), demonstration=f"={index}")

    def held_out(self, index: int) -> Example:
        return Example(prompt=f"h{index}")

    def reward(self, example: Example, completion: str) -> float:
        return 0.0


def drawn(prompts: Prompts, cursor: int, n: int) -> list[int]:
    return [int(prompt.example.answer) for prompt in prompts.draw(cursor, n)]


def test_draw_visits_every_row_once_per_epoch_in_a_new_order(tokenizer: Any) -> None:
    prompts = Prompts(Counting(12), tokenizer, TaskConfig(), 0)
    epochs = [drawn(prompts, 12 * epoch, 12) for epoch in range(3)]
    assert all(sorted(epoch) == list(range(12)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] and epochs[0] != sorted(epochs[0])
    assert drawn(Prompts(Counting(12), tokenizer, TaskConfig(), 1), 0, 12) != epochs[0]


@given(cursor=st.integers(0, 60), n=st.integers(0, 40), cut=st.integers(0, 40))
@settings(max_examples=60, deadline=None)
def test_draw_is_stateless(tokenizer: Any, cursor: int, n: int, cut: int) -> None:
    """Any way to cut the stream gives the same stream, on a fresh object too: what --resume relies on."""
    prompts, cut = Prompts(Counting(7), tokenizer, TaskConfig(), 0), min(cut, n)
    whole = drawn(prompts, cursor, n)
    again = Prompts(Counting(7), tokenizer, TaskConfig(), 0)
    assert len(whole) == n
    assert drawn(again, cursor + cut, n - cut) == whole[cut:] and drawn(again, cursor, cut) == whole[:cut]


def test_long_prompts_are_skipped_and_counted(tokenizer: Any) -> None:
    prompts = Prompts(Counting(10), tokenizer, TaskConfig(max_prompt_tokens=5), 0)  # row i has i + 1 tokens
    assert prompts.skipped == 5
    assert sorted(drawn(prompts, 0, 10)) == sorted(2 * list(range(5)))
    assert max(len(prompt.ids) for prompt in prompts.draw(0, 10)) == 5
    with pytest.raises(ValueError, match=r"none of 10 training prompts .* = 1 tokens; the shortest has 2"):
        Prompts(OffByOne(10), tokenizer, TaskConfig(max_prompt_tokens=1), 0)
    with pytest.raises(ValueError, match=r"a prompt has 6 tokens, above task.max_prompt_tokens = 4"):
        Prompts(EndlessLong(), tokenizer, TaskConfig(max_prompt_tokens=4), 0).draw(0, 1)


class OffByOne(Counting):
    def train(self, index: int) -> Example:
        return super().train(index + 1)


class EndlessLong(Counting):
    def __init__(self) -> None:
        self.n_train = None  # type: ignore[assignment]

    def train(self, index: int) -> Example:
        return Example(prompt="123456")


def test_plain_prompts_and_demonstrations(tokenizer: Any) -> None:
    task = arithmetic(held_out=5)
    prompts = Prompts(task, tokenizer, TaskConfig(), 0)
    for prompt, index in zip(prompts.draw(40, 3), (40, 41, 42), strict=True):
        assert prompt.ids.dtype == np.int32
        assert text(tokenizer, prompt.ids) == prompt.example.prompt == task.train(index).prompt
    [(ids, response)] = prompts.demonstrations(40, 1)
    assert ids.dtype == response.dtype == np.int32
    assert text(tokenizer, ids) == task.train(40).prompt
    assert text(tokenizer, response) == task.train(40).answer + "<eos>"
    held_out = prompts.held_out(99)
    assert [p.example for p in held_out] == [task.held_out(i) for i in range(5)]
    assert prompts.n_held_out == 5 and len(prompts.held_out(2)) == 2
    with pytest.raises(ValueError, match="no demonstrations"):
        Prompts(EndlessLong(), tokenizer, TaskConfig(), 0).demonstrations(0, 1)


class Chatting(Counting):
    def train(self, index: int) -> Example:
        return Example(prompt=[{"role": "user", "content": f"q{index}"}], demonstration="ok")


def test_chat_templates(chat_tokenizer: Any) -> None:
    def first(task: Task, **config: Any) -> str:
        return text(chat_tokenizer, Prompts(task, chat_tokenizer, TaskConfig(**config), 0).draw(0, 1)[0].ids)

    plain = str(arithmetic().train(0).prompt)
    assert first(arithmetic()) == f"[user]{plain}\n[assistant]"
    assert first(arithmetic(), system_prompt="Sort.") == f"[system]Sort.\n[user]{plain}\n[assistant]"
    assert first(arithmetic(), chat_template=False) == plain
    assert first(Chatting(1)) == "[user]q0\n[assistant]"
    [(_, response)] = Prompts(Chatting(1), chat_tokenizer, TaskConfig(), 0).demonstrations(0, 1)
    assert text(chat_tokenizer, response) == "ok<eos>"


def test_chat_needs_a_template(tokenizer: Any) -> None:
    assert tokenizer.chat_template is None
    with pytest.raises(ValueError, match="chat messages, which need"):
        Prompts(Chatting(1), tokenizer, TaskConfig(), 0)
    with pytest.raises(ValueError, match="the tokenizer has none"):
        Prompts(Counting(1), tokenizer, TaskConfig(chat_template=True), 0)
    with pytest.raises(ValueError, match="system_prompt needs a chat template"):
        Prompts(Counting(1), tokenizer, TaskConfig(system_prompt="Sort."), 0)
