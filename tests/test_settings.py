"""Every kind of bad config gives one line that names the path, the value and what is allowed; good ones round-trip."""

import io
import math
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st
from rich.console import Console

from settings import ConfigError, describe, dump, field_docs, find_recipe, help_table, load, recipes, undocumented
from sync.fields import doc


class Trainer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Optimizer and schedule."""

    lr: Annotated[float, doc("Peak learning rate.", gt=0)] = 1e-6
    betas: Annotated[tuple[Annotated[float, msgspec.Meta(ge=0, lt=1)], float], doc("AdamW betas.")] = (0.9, 0.95)
    warmup: Annotated[int, doc("Linear warm-up.", unit="steps", ge=0)] = 0
    clip: Annotated[Annotated[float, msgspec.Meta(gt=0)] | None, doc("Largest gradient norm; null: off.")] = 1.0
    fused: Annotated[bool, doc("Fused AdamW.")] = True

    def __post_init__(self) -> None:
        if self.warmup and not self.fused:
            raise ValueError("warmup needs fused = true")


class Task(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What to learn."""

    kind: Annotated[str, doc("Task name.", min_length=1)]
    params: Annotated[dict[str, Any], doc("Passed to the task.")] = {}
    stop: Annotated[list[Annotated[int, msgspec.Meta(ge=0)]], doc("Stop tokens.", unit="token ids", max_length=3)] = []
    template: Annotated[str | None, doc("Chat template file; null: the tokenizer's.")] = None


class Eval(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Held-out evaluation."""

    every: Annotated[int, doc("Steps between evaluations.", unit="steps", ge=1)] = 10


class Root(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    task: Annotated[Task, doc("What is learned.")]
    name: Annotated[str, doc("Run name.")] = "run"
    steps: Annotated[int, doc("Training steps.", ge=1)] = 10
    loss: Annotated[Literal["grpo", "dapo", "gspo"], doc("Policy loss.")] = "grpo"
    correction: Annotated[Literal["off", "tis"], doc("Rollout correction.")] = "tis"
    cap: Annotated[Annotated[int, msgspec.Meta(ge=1)] | Literal["auto"] | None, doc("Budget.", unit="tokens")] = "auto"
    trainer: Trainer = Trainer(lr=1e-5)
    eval: Eval | None = None
    stages: Annotated[list[Eval], doc("Evaluation stages.")] = []
    pools: Annotated[dict[str, Eval], doc("Evaluation pools.")] = {}


GOOD = "task: {kind: sort}\n"


def read(tmp_path: Path, text: str, *overrides: str) -> Root:
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    return load(Root, path, overrides)


def error(tmp_path: Path, text: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, text, *overrides)
    message = str(caught.value).replace(str(tmp_path) + "/", "")
    assert "\n" not in message
    return message


# --- good ------------------------------------------------------------------------------------------------------------


def test_defaults_file_and_overrides_in_order(tmp_path: Path) -> None:
    config = read(
        tmp_path, GOOD + "trainer: {lr: 1e-4}\neval: {}", "trainer.warmup=5", "trainer.lr=3", "trainer.lr=2e-4"
    )
    assert config.trainer == Trainer(lr=2e-4, warmup=5)
    assert config.eval == Eval() and config.steps == 10
    for overrides in ([], ["trainer.warmup=0"]):  # what is not said comes from the parent's default section
        assert read(tmp_path, GOOD, *overrides).trainer.lr == 1e-5


def test_overrides_reach_maps_lists_and_optional_sections(tmp_path: Path) -> None:
    overrides = [
        "task.params.digits=5",
        "task.params.deep.er=[1, two]",
        "task.stop=[1,2]",
        "eval.every=3",
        "task.kind=x=y",
    ]
    config = read(tmp_path, "task: {kind: sort, params: {seed: 1}}\neval: null", *overrides)
    assert config.task.params == {"seed": 1, "digits": 5, "deep": {"er": [1, "two"]}}
    assert (config.task.stop, config.task.kind, config.eval) == ([1, 2], "x=y", Eval(every=3))
    assert read(tmp_path, GOOD, "task={kind: other}", "pools.a.every=2").pools == {"a": Eval(every=2)}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4), ("1E4", 1e4), ("1.", 1.0), (".5", 0.5), ("-1_000.5e+2", -100050.0), ("3", 3.0),
        (".inf", math.inf), ("5e-324", 5e-324), ("+1e3", 1e3),
    ],
)  # fmt: skip
def test_floats_of_every_spelling(tmp_path: Path, text: str, value: float) -> None:
    class One(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
        x: float = 0

    path = tmp_path / "one.yaml"
    path.write_text(f"x: {text}")
    assert load(One, path).x == value
    assert load(One, path, [f"x={text}"]).x == value


@pytest.mark.parametrize("word", ["off", "on", "no", "yes", "y", "010", "1:30", "2024-01-01", "1_", "None", "=", "0b1"])
def test_yaml_11_traps_stay_strings(tmp_path: Path, word: str) -> None:
    config = read(tmp_path, f"task: {{kind: a}}\nname: {word}", f"task.params.x={word}")
    assert (config.name, config.task.params["x"]) == (word, word)


def test_off_is_a_choice_and_true_a_bool(tmp_path: Path) -> None:
    config = read(tmp_path, GOOD + "correction: off\ntrainer: {fused: False, clip: ~}")
    assert (config.correction, config.trainer.fused, config.trainer.clip) == ("off", False, None)


def test_anchors_and_merges(tmp_path: Path) -> None:
    config = read(tmp_path, GOOD + "stages: [&a {every: 4}, {<<: *a}, {<<: *a, every: 5}]")
    assert [stage.every for stage in config.stages] == [4, 4, 5]


scalars = st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False) | st.text()
traps = st.sampled_from(
    ["1e-4", "off", "010", "null", "~", "", "1_000", "1.", ".inf", ".nan", "- a", "a: b", "#", "<<", "=", "2024-01-01"]
)
values = st.recursive(
    scalars | traps, lambda x: st.lists(x, max_size=3) | st.dictionaries(st.text() | traps, x, max_size=3), max_leaves=8
)


@settings(max_examples=60, deadline=None)
@example(name="", params={"": "\x85"}, lr=1.0)
@given(
    name=st.text() | traps,
    params=st.dictionaries(st.text() | traps, values, max_size=3),
    lr=st.floats(min_value=0, exclude_min=True),
)
def test_dump_round_trips(
    tmp_path_factory: pytest.TempPathFactory, name: str, params: dict[str, Any], lr: float
) -> None:
    config = Root(
        task=Task(kind="k", params=params, stop=[1]), name=name, trainer=Trainer(lr=lr, clip=None), stages=[Eval()]
    )
    path = tmp_path_factory.getbasetemp() / "dumped.yaml"
    path.write_text(dump(config), encoding="utf-8")
    assert load(Root, path) == config
    yaml.safe_load(path.read_text(encoding="utf-8"))  # and any other YAML reader reads it


def test_dump_is_readable() -> None:
    text = dump(Root(task=Task(kind="1e-4", stop=[1, 2]), correction="off"))
    assert "correction: 'off'\n" in text and "  kind: '1e-4'\n" in text  # quoted also for YAML 1.1 readers
    assert "  betas: [0.9, 0.95]\n" in text and "eval: null\n" in text


keys = st.sampled_from(["lr", "betas", "warmup", "clip", "fused", "nonsense"])
guesses = scalars | st.lists(scalars, max_size=3) | st.dictionaries(keys, scalars, max_size=2)


@settings(max_examples=60, deadline=None)
@given(data=st.dictionaries(keys, guesses, max_size=4))
def test_agrees_with_msgspec_on_what_is_valid(tmp_path_factory: pytest.TempPathFactory, data: dict[str, Any]) -> None:
    """The oracle: msgspec's own strict conversion of the same builtins, accepting and refusing the same trees."""
    path = tmp_path_factory.getbasetemp() / "oracle.yaml"
    path.write_text(msgspec.json.encode({"x": 0} | data).decode().replace('"x":0,', "").replace('{"x":0}', "{}"))
    try:
        expected = msgspec.convert(data, Trainer)
    except msgspec.ValidationError:
        expected = None
    try:
        got = load(Trainer, path)
    except ConfigError:
        got = None
    assert got == expected


# --- bad -------------------------------------------------------------------------------------------------------------

FIELDS = "kind, params, stop, template"
MISTAKES = {
    # unknown keys
    "task: {kind: a, parms: 1}": f"task.parms = 1: unknown key; did you mean task.params? task has: {FIELDS}",
    GOOD + "trainr: {lr: 1}": 'trainr = {"lr": 1}: unknown key; did you mean trainer? the config has: task, name,',
    GOOD + "lr: 1": "lr = 1: unknown key; did you mean trainer.lr? the config has: task,",
    GOOD + "every: 1": "every = 1: unknown key; did you mean eval.every or stages[].every or pools.NAME.every?",
    GOOD + "stages: [{}, {evry: 1}]": "stages[1].evry = 1: unknown key; did you mean stages[1].every? stages[1] has:",
    GOOD + "zzzzzz: 1": "zzzzzz = 1: unknown key; the config has: task, name",
    # wrong types and limits
    GOOD + "trainer: {lr: -1}": "trainer.lr = -1: expected float > 0",
    GOOD + "trainer: {lr: fast}": 'trainer.lr = "fast": expected float > 0',
    GOOD + "trainer: {lr: '1e-4'}": 'trainer.lr = "1e-4": expected float > 0; remove the quotes',
    GOOD + "trainer: {lr: inf}": 'trainer.lr = "inf": expected float > 0; write .inf',
    GOOD + "trainer: {lr: true}": "trainer.lr = true: expected float > 0",
    GOOD + "trainer: {lr: null}": "trainer.lr = null: expected float > 0",
    GOOD + "trainer: {clip: 0}": "trainer.clip = 0: expected float > 0 | null",
    GOOD + "trainer: {fused: yes}": 'trainer.fused = "yes": expected true | false; write true or false',
    GOOD + "trainer: {betas: [1, 1]}": "trainer.betas[0] = 1: expected float >= 0, < 1",
    GOOD + "trainer: {betas: [0.5]}": "trainer.betas = [0.5]: expected [float >= 0, < 1, float]",
    GOOD + "trainer:": "trainer = null: expected a map of lr, betas, warmup, clip, fused",
    GOOD + "steps: 1e3": "steps = 1000.0: expected int >= 1; write 1000",
    GOOD + "steps: 010": 'steps = "010": expected int >= 1; remove the quotes',
    GOOD + "name: 5": "name = 5: expected str; put it in quotes",
    GOOD + "loss: gpso": 'loss = "gpso": expected dapo | grpo | gspo; did you mean gspo?',
    GOOD + "cap: 0": "cap = 0: expected int >= 1 | auto | null",
    GOOD + "cap: None": 'cap = "None": expected int >= 1 | auto | null; write null',
    GOOD + "eval: 3": "eval = 3: expected map of every | null",
    GOOD + "eval: {every: 0}": "eval.every = 0: expected int >= 1",
    GOOD + "pools: {a: {every: 0}}": "pools.a.every = 0: expected int >= 1",
    "task: {kind: ''}": 'task.kind = "": expected str at least 1 long',
    "task: {kind: a, stop: [1, 2, -3]}": "task.stop[2] = -3: expected int >= 0",
    "task: {kind: a, stop: [1, 2, 3, 4]}": "task.stop = [1, 2, 3, 4]: expected list of int >= 0 at most 3 long",
    "task: {kind: a, stop: 5}": "task.stop = 5: expected list of int >= 0 at most 3 long",
    "task: {kind: a, template: None}": 'task.template = "None": expected str | null; write null',
    "task: {kind: a, params: {x: .nan}}": "recipe.yaml: line 1: task.params.x: NaN is not a setting; write a number",
    # missing, impossible
    "name: a": "task: missing; expected map of kind, params, stop, template",
    "task: {}": "task.kind: missing; expected str at least 1 long",
    GOOD + "trainer: {warmup: 3, fused: false}": "trainer: warmup needs fused = true",
    # files
    "": "recipe.yaml: is empty; expected a map of task, name, steps,",
    "# only comments\n": "recipe.yaml: is empty; expected a map of task,",
    "- a\n- b": 'recipe.yaml: ["a", "b"] is not a map; expected a map of task,',
    "just words": 'recipe.yaml: "just words" is not a map; expected a map of task,',
    GOOD + "trainer:\n  lr: 1\n  lr: 2": "recipe.yaml: line 4: trainer.lr: given twice, first in line 3; keep one",
    GOOD + "task: {}": "recipe.yaml: line 2: task: given twice, first in line 1; keep one",
    GOOD + "5: 1": "recipe.yaml: line 2: 5: a key must be a string; put it in quotes",
    "task: {kind: a, params: {1: 2}}": "recipe.yaml: line 1: task.params.1: a key must be a string; put it in quotes",
    "? [a]\n: 1": "recipe.yaml: line 1: this key: a key must be a string; put it in quotes",
    GOOD + "name: !!python/name:os.system": "recipe.yaml: line 2: name: tag tag:yaml.org,2002:python/name:os.system is",
    GOOD + "name: &x [*x]": "recipe.yaml: line 2: name: an anchor that contains itself",
    GOOD + "name: *x": "recipe.yaml: line 2, column 7: found undefined alias 'x'",
    "task: {kind: a": "recipe.yaml: line 1, column 15: expected ',' or '}', but got '<stream end>'",
    "task:\n\tkind: a": "recipe.yaml: line 2, column 1: found character '\\t' that cannot start any token",
    "a: 1\n---\nb: 2": "recipe.yaml: line 2, column 1: but found another document",
    "a: \x07": "recipe.yaml: unacceptable character #x0007: special characters are not allowed",
}  # fmt: skip


@pytest.mark.parametrize("text", MISTAKES, ids=lambda text: repr(text)[:50])
def test_mistakes_in_files(tmp_path: Path, text: str) -> None:
    assert error(tmp_path, text).startswith(MISTAKES[text])


OVERRIDES = {
    "trainr.lr=1": 'trainr = {"lr": 1}: unknown key; did you mean trainer?',
    "trainer.lrr=1": "trainer.lrr = 1: unknown key; did you mean trainer.lr? trainer has: lr, betas, warmup",
    "trainer.LR=1": "trainer.LR = 1: unknown key; did you mean trainer.lr?",
    "task.kidn=a": 'task.kidn = "a": unknown key; did you mean task.kind?',
    "trainer.lr.x=1": 'trainer.lr = {"x": 1}: expected float > 0',
    "trainer.lr=0": "trainer.lr = 0: expected float > 0",
    "trainer={lr: 0}": "trainer.lr = 0: expected float > 0",
    "trainer.lr": "override 'trainer.lr': expected section.key=value, for example trainer.lr=1e-4",
    "=1": "override '=1': expected section.key=value",
    "trainer..lr=1": "override 'trainer..lr=1': expected section.key=value",
    "--trainer.lr=1": "override '--trainer.lr=1': expected section.key=value",
    "trainer lr=1": "override 'trainer lr=1': expected section.key=value",
    "task.stop[0]=1": "override 'task.stop[0]=1': expected section.key=value",
    "name=": "override 'name=': has no value; write name=null or name=''",
    "task.stop=[1": "override 'task.stop=[1': line 1, column 3: expected ',' or ']'",
    "trainer.lr=.nan": "override 'trainer.lr=.nan': line 1: trainer.lr: NaN is not a setting",
    "task.params={a: 1, a: 2}": "override 'task.params={a: 1, a: 2}': line 1: task.params.a: given twice",
}


@pytest.mark.parametrize("override", OVERRIDES)
def test_mistakes_in_overrides(tmp_path: Path, override: str) -> None:
    assert error(tmp_path, GOOD, override).startswith(OVERRIDES[override])


def test_long_values_are_cut_and_newlines_never_reach_the_message(tmp_path: Path) -> None:
    assert len(error(tmp_path, GOOD + f"steps: {'a' * 500}")) < 150
    assert error(tmp_path, GOOD + '"a\\nb": 1').startswith("a b = 1: unknown key;")


def test_an_error_of_the_program_is_not_hidden(tmp_path: Path) -> None:
    class Broken(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
        x: int = 0

        def __post_init__(self) -> None:
            raise KeyError("a bug")

    path = tmp_path / "b.yaml"
    path.write_text("x: 1")
    with pytest.raises(KeyError):
        load(Broken, path)


# --- files -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def configs(tmp_path: Path) -> Path:
    folder = tmp_path / "configs"
    folder.mkdir()
    (folder / "demo.yaml").write_text("\n# A tiny run on a CPU.\n# More.\n" + GOOD)
    (folder / "qwen3_8b.yaml").write_text(GOOD)
    (folder / "notes.txt").write_text("# not a recipe")
    return folder


def test_recipes(configs: Path) -> None:
    assert recipes(configs) == [("demo", "A tiny run on a CPU."), ("qwen3_8b", "")]


def test_find_recipe(configs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = configs.parent / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "demo").write_text("a stray file")
    (elsewhere / "own.yaml").write_text(GOOD)
    for cwd in (configs.parent, elsewhere):
        monkeypatch.chdir(cwd)
        for name in ("demo", "demo.yaml", "configs/demo.yaml", "configs/demo", str(configs / "demo.yaml")):
            assert find_recipe(name, configs).resolve() == configs / "demo.yaml"
    assert find_recipe("own.yaml", configs).resolve() == elsewhere / "own.yaml"
    assert find_recipe("./demo", configs).resolve() == elsewhere / "demo"


def test_missing_files_name_the_nearest_recipe(configs: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        find_recipe("dmo", configs)
    assert str(caught.value) == "dmo: no such recipe or file; did you mean demo? recipes: demo, qwen3_8b"
    with pytest.raises(ConfigError, match=r"qwen_8b.yaml: no such recipe or file; did you mean qwen3_8b\?"):
        load(Root, configs / "qwen_8b.yaml")
    with pytest.raises(ConfigError, match=r"x: no such recipe or file; recipes: none"):
        find_recipe("x", tmp_path)
    with pytest.raises(ConfigError, match="Is a directory"):
        load(Root, configs)
    (configs / "latin.yaml").write_bytes(b"name: \xff")
    with pytest.raises(ConfigError, match=r"latin\.yaml: is not UTF-8 text"):
        load(Root, configs / "latin.yaml")


# --- help ------------------------------------------------------------------------------------------------------------


def test_field_docs() -> None:
    docs = {entry.path: entry for entry in field_docs(Root)}
    warmup = docs["trainer.warmup"]
    assert (warmup.type, warmup.default, warmup.unit, warmup.meaning) == ("int >= 0", "0", "steps", "Linear warm-up.")
    assert docs["trainer.lr"].default == "1e-05"  # the default of the parent's section, not of the struct alone
    assert docs["task.kind"].default == "required"
    assert docs["trainer"].meaning == "Optimizer and schedule." and docs["task"].meaning == "What is learned."
    assert docs["loss"].type == "dapo | grpo | gspo" and docs["cap"].type == "int >= 1 | auto | null"
    assert {"eval.every", "stages[].every", "pools.NAME.every"} <= docs.keys()
    assert [docs["trainer.betas"].default, docs["task.template"].default] == ["[0.9, 0.95]", "null"]


def test_undocumented_fields_are_found() -> None:
    class Silent(msgspec.Struct, frozen=True):
        x: int = 0

    class Holder(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
        said: Annotated[int, doc("Said.")] = 0
        silent: Annotated[Silent, doc("Section.")] = Silent()

    assert undocumented(Root) == []
    assert undocumented(Holder) == ["silent.x"]


@pytest.mark.parametrize("width", [40, 80, 140])
def test_help_fits_and_says_everything(width: int) -> None:
    out = io.StringIO()
    Console(file=out, width=width).print(help_table(Root))
    text = out.getvalue()
    assert all(len(line) <= width for line in text.splitlines())
    for entry in field_docs(Root):
        words = [entry.path, *entry.type.split(), *entry.default.split(), *entry.unit.split(), *entry.meaning.split()]
        assert entry.type == "section" or all(word in text for word in words), entry
    assert "\x1b" not in text  # piped: no escape codes


def test_describe_limits() -> None:
    assert describe(Annotated[int, msgspec.Meta(ge=0, le=9, multiple_of=3)]) == "int >= 0, <= 9, multiple of 3"
    assert describe(dict[str, list[int] | None]) == "map of list of int | null"
    assert describe(Any) == "any"
