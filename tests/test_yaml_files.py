"""YAML: numbers are numbers, words stay words, and a file cannot harm its reader."""

from __future__ import annotations

from math import inf
from pathlib import Path
from typing import Any

import pytest

from tailguard.errors import ConfigError
from tailguard.yaml_files import parse_yaml, read_yaml, write_yaml

BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "\n".join(
    f"{b}: &{b} [{', '.join(f'*{a}' for _ in range(9))}]" for a, b in zip("abcdefg", "bcdefgh", strict=True)
)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3e-4", 3e-4),
        ("1e6", 1e6),
        (".5", 0.5),
        ("1_000", 1000),
        ("-.inf", -inf),
        ("ON", "ON"),
        ("no", "no"),
        ("yes", "yes"),
        ("true", True),
        ("010", 10),
        ("1:30", "1:30"),
        ("2024-01-01", "2024-01-01"),
        ("~", None),
        ("", None),
        ("'3e-4'", "3e-4"),
        ("<<", "<<"),
    ],
)
def test_a_scalar_is_what_it_looks_like(text: str, value: Any) -> None:
    found = parse_yaml(text, "here")
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: 2\na: 3\n", r"line 3, column 1: The key 'a' is given twice; the first is in line 1"),
        ("ppo: {gamma: 1, gamma: 2}", "line 1, column 17: .*twice"),
        ("[" * 5000, "nested deeper than 32"),
        ("{a: " * 40 + "1" + "}" * 40, "nested deeper than 32"),
        (BOMB, "more than 20000 values"),
        ("a: &x [*x]", "contains it"),
        ("!!python/object/apply:os.system ['true']", "could not determine a constructor"),
        ("a: !!python/name:os.system ''", "could not determine a constructor"),
        ("a: [1, 2", "line 1"),
        ("a: 'x", "line"),
        ("\tb: 1", "line 1"),
        ("? [a, b]\n: c", "A key must be"),
        ("a: 1\n---\nb: 2", "document"),
        ("a: \x07", "not valid YAML"),
        ("9" * 5000, "too many digits"),
    ],
    ids=lambda value: str(value)[:25],
)
def test_what_cannot_be_meant_is_refused_with_its_place(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_yaml(text, "file.yaml")


def test_what_is_written_is_read_back_unchanged() -> None:
    value = {"a": "ON", "b": "3e-4", "c": 3e-4, "d": 1e300, "e": None, "f": ["true", True, "null", "1:30", "x: y"]}
    assert parse_yaml(write_yaml(value), "here") == value


def test_a_file_must_be_a_small_mapping_in_utf8(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("")
    assert read_yaml(file) == {}
    for content, message in ((b"- 1", "holds a list"), (b"\xff\xfe", "UTF-8"), (b"#" * 2**21, "at most")):
        file.write_bytes(content)
        with pytest.raises(ConfigError, match=message):
            read_yaml(file)
    with pytest.raises(ConfigError, match="There is no file"):
        read_yaml(tmp_path / "missing.yaml")
