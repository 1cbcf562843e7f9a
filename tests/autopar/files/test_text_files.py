"""Texts of users are read as data, or refused with the file's name and the line."""

from __future__ import annotations

from pathlib import Path

import pytest

from autopar.errors import ClusterError, ConstraintError
from autopar.files.text_files import MOST_BYTES, near, parse_yaml, read_mapping, read_text

BOMB = "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}' if n else 'x'] * 10)}]\n" for n in range(9))


@pytest.mark.parametrize(
    ("text", "line", "says"),
    [
        ("a: 1\nb: [1\n", 3, "not valid YAML"),
        ("a: 1\na: 2\n", 2, "the key a occurs twice"),
        ("a:\n  b: 1\n  c: 1\n  b: 2\n", 4, "the key a.b occurs twice"),
        ("a: 1\nb: !!python/object/apply:os.getcwd []\n", 2, "tags are not supported"),
        ("a: !!python/name:os.system\n", 1, ""),
        ("a: 1\nb: !!int x\n", 2, "cannot be read"),
        ("a: 1\nb: !!binary aGk=\n", 2, "tags are not supported"),
        (f"a: 1\nb: {'9' * 5000}\n", 2, ""),
        (f"a: 0x{'f' * 5000}\n", 1, "too large"),
        ("a: &a\n  b: *a\n", 1, "contains it"),
        ("? [1, 2]\n: 3\n", 1, "a key must be a name"),
        ("a: 1\n\tb: 2\n", 2, "not valid YAML"),
        ("a: 1\nb: \x00\n", 2, "not valid YAML"),
        ("a: 1\n---\na: 2\n", 2, "not valid YAML"),
        (BOMB, 1, "more than 200000 values"),
        (f"a: {'[' * 5000}{']' * 5000}\n", 1, "more than 40 nested brackets"),
        (f"a: 1\nb: {'{c: [' * 5000}\n", 2, "more than 40 nested brackets"),
        ("[\n" * 5000, 41, "more than 40 nested brackets"),
        ("".join(" " * depth + "a:\n" for depth in range(500)), 41, "more than 40 nested indentations"),
    ],
)
def test_what_is_no_data_is_refused_with_its_line(text: str, line: int, says: str) -> None:
    with pytest.raises(ConstraintError) as caught:
        parse_yaml(text, "given.yaml")
    assert str(caught.value).startswith(f"given.yaml, line {line}: "), str(caught.value)
    assert says in str(caught.value)


def test_plain_data_is_read_with_lines() -> None:
    data, lines = parse_yaml("a: 1\nb:\n  - {c: 2020-01-02, d: yes}\n  - &x text\n  - *x\ne: .nan\n", "given.yaml")
    assert data["a"] == 1 and data["b"] == [{"c": "2020-01-02", "d": True}, "text", "text"] and data["e"] != data["e"]
    assert lines["b", "0", "c"] == 3 and lines["b", "1"] == 4 and lines["e",] == 6


@pytest.mark.parametrize(
    ("text", "value"),
    [("1e-3", 0.001), ("-2E5", -200000.0), (".5e+2", 50.0), ("1.e3", 1000.0), ("12", 12), ("1e", "1e"), ("e3", "e3")],
)
def test_numbers_are_those_of_yaml_1_2(text: str, value: object) -> None:
    (found,) = parse_yaml(f"a: {text}\n", "given.yaml")[0].values()
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"a: 1\nb: caf\xe9\n", "line 2: the file is not UTF-8 text"),
        ("a: 1\n".encode("utf-16"), "line 1: the file is not UTF-8 text"),
        (b"#" * (MOST_BYTES + 1), f"more than {MOST_BYTES} bytes"),
        (b"- 1\n", "is not a configuration"),
        (b"", "is not a configuration"),
    ],
)
def test_files_that_are_no_text_or_no_mapping(content: bytes, says: str, tmp_path: Path) -> None:
    path = tmp_path / "given.yaml"
    path.write_bytes(content)
    with pytest.raises(ConstraintError) as caught:
        read_mapping(path)
    assert str(path) in str(caught.value) and says in str(caught.value)


@pytest.mark.parametrize("path", [".", "no/such/file", "", "\0"])
def test_paths_that_cannot_be_read(path: str) -> None:
    with pytest.raises(ClusterError, match="cannot read"):
        read_text(path, ClusterError)


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "given.yaml").write_bytes(b"\xef\xbb\xbftp: 2\n")
    assert read_mapping(tmp_path / "given.yaml") == {"tp": 2}


def test_near_names_the_nearest_and_all() -> None:
    assert near("tpp", ("tp", "dp")) == ["did you mean 'tp'?", "one of dp, tp"]
