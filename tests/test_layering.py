"""Walks the AST of every Python file and enforces the borders of the house; part of `make check`.

Every rule is a function `rule(tree) -> list of violations`, so that the second half of this file can prove on small bad
trees that each rule is able to fail. Imports inside functions, under TYPE_CHECKING and through `import_module("name")`
count like all others.
"""

import ast
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]
NOT_OURS = {"runs", "build", "shared", "__pycache__"}

# What of ours each room may import: a name allows what lies below it, "=name" that module alone. Rooms that are not
# listed (launch, tests, benchmarks) may import everything. `launch → {engine, trainer} → sync`.
MAY_IMPORT = {
    "sync": ("sync",),
    "engine": ("engine", "sync"),
    "trainer": ("trainer", "sync"),
    "records": ("records", "sync"),
    "settings": ("settings_help", "=sync.fields"),
    "settings_help": ("=sync.fields",),
    "ranks": ("config", "trainer.algo.parts", "trainer.tally"),
    "config": ("engine", "trainer", "sync", "records", "settings", "settings_help"),
}
# Which of our files may import a library; a trailing slash is a folder.
IMPORTERS = {
    "sglang": (
        "engine/child.py",
        "engine/updater.py",
        "engine/plugin.py",
        "engine/cpu_platform.py",
        "engine/cpu_layers.py",
        "tests/",
        "benchmarks/",
    ),
    "transformers": ("trainer/", "engine/tasks/", "tests/", "benchmarks/"),
    "transformer_engine": ("trainer/fp8/", "tests/", "benchmarks/"),
    "deep_gemm": ("trainer/fp8/", "tests/", "benchmarks/"),
}
LAZY = ("transformer_engine", "deep_gemm")  # need a GPU to import or use: only inside the function that needs them

MACHINE_PATH = re.compile(r"(?<![\w.}~$-])/(?:(?:work|root|opt)/|tmp/[a-z])")


class Import(NamedTuple):
    """One imported name; `from a import b` gives the module a.b where that is one of our files, else a."""

    module: str
    line: int
    lazy: bool  # inside a function


class Tree:
    """Source texts by posix path, and the Python among them parsed."""

    def __init__(self, text: dict[str, str]) -> None:
        self.text = text
        self.python = {name: ast.parse(source, name) for name, source in text.items() if name.endswith(".py")}
        self.modules = {_module(name): name for name in self.python}
        self.rooms = {module.partition(".")[0] for module in self.modules}

    @classmethod
    def read(cls, root: Path) -> "Tree":
        """Every text file below `root` that belongs to the project: nothing hidden but .ci, no build output."""
        text = {}
        for folder, folders, files in os.walk(root):
            folders[:] = sorted(name for name in folders if _belongs(name))
            for path in (Path(folder, name) for name in sorted(files) if _belongs(name)):
                raw = path.read_bytes() if path.stat().st_size < 2**20 else b"\0"
                if b"\0" not in raw:
                    text[path.relative_to(root).as_posix()] = raw.decode("utf-8", errors="replace")
        return cls(text)

    def imports(self, name: str) -> list[Import]:
        package = _module(name).split(".")
        if not name.endswith("__init__.py"):
            package = package[:-1]
        return list(self._imports(self.python[name], package, lazy=False))

    def _imports(self, node: ast.AST, package: list[str], lazy: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                for alias in child.names:
                    yield Import(alias.name, child.lineno, lazy)
            elif isinstance(child, ast.ImportFrom):
                base = package[: len(package) - child.level + 1] if child.level else []
                module = ".".join([*base, *([child.module] if child.module else [])])
                for alias in child.names:
                    inner = f"{module}.{alias.name}"
                    yield Import(inner if inner in self.modules else module, child.lineno, lazy)
            elif isinstance(child, ast.Call) and ast.unparse(child.func).endswith(("import_module", "__import__")):
                argument = child.args[0] if child.args else None
                if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                    yield Import(argument.value, child.lineno, lazy)
            inside = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from self._imports(child, package, lazy or inside)

    def file_of(self, module: str) -> str | None:
        """Our file that an import executes, or None for a library."""
        while module and module not in self.modules:
            module = module.rpartition(".")[0]
        return self.modules.get(module)


def _belongs(name: str) -> bool:
    hidden = name.startswith(".") and name not in (".ci", ".gitignore")
    return not (hidden or name in NOT_OURS or name.endswith(".egg-info"))


def _module(name: str) -> str:
    parts = PurePosixPath(name).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


# --- rules ------------------------------------------------------------------------------------------------------------


def rooms_import_downwards(tree: Tree) -> list[str]:
    bad = []
    for name in tree.python:
        room = _module(name).partition(".")[0]
        for module, line, _ in tree.imports(name):
            ours = module.partition(".")[0]
            if room not in MAY_IMPORT or ours not in tree.rooms or ours == room:
                continue
            if not any(_allows(allowed, module) for allowed in MAY_IMPORT[room]):
                bad.append(f"{name}:{line}: {room} must not import {module}")
    return bad


def _allows(allowed: str, module: str) -> bool:
    if allowed.startswith("="):
        return module == allowed[1:]
    return module == allowed or module.startswith(f"{allowed}.")


def libraries_have_their_importers(tree: Tree) -> list[str]:
    bad = []
    for name in tree.python:
        for module, line, lazy in tree.imports(name):
            library = module.partition(".")[0]
            if library not in IMPORTERS or library in tree.rooms:
                continue
            if not any(name == place or (place[-1] == "/" and name.startswith(place)) for place in IMPORTERS[library]):
                bad.append(f"{name}:{line}: {library} is imported only in {', '.join(IMPORTERS[library])}")
            elif library in LAZY and not lazy:
                bad.append(f"{name}:{line}: {library} is imported only inside functions")
    return bad


def no_import_cycles(tree: Tree) -> list[str]:
    """Files that reach themselves through imports. Each cycle is named once, by its files."""
    graph = {}
    for name in tree.python:
        targets = {tree.file_of(module) for module, _, _ in tree.imports(name)}
        graph[name] = {target for target in targets if target is not None}
    cycles = set()
    for start in graph:
        behind: dict[str, str] = {}  # file -> the file that led to it, breadth first from start
        queue = [start]
        while queue and start not in behind:
            here = queue.pop(0)
            for target in sorted(graph[here] - behind.keys()):
                behind[target] = here
                queue.append(target)
        if start in behind:
            chain = [start, behind[start]]
            while chain[-1] != start:
                chain.append(behind[chain[-1]])
            cycles.add(" ↔ ".join(sorted(set(chain))))
    return [f"import cycle: {cycle}" for cycle in sorted(cycles)]


def files_say_why_they_exist(tree: Tree) -> list[str]:
    return [
        f"{name}: opens without a docstring" for name, module in tree.python.items() if not ast.get_docstring(module)
    ]


def errors_are_not_swallowed(tree: Tree) -> list[str]:
    bad = []
    for name, module in tree.python.items():
        for node in ast.walk(module):
            if isinstance(node, ast.ExceptHandler) and _is_broad(node.type) and all(map(_does_nothing, node.body)):
                bad.append(f"{name}:{node.lineno}: swallows every exception")
            if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == "suppress":
                bad += [f"{name}:{node.lineno}: suppresses every exception" for arg in node.args if _is_broad(arg)]
    return bad


def _is_broad(kind: ast.expr | None) -> bool:
    if isinstance(kind, ast.Tuple):
        return any(map(_is_broad, kind.elts))
    return kind is None or ast.unparse(kind) in ("Exception", "BaseException")


def _does_nothing(statement: ast.stmt) -> bool:
    constant = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    return constant or isinstance(statement, ast.Pass | ast.Continue)


def no_machine_paths(tree: Tree) -> list[str]:
    return [
        f"{name}:{number}: machine path in {line.strip()[:80]!r}"
        for name, text in tree.text.items()
        for number, line in enumerate(text.splitlines(), 1)
        if MACHINE_PATH.search(line)
    ]


RULES: list[Callable[[Tree], list[str]]] = [
    rooms_import_downwards,
    libraries_have_their_importers,
    no_import_cycles,
    files_say_why_they_exist,
    errors_are_not_swallowed,
    no_machine_paths,
]


@pytest.fixture(scope="module")
def project() -> Tree:
    return Tree.read(ROOT)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_project_obeys(rule: Callable[[Tree], list[str]], project: Tree) -> None:
    assert "sync/fields.py" in project.python  # the walk found the project
    violations = rule(project)
    assert not violations, "\n" + "\n".join(violations)


# --- the rules can fail -----------------------------------------------------------------------------------------------

GOOD = {
    "launch.py": "import config\nfrom engine import child\nimport trainer.trainer, records.log, settings\n",
    "config.py": "from engine.child import EngineConfig\nfrom trainer.trainer import TrainerConfig\nimport settings\n",
    "settings.py": "import yaml\nimport settings_help\nfrom sync.fields import doc\n",
    "settings_help.py": "import rich\n",
    "sync/fields.py": "import msgspec\n",
    "sync/push.py": "from . import fields\nfrom .fields import doc\n",
    "engine/child.py": "import sglang\nfrom sync import push\ndef f():\n    import sglang.srt\n",
    "engine/tasks/__init__.py": "from engine.tasks import arithmetic\nimport transformers\n",
    "engine/tasks/arithmetic.py": "import re\n",
    "trainer/__init__.py": "",
    "trainer/trainer.py": "import sync.push\nfrom trainer import fp8\n",
    "trainer/fp8/__init__.py": "def f():\n    import transformer_engine.pytorch as te\n    from deep_gemm import x\n",
    "records/log.py": "from sync.batch import Batch\n",
    "sync/batch.py": "import numpy\ntry:\n    x\nexcept OSError:\n    pass\nexcept Exception:\n    raise\n",
    "tests/test_all.py": "import sglang, launch, engine.child, trainer.trainer\n",
    "README.md": "usr/root/x, https://example.org/opt/x, ~/work/x, $HOME/work/x, runs/work/x\n",
}

SNEAKY = "def f():\n    from importlib import import_module\n    import_module('trainer.trainer')\n"
BAD = [
    ("rooms_import_downwards", {"engine/x.py": "import trainer.trainer"}, "engine/x.py:2: engine must not import"),
    ("rooms_import_downwards", {"engine/x.py": "from trainer import trainer"}, "must not import trainer.trainer"),
    ("rooms_import_downwards", {"engine/x.py": SNEAKY}, "engine/x.py:4: engine must not import trainer.trainer"),
    ("rooms_import_downwards", {"trainer/x.py": "def f():\n    from engine.host import H"}, "trainer/x.py:3:"),
    ("rooms_import_downwards", {"trainer/fp8/x.py": "from ...engine import host"}, "trainer must not import engine"),
    *(("rooms_import_downwards", {"sync/x.py": f"import {name}"}, f"sync must not import {name}")
      for name in ("engine.host", "trainer.trainer", "records.log", "launch", "config", "settings")),
    ("rooms_import_downwards", {"records/x.py": "from engine.host import H"}, "records must not import engine.host"),
    ("rooms_import_downwards", {"records/x.py": "import config"}, "records must not import config"),
    ("rooms_import_downwards", {"settings.py": "import sync.push"}, "settings must not import sync.push"),
    ("rooms_import_downwards", {"settings.py": "import config"}, "settings must not import config"),
    ("rooms_import_downwards", {"config.py": "import launch"}, "config must not import launch"),
    ("libraries_have_their_importers", {"engine/rollout.py": "import sglang.srt"}, "engine/rollout.py:2: sglang is"),
    ("libraries_have_their_importers", {"trainer/x.py": "def f():\n    import sglang"}, "trainer/x.py:3: sglang is"),
    ("libraries_have_their_importers", {"trainer/x.py": "def f():\n    import deep_gemm"}, "x.py:3: deep_gemm is"),
    ("libraries_have_their_importers", {"trainer/fp8/te.py": "import transformer_engine"}, "only inside functions"),
    ("libraries_have_their_importers", {"trainer/fp8/x.py": "class A:\n    import deep_gemm"}, "only inside functions"),
    ("libraries_have_their_importers", {"engine/host.py": "import transformers"}, "transformers is imported only in"),
    ("libraries_have_their_importers", {"sync/x.py": "from transformers import A"}, "transformers is imported only in"),
    ("no_import_cycles", {"sync/a.py": "import sync.b", "sync/b.py": "def f():\n    from sync import a"},
     "import cycle: sync/a.py ↔ sync/b.py"),
    ("no_import_cycles", {f"sync/{a}.py": f"from .{b} import x" for a, b in ("ab", "bc", "ca")},
     "import cycle: sync/a.py ↔ sync/b.py ↔ sync/c.py"),
    ("no_import_cycles", {"engine/tasks/x.py": "from engine.tasks import Task",
                          "engine/tasks/__init__.py": "from engine.tasks.x import X"}, "engine/tasks/__init__.py ↔"),
    ("no_import_cycles", {"sync/a.py": "import sync.a"}, "import cycle: sync/a.py"),
    ("files_say_why_they_exist", {"sync/a.py": None}, "sync/a.py: opens without a docstring"),
    ("errors_are_not_swallowed", {"sync/a.py": "try:\n    x\nexcept Exception:\n    pass"}, "sync/a.py:4: swallows"),
    ("errors_are_not_swallowed", {"sync/a.py": "try:\n    x\nexcept:\n    ..."}, "sync/a.py:4: swallows"),
    ("errors_are_not_swallowed", {"sync/a.py": "try:\n    x\nexcept (OSError, BaseException):\n    pass"}, "swallows"),
    ("errors_are_not_swallowed", {"sync/a.py": "with contextlib.suppress(Exception):\n    x"}, "suppresses"),
    *(("no_machine_paths", {name: text}, f"{name}:2: machine path") for name, text in (
        ("a.md", "x\nsee /" + "work/x"), ("b.yaml", "\npath: /" + "root/x"), ("c.txt", "\n\"/" + "opt/x\""),
        ("Makefile", "\ncp /" + "tmp/x y"), (".ci/run", "\ncd /" + "work/main"))),
]  # fmt: skip


def plant(files: dict[str, str | None]) -> Tree:
    """GOOD with files added or replaced. A docstring becomes line 1 of Python, the text line 2 on; None: empty."""
    return Tree(
        {
            name: ('"""Why."""\n' if name.endswith(".py") and text is not None else "") + (text or "")
            for name, text in (GOOD | files).items()
        }
    )


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_a_good_tree_passes(rule: Callable[[Tree], list[str]]) -> None:
    assert rule(plant({})) == []


@pytest.mark.parametrize(("name", "files", "message"), BAD)
def test_a_bad_tree_fails(name: str, files: dict[str, str | None], message: str) -> None:
    (rule,) = (rule for rule in RULES if rule.__name__ == name)
    violations = rule(plant(files))
    assert any(message in violation for violation in violations), violations


def test_every_rule_has_a_bad_tree() -> None:
    assert {name for name, _, _ in BAD} == {rule.__name__ for rule in RULES}


def test_reading_takes_the_sources_and_leaves_the_rest(tmp_path: Path) -> None:
    for name in ("a.py", "engine/b.py", ".ci/run", ".venv/c.py", "runs/d.py", "x.egg-info/e.py", "docs/f.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\0")
    assert set(Tree.read(tmp_path).text) == {"a.py", "engine/b.py", ".ci/run", "docs/f.md"}
