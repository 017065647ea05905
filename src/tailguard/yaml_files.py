"""YAML without its traps: numbers are numbers, `ON` is a ticker, no key twice, no bombs, no code.

The loader is PyYAML's safe one with the core schema of YAML 1.2: only `true` and `false` are booleans, `3e-4` is a
number, `010` is ten, and dates stay text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from tailguard.errors import ConfigError
from tailguard.files import LARGEST_TEXT, read_text

DEEPEST = 32
MOST_VALUES = 20_000
SCALARS = {
    "tag:yaml.org,2002:null": (re.compile(r"^(?:~|null|Null|NULL|)$"), "~nN\0"),
    "tag:yaml.org,2002:bool": (re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), "tTfF"),
    "tag:yaml.org,2002:int": (re.compile(r"^[-+]?[0-9]+(?:_[0-9]+)*$"), "-+0123456789"),
    "tag:yaml.org,2002:float": (
        re.compile(
            r"^(?:[-+]?(?:\.[0-9]+|[0-9]+(?:_[0-9]+)*(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?"
            r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
        ),
        "-+.0123456789",
    ),
}


class StrictLoader(yaml.SafeLoader):
    """The safe loader with fewer surprises; see the module."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 (PyYAML's own way of declaring them)

    def construct_mapping(self, node: MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: dict[Any, Node] = {}
        for key_node, _ in node.value:
            if not isinstance(key_node, ScalarNode):
                raise problem("A key must be a word or a number", key_node)
            key = self.construct_object(key_node)
            if key in seen:
                first = seen[key].start_mark.line + 1
                raise problem(f"The key {key!r} is given twice; the first is in line {first}. Keep one", key_node)
            seen[key] = key_node
        return super().construct_mapping(node, deep)

    def construct_yaml_int(self, node: ScalarNode) -> int:
        text = str(node.value).replace("_", "")
        if len(text) > 400:
            raise problem("This number has too many digits", node)
        return int(text)

    def construct_yaml_float(self, node: ScalarNode) -> float:
        return float(str(node.value).replace("_", "").replace(".inf", "inf").replace(".nan", "nan").lower())


StrictLoader.add_constructor("tag:yaml.org,2002:int", StrictLoader.construct_yaml_int)
StrictLoader.add_constructor("tag:yaml.org,2002:float", StrictLoader.construct_yaml_float)


class StrictDumper(yaml.SafeDumper):
    """Writes what `StrictLoader` reads back unchanged."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012

    def ignore_aliases(self, data: Any) -> bool:
        return True


for _tag, (_pattern, _first) in SCALARS.items():
    for _class in (StrictLoader, StrictDumper):
        _class.add_implicit_resolver(_tag, _pattern, list(_first) if _first != "~nN\0" else ["~", "n", "N", ""])


def read_yaml(path: str | Path) -> dict[str, Any]:
    """The mapping a YAML file holds."""
    place = Path(path)
    parsed = parse_yaml(read_text(place, LARGEST_TEXT, ConfigError), str(place))
    if parsed is None:
        return {}
    if not isinstance(parsed, Mapping):
        raise ConfigError(f"{place} holds a {type(parsed).__name__}; a configuration is `key: value` lines.")
    return dict(parsed)


def parse_yaml(text: str, where: str) -> Any:
    """What a YAML text says, or a ConfigError with line and column."""
    try:
        refuse_depth(text, where)
        loader = StrictLoader(text)
        try:
            node = loader.get_single_node()
            if node is None:
                return None
            weigh(node)
            return loader.construct_document(node)
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ConfigError(f"{where}{place}: {error.problem or error.context}.") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{where} is not valid YAML: {str(error).splitlines()[0]}.") from None


def write_yaml(value: Mapping[str, Any]) -> str:
    """YAML text that `parse_yaml` reads back unchanged."""
    return str(yaml.dump(dict(value), Dumper=StrictDumper, sort_keys=False, allow_unicode=True))


def refuse_depth(text: str, where: str) -> None:
    """Nesting is counted before anything recurses over it."""
    depth = 0
    for event in yaml.parse(text, Loader=StrictLoader):
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            if depth > DEEPEST:
                raise ConfigError(
                    f"{where}: nested deeper than {DEEPEST} levels; a configuration is flatter than that."
                )
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1


def weigh(root: Node) -> None:
    """Count values with every alias written out; a file that unfolds without end is refused."""
    sizes: dict[int, int] = {}
    open_nodes: set[int] = set()

    def size(node: Node) -> int:
        if id(node) in open_nodes:
            raise problem("An alias refers to what contains it", node)
        if id(node) not in sizes:
            open_nodes.add(id(node))
            children: list[Node] = []
            if isinstance(node, MappingNode):
                children = [part for pair in node.value for part in pair]
            elif isinstance(node, SequenceNode):
                children = node.value
            sizes[id(node)] = 1 + sum(size(child) for child in children)
            open_nodes.discard(id(node))
        if sizes[id(node)] > MOST_VALUES:
            raise problem(f"With its aliases written out this holds more than {MOST_VALUES} values", node)
        return sizes[id(node)]

    size(root)


def problem(text: str, node: Node) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=text, problem_mark=node.start_mark)
