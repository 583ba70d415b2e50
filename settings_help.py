"""Config struct types in words: what `--help` prints and what the error messages of settings.py call "expected".

The words come from the fields themselves (`Annotated[type, doc("Meaning.", unit="tokens", ge=1)] = default`), so the
help cannot disagree with what is checked. Nothing here knows the root Config.
"""

import json
import typing
from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import inspect, structs
from rich.console import Console, ConsoleOptions, RenderResult
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

WIDE = 120  # columns from which the help is one table; below, two lines per field
SECTION = "section"  # FieldDoc.type of a field that holds fields


class FieldDoc(msgspec.Struct, frozen=True, kw_only=True):
    """Help of one field. Example: path `trainer.lr`, type `float > 0`, default `1e-06`, unit ``, meaning `Peak …`."""

    path: str  # dotted, as in an override; `[]` for the elements of a list, `.NAME` for those of a map
    type: str  # in words, or SECTION
    default: str  # "required" if there is none, "" for a section
    unit: str
    meaning: str


def show(value: Any) -> str:
    """A value on one line, as YAML would have it, at most 60 characters."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else text[:57] + "..."


def describe(annotation: Any) -> str:
    """A type in words: `float > 0`, `grpo | dapo`, `int >= 1 | null`, `list of str`."""
    return " | ".join(_describe(node) for node in members(annotation))


def members(annotation: Any) -> list[Any]:
    """The msgspec type nodes that a value may be, without metadata: one, or those of a union."""
    return _members(inspect.type_info(annotation))


def _members(node: Any) -> list[Any]:
    while isinstance(node, inspect.Metadata):
        node = node.type
    return [member for child in node.types for member in _members(child)] if hasattr(node, "types") else [node]


def _describe(node: Any) -> str:
    if isinstance(node, inspect.LiteralType):
        return " | ".join(map(str, node.values))
    if isinstance(node, inspect.NoneType):
        return "null"
    if isinstance(node, inspect.BoolType):
        return "true | false"
    if isinstance(node, inspect.StructType):
        return f"map of {', '.join(field.encode_name for field in node.fields)}"
    name = type(node).__name__.removesuffix("Type").lower()
    if isinstance(node, inspect.DictType):
        name = f"map of {_inside(node.value_type)}"
    elif isinstance(node, inspect.ListType | inspect.VarTupleType):
        name = f"list of {_inside(node.item_type)}"
    elif isinstance(node, inspect.TupleType):
        name = f"[{', '.join(map(_inside, node.item_types))}]"
    return " ".join([name, *_limits(node)])


def _inside(node: Any) -> str:
    return " | ".join(map(_describe, _members(node)))


def _limits(node: Any) -> Iterator[str]:
    signs = {"gt": "> {}", "ge": ">= {}", "lt": "< {}", "le": "<= {}", "multiple_of": "multiple of {}"}
    lengths = {"min_length": "at least {} long", "max_length": "at most {} long", "pattern": "matching {}"}
    found = [
        words.format(limit)
        for name, words in (signs | lengths).items()
        if (limit := getattr(node, name, None)) is not None
    ]
    if found:
        yield ", ".join(found)


def field_docs(root_type: type[msgspec.Struct]) -> list[FieldDoc]:
    """Help of every section and field, a section before its fields, plain fields before sub-sections."""
    return list(_field_docs(root_type, "", None))


def _field_docs(cls: Any, prefix: str, defaults: msgspec.Struct | None) -> Iterator[FieldDoc]:
    nested = []
    for field in structs.fields(cls):
        path = prefix + field.encode_name
        default = getattr(defaults, field.name) if defaults else default_of(field)
        unit, meaning = _words(field.type)
        suffix, inner = _struct_inside(field.type)
        if inner is not None:
            meaning = meaning or (inner.__doc__ or "").strip().partition("\n")[0]
            nested.append(
                (FieldDoc(path=path + suffix, type=SECTION, default="", unit="", meaning=meaning), inner, default)
            )
            continue
        shown = "required" if default is msgspec.NODEFAULT else default
        if not isinstance(shown, str) or not shown:
            shown = json.dumps(msgspec.to_builtins(shown), ensure_ascii=False)
        yield FieldDoc(path=path, type=describe(field.type), default=shown, unit=unit, meaning=meaning)
    for doc, inner, default in nested:
        yield doc
        yield from _field_docs(inner, doc.path + ".", default if isinstance(default, msgspec.Struct) else None)


def default_of(field: structs.FieldInfo) -> Any:
    """The default of a field, freshly made where it has a factory; msgspec.NODEFAULT where it is required."""
    return field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()


def _words(annotation: Any) -> tuple[str, str]:
    """(unit, meaning) of the metadata around a field's type."""
    unit = meaning = ""
    for meta in getattr(annotation, "__metadata__", ()):
        if isinstance(meta, msgspec.Meta):
            unit = (meta.extra or {}).get("unit", "") or unit
            meaning = meta.description or meaning
    return unit, meaning


def _struct_inside(annotation: Any) -> tuple[str, type | None]:
    """(suffix, struct): the struct that a field holds; suffix "[]" for a list of it, ".NAME" for a map, else ""."""
    inner = annotation.__origin__ if typing.get_origin(annotation) is typing.Annotated else annotation
    if isinstance(inner, type) and issubclass(inner, msgspec.Struct):
        return "", inner
    suffix = {list: "[]", tuple: "[]", dict: ".NAME"}.get(typing.get_origin(inner) or inner, "")
    for arg in typing.get_args(inner):
        deeper, found = _struct_inside(arg)
        if found is not None:
            return suffix + deeper, found
    return "", None


def undocumented(root_type: type[msgspec.Struct]) -> list[str]:
    """Paths of the fields and sections that say nothing about themselves; a test wants none."""
    return [doc.path for doc in field_docs(root_type) if not doc.meaning]


class HelpTable:
    """Rich renderable of `field_docs`: one aligned table on wide terminals, two lines per field on narrow ones."""

    def __init__(self, docs: list[FieldDoc]) -> None:
        self.docs = docs

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if options.max_width >= WIDE:
            yield self._table()
        else:
            yield from self._lines()

    def _table(self) -> Table:
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
        table.add_column("field", no_wrap=True)
        table.add_column("type", max_width=32, overflow="fold")
        table.add_column("default", max_width=20, overflow="fold")
        table.add_column("unit")
        table.add_column("meaning", ratio=1)
        for doc in self.docs:
            if doc.type == SECTION:
                table.add_row()
                table.add_row(Text(doc.path, "bold"), "", "", "", Text(doc.meaning, "bold"))
            else:
                cells = Text(doc.path, "cyan"), Text(doc.type, "green"), Text(doc.default), Text(doc.unit)
                table.add_row(*cells, Text(doc.meaning))
        return table

    def _lines(self) -> Iterator[Padding | Text]:
        for doc in self.docs:
            if doc.type == SECTION:
                yield Text(f"\n{doc.path}: {doc.meaning}", "bold")
                continue
            default = "required" if doc.default == "required" else f"default {doc.default}"
            line = Text.assemble((doc.path, "cyan"), "  ", (doc.type, "green"), f"  {default}")
            if doc.unit:
                line.append(f"  unit {doc.unit}")
            yield Padding(line, (0, 0, 0, 2))
            yield Padding(Text(doc.meaning), (0, 0, 0, 6))


def help_table(root_type: type[msgspec.Struct]) -> HelpTable:
    """What `--help` prints: `Console().print(help_table(Config))`."""
    return HelpTable(field_docs(root_type))
