"""Reads a YAML recipe and command-line overrides into typed config structs, and says in one line what is wrong.

Why not `msgspec.convert` alone: it loses the key inside a map, does not know the nearest valid name, and PyYAML reads
YAML 1.1, where `1e-4` is a string, `off` a bool and `010` eight. Here the tree is built field by field, so that every
error names its dotted path, its value and what is allowed; msgspec still judges every leaf (strict types, limits).

What the files may say: YAML 1.2 scalars (only `true`/`false` are bools, `1e-4` is a float, `010` a string), plus
`1_000` for readability; duplicate keys, NaN, timestamps and other tags are errors. A section that is left out has its
defaults. An override `task.params.digits=5` sets one key of the recipe, a map or list as the value replaces it whole.

Nothing here knows the root Config: every function takes the root struct type.
"""

import difflib
import json
import re
import types
import typing
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import yaml
from msgspec import inspect, structs

from settings_help import FieldDoc, default_of, describe, field_docs, help_table, members, show, undocumented

__all__ = [
    "ConfigError", "FieldDoc", "describe", "dump", "field_docs", "find_recipe", "help_table", "load", "recipes",
    "undocumented",
]  # fmt: skip

T = TypeVar("T", bound=msgspec.Struct)

_FLOAT = re.compile(
    r"[-+]?(?:(?:[0-9][0-9_]*)?\.[0-9]+|[0-9][0-9_]*\.)(?:[eE][-+]?[0-9]+)?$"
    r"|[-+]?[0-9][0-9_]*[eE][-+]?[0-9]+$|[-+]?\.(?:inf|Inf|INF)$|\.(?:nan|NaN|NAN)$"
)
_TAGS = {"map", "seq", "str", "int", "float", "bool", "null", "merge"}


class ConfigError(ValueError):
    """A mistake of the user in a recipe or an override. `str(error)` is always one line."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))


# --- YAML -------------------------------------------------------------------------------------------------------------


class _Loader(yaml.SafeLoader):
    """YAML 1.2: the resolvers below, and none of YAML 1.1's."""


class _Dumper(yaml.SafeDumper):
    """Quotes every string that YAML 1.1 or `_Loader` would take for something else."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


_Loader.yaml_implicit_resolvers = {}
for _tag, _pattern, _first in (
    ("null", re.compile(r"(?:~|null|Null|NULL|)$"), ["~", "n", "N", ""]),
    ("bool", re.compile(r"(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF")),
    ("int", re.compile(r"[-+]?(?:0|[1-9][0-9]*(?:_[0-9]+)*)$|0x[0-9a-fA-F]+$"), list("-+0123456789")),
    ("float", _FLOAT, list("-+.0123456789")),
    ("merge", re.compile(r"<<$"), ["<"]),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", _pattern, _first)
_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789"))
# PyYAML writes some line separators bare, and reads them back as spaces: everything unprintable goes in double quotes.
_Dumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar(
        "tag:yaml.org,2002:str", text, style=None if text.isprintable() else '"'
    ),
)
_Dumper.add_representer(
    list, lambda dumper, data: dumper.represent_sequence("tag:yaml.org,2002:seq", data, flow_style=True)
)


def _check_nodes(node: yaml.Node, path: str, parents: tuple[yaml.Node, ...] = ()) -> None:
    """Refuses what YAML allows and a recipe must not say. Raises ConfigError with the line."""
    line = node.start_mark.line + 1
    if node in parents:
        raise ConfigError(f"line {line}: {path}: an anchor that contains itself")
    if node.tag.removeprefix("tag:yaml.org,2002:") not in _TAGS:
        raise ConfigError(f"line {line}: {path}: tag {node.tag} is not allowed; write a plain value")
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            _check_nodes(item, path, (*parents, node))
    elif isinstance(node, yaml.MappingNode):
        first: dict[str, int] = {}
        for key, value in node.value:
            line = key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarNode) or key.tag.rpartition(":")[2] not in ("str", "merge"):
                name = key.value if isinstance(key, yaml.ScalarNode) else "this key"
                raise ConfigError(f"line {line}: {_join(path, str(name))}: a key must be a string; put it in quotes")
            child = _join(path, key.value)
            if key.value in first:
                raise ConfigError(f"line {line}: {child}: given twice, first in line {first[key.value]}; keep one")
            first[key.value] = line
            _check_nodes(value, child, (*parents, node))
    elif node.tag.endswith(":float") and "nan" in node.value.lower():
        raise ConfigError(f"line {line}: {path}: NaN is not a setting; write a number")


def _parse(text: str, path: str = "") -> Any:
    """YAML text to builtins. Raises ConfigError for anything malformed, with line and column, never the file name."""
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        _check_nodes(node, path)
        return loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise ConfigError(f"{place}{error.problem or error.context}") from None
    except (yaml.YAMLError, ValueError) as error:
        raise error if isinstance(error, ConfigError) else ConfigError(str(error)) from None


# --- reading ----------------------------------------------------------------------------------------------------------


def load(root_type: type[T], path: str | Path, overrides: Iterable[str] = ()) -> T:
    """The config that recipe `path` and then `overrides` ("section.key=value", in order) describe.

    Raises ConfigError with one line for every mistake a user can make; `find_recipe` turns names into paths.
    """
    path = Path(path)
    try:
        data = _parse(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise _no_recipe(str(path), path.parent) from None
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: is not UTF-8 text") from None
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    names = ", ".join(field.encode_name for field in structs.fields(root_type))
    if data is None:
        raise ConfigError(f"{path}: is empty; expected a map of {names}")
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: {show(data)} is not a map; expected a map of {names}")
    for override in overrides:
        _apply_override(data, override)
    return _build(root_type, data, "", root_type)


def _apply_override(data: dict[str, Any], override: str) -> None:
    dotted, equals, text = override.partition("=")
    parts = dotted.strip().split(".")
    if not equals or not all(re.fullmatch(r"[^\s.\[\]-][^\s.\[\]]*", part) for part in parts):
        raise ConfigError(f"override {override!r}: expected section.key=value, for example trainer.lr=1e-4")
    if not text.strip():
        raise ConfigError(f"override {override!r}: has no value; write {dotted}=null or {dotted}=''")
    try:
        value = _parse(text, dotted)
    except ConfigError as error:
        raise ConfigError(f"override {override!r}: {error}; quote a string that has YAML characters") from None
    for part in parts[:-1]:
        if not isinstance(data.get(part), dict):
            data[part] = {}
        data = data[part]
    data[parts[-1]] = value


def dump(config: msgspec.Struct) -> str:
    """YAML of every field of a config, which `load` reads back to an equal config."""
    data = json.loads(json.dumps(msgspec.to_builtins(config)))  # tuples become lists; Infinity survives
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def _build(annotation: Any, value: Any, path: str, root: type, base: Any = None) -> Any:
    """One value of type `annotation` from builtins; recurses into structs, maps, lists and unions.

    `base` is the default of the field, if it has one: a section that gives some keys keeps the others of its default.
    """
    inner = annotation.__origin__ if typing.get_origin(annotation) is typing.Annotated else annotation
    kind, args = typing.get_origin(inner) or inner, typing.get_args(inner)
    if _is_struct(kind):
        return _build_struct(kind, value, path, root, base if isinstance(base, kind) else None)
    if kind in (typing.Union, types.UnionType):
        member = _container(args, value)
        return _leaf(annotation, value, path) if member is None else _build(member, value, path, root, base)
    if kind is dict and isinstance(value, dict):
        item = args[1] if args else Any
        return {key: _build(item, child, _join(path, key), root) for key, child in value.items()}
    if kind in (list, tuple) and isinstance(value, list):
        fixed = kind is tuple and args and args[-1] is not Ellipsis
        node = members(annotation)[0]
        low = len(args) if fixed else node.min_length or 0
        high = len(args) if fixed else node.max_length
        if len(value) < low or (high is not None and len(value) > high):
            raise _bad(path, value, annotation)
        items = args if fixed else [args[0] if args else Any] * len(value)
        return kind(_build(item, child, f"{path}[{i}]", root) for i, (item, child) in enumerate(zip(items, value)))
    return _leaf(annotation, value, path)


def _container(args: tuple[Any, ...], value: Any) -> Any:
    """The member of a union that a map or a list is read as; None for scalars, which msgspec tells apart."""
    for arg in args:
        kind = typing.get_origin(arg) or arg
        if kind is typing.Annotated:
            kind = typing.get_origin(arg.__origin__) or arg.__origin__
        if isinstance(value, dict) and (kind is dict or _is_struct(kind)):
            return arg
        if isinstance(value, list) and kind in (list, tuple):
            return arg
    return None


def _leaf(annotation: Any, value: Any, path: str) -> Any:
    if value == "None" and any(isinstance(node, inspect.NoneType) for node in members(annotation)):
        raise ConfigError(f'{path} = "None": expected {describe(annotation)}; write null')
    try:
        return msgspec.convert(value, annotation)
    except msgspec.ValidationError:
        raise _bad(path, value, annotation) from None


def _build_struct(cls: type, value: Any, path: str, root: type, base: msgspec.Struct | None = None) -> Any:
    fields = {field.encode_name: field for field in structs.fields(cls)}
    if not isinstance(value, dict):
        raise ConfigError(f"{path} = {show(value)}: expected a map of {', '.join(fields)}")
    for name in value:
        if name not in fields:
            raise _unknown(_join(path, name), name, value[name], list(fields), root)
    children = {}
    for name, field in fields.items():
        default = getattr(base, field.name) if base is not None else default_of(field)
        if name in value:
            children[field.name] = _build(field.type, value[name], _join(path, name), root, default)
        elif default is msgspec.NODEFAULT:
            raise ConfigError(f"{_join(path, name)}: missing; expected {describe(field.type)}")
        else:
            children[field.name] = default
    try:
        return cls(**children)
    except ValueError as error:
        raise ConfigError(f"{path or 'config'}: {error}") from None


# --- messages ---------------------------------------------------------------------------------------------------------


def _bad(path: str, value: Any, annotation: Any) -> ConfigError:
    hint = _hint(value, annotation)
    return ConfigError(f"{path} = {show(value)}: expected {describe(annotation)}{'; ' + hint if hint else ''}")


def _hint(value: Any, annotation: Any) -> str:
    """What the user most probably meant, or ''."""
    nodes = members(annotation)
    wants = {type(node) for node in nodes}
    numeric = wants & {inspect.IntType, inspect.FloatType}
    if isinstance(value, str):
        names = [str(name) for node in nodes if isinstance(node, inspect.LiteralType) for name in node.values]
        if near := _nearest(value, names):
            return f"did you mean {near}?"
        if inspect.BoolType in wants and value.lower() in ("yes", "no", "on", "off"):
            return "write true or false"
        if numeric and value.lower().lstrip("+-") in ("inf", "infinity"):
            return "write .inf"
        if numeric and (_FLOAT.match(value) or value.isdigit()):
            return "remove the quotes"
    elif isinstance(value, float) and inspect.IntType in wants and value.is_integer():
        return f"write {int(value)}"
    elif isinstance(value, int | float) and inspect.StrType in wants:
        return "put it in quotes"
    return ""


def _unknown(path: str, name: str, value: Any, allowed: list[str], root: type) -> ConfigError:
    prefix = path[: len(path) - len(name)]
    everywhere = [doc.path for doc in field_docs(root)]
    near = [prefix + match] if (match := _nearest(name, allowed)) else []
    near = near or [other for other in everywhere if other.rpartition(".")[2] == name]
    near = near or ([match] if (match := _nearest(path, everywhere)) else [])
    question = f" did you mean {' or '.join(near)}?" if near else ""
    where = prefix.rstrip(".") or "the config"
    return ConfigError(f"{path} = {show(value)}: unknown key;{question} {where} has: {', '.join(allowed)}")


def _nearest(name: str, names: list[str]) -> str:
    lowered = {other.lower(): other for other in names}
    found = difflib.get_close_matches(name.lower().replace("-", "_"), lowered, 1)
    return lowered[found[0]] if found else ""


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _is_struct(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


# --- recipes ----------------------------------------------------------------------------------------------------------


def recipes(directory: str | Path) -> list[tuple[str, str]]:
    """(name, first comment line) of every recipe in a directory, sorted by name."""
    found = []
    for path in sorted(Path(directory).glob("*.yaml")):
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        found.append((path.stem, next((line.lstrip("# ").rstrip() for line in lines if line.startswith("#")), "")))
    return found


def find_recipe(name_or_path: str | Path, directory: str | Path) -> Path:
    """The file of `demo`, `demo.yaml`, `configs/demo.yaml` (from anywhere) or any path. Raises ConfigError if none."""
    asked, directory = Path(name_or_path), Path(directory)
    # A bare name means a recipe, even where a file of that name lies around.
    places = [asked, directory.parent / asked] if "/" in str(name_or_path) else [directory / asked, asked]
    for place in places:
        for candidate in (place, place.with_name(f"{place.name}.yaml")):
            if candidate.is_file():
                return candidate
    raise _no_recipe(str(name_or_path), directory)


def _no_recipe(asked: str, directory: Path) -> ConfigError:
    names = [name for name, _ in recipes(directory)]
    near = _nearest(Path(asked).stem, names)
    question = f" did you mean {near}?" if near else ""
    return ConfigError(f"{asked}: no such recipe or file;{question} recipes: {', '.join(names) or 'none'}")
