"""Files of tables: each row is checked, and an error names the file and the row."""

from typing import Any, NamedTuple

import pytest

from verlite import toml_tables


class Entry(NamedTuple):
    why: str
    accepts: list[str] = []
    least: int | float | None = None
    default: Any = 7


SHAPES = {"texts": str, "lists": list[str], "maps": dict[str, int], "entries": Entry}


def read(folder, text, others=None):
    file = folder / "rows.toml"
    file.write_text(text)
    return toml_tables.read(file, SHAPES, others, actor="role.actor.")


def test_rows_have_words_and_none(tmp_path):
    found = read(
        tmp_path,
        '[words]\nlr = "{actor}optim.lr"\nmore = "{lr}, {}, {a:1} and {A}"\n'
        '[texts]\n"{actor}b.*" = "{more}"\n"a" = "x"\n'
        '[lists]\nmany = ["{lr}", "b"]\n'
        '[maps]\nnull = {"{actor}n" = 1}\n'
        '[entries]\nall = {why = "w", accepts = ["c"], least = 1.5, default = "null"}\n'
        'few = {why = "w"}\n'
        "[other]\nany = true\n",
        bool,
    )
    assert found == {
        "texts": {"role.actor.b.*": "role.actor.optim.lr, {}, {a:1} and {A}", "a": "x"},
        "lists": {"many": ["role.actor.optim.lr", "b"]},
        "maps": {"null": {"role.actor.n": 1}},
        "entries": {"all": Entry("w", ["c"], 1.5, None), "few": Entry("w")},
        "other": {"any": True},
    }
    assert list(found["texts"]) == ["role.actor.b.*", "a"], "the file's order"


WRONG = [
    ("[texts\n", "rows.toml: Expected ']' at the end of a table declaration (at line 1, column 7)"),
    ('[texts]\na = "1"\na = "2"\n', "rows.toml: Cannot overwrite a value (at line 3, column 8)"),
    (
        '[texts]\n"{actor}n" = "1"\n"role.actor.n" = "2"\n',
        "rows.toml, [texts] 'role.actor.n': another row has this name",
    ),
    ('[words]\nactor = "a"\n', "rows.toml, [words] 'actor': another row has this name"),
    (
        '[more]\na = "1"\n',
        "rows.toml: unknown section more. Known are words, texts, lists, maps, entries",
    ),
    ('texts = "a"\n', "rows.toml, texts: must be a section of rows"),
    (
        '[texts]\na = "{critic}lr"\n',
        "rows.toml, [texts] 'a': unknown word {critic}. Known are actor",
    ),
    ("[texts]\na = 1\n", "rows.toml, [texts] 'a': must be str, not 1"),
    ("[lists]\na = [1]\n", "rows.toml, [lists] 'a': must be list[str], not [1]"),
    ("[maps]\na = {b = true}\n", "rows.toml, [maps] 'a': must be dict[str, int], not {'b': True}"),
    (
        '[entries]\na = "why"\n',
        "rows.toml, [entries] 'a': must be an inline table with why, accepts, least, default",
    ),
    (
        '[entries]\na = {why = "w", whi = "x"}\n',
        "rows.toml, [entries] 'a': unknown field whi. Known are why, accepts, least, default",
    ),
    ("[entries]\na = {least = 1}\n", "rows.toml, [entries] 'a': lacks why"),
    (
        '[entries]\na = {why = "w", accepts = "x"}\n',
        "rows.toml, [entries] 'a': accepts must be list[str], not 'x'",
    ),
    (
        '[entries]\na = {why = "w", least = "1"}\n',
        "rows.toml, [entries] 'a': least must be int | float | None, not '1'",
    ),
]


@pytest.mark.parametrize(("text", "message"), WRONG, ids=[message for _, message in WRONG])
def test_an_error_names_file_and_row(tmp_path, text, message):
    with pytest.raises(ValueError) as error:
        read(tmp_path, text)
    assert str(error.value) == message
