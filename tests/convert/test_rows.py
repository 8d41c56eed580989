"""Tables of settings: what a row of a file becomes, and what is wrong with one."""

import pytest

from verlite.convert import rows
from verlite.convert.rows import NOT_SET, Row

HEAD = """
[programs]
train = {sections = ["own", "common"], oldest = "0.5", newest = "1.2", defaults = {seed = 7}}
"""


def read(folder, text, **words):
    (folder / "other.toml").write_text(text)
    return rows.read(folder / "other.toml", **words)


def test_rows_of_a_file(tmp_path):
    dialect = read(
        tmp_path,
        HEAD
        + "[changes]\n"
        + '"lr 1.0" = {of = ["train", "tune"], was = 0.1, now = "null"}\n'
        + '"seed 0.9" = {of = ["train"], was = 3}\n'
        + '"on 0.9" = {of = ["tune"], was = true}\n'
        + "[own]\n"
        + '"lr adam.lr" = {same = "{actor}optim.lr {role}.lr", default = "null", least = 1}\n'
        + '"on" = {derived = "", default = false, note = "why", shared = true}\n'
        + '"mode" = {same = "mode", kind = "switch", values = {true = "auto", b = "c"}}\n'
        + "[common]\n"
        + 'seed = {derived = "data.seed", default = 1, null = true}\n'
        + '"log_*" = {needless = "logs", kind = "any"}\n'
        + 'text = {dropped = "gone"}\n',
        role="critic",
    )
    own = (
        Row(
            "lr",
            "same",
            "actor_rollout_ref.actor.optim.lr critic.lr",
            default=None,
            also=("adam.lr",),
            kind="any",
            least=1,
        ),
        Row("on", "derived", "", "why", False, kind="switch", shared=True),
        Row("mode", "same", "mode", values={True: "auto", "b": "c"}, kind="switch"),
    )
    assert dialect.sections["own"] == own
    (table,) = dialect.tables("Other").values()
    assert table.rows == (
        *own,
        Row("seed", "derived", "data.seed", default=7, kind="int", null=True),
        Row("log_*", "needless", note="logs", kind="any"),
        Row("text", "dropped", note="gone", kind="text"),
    )
    assert [*table.changes] == [("lr", "1.0"), ("seed", "0.9")]
    assert [change[1:] for change in table.changes.values()] == [(0.1, None), (3, NOT_SET)]
    assert (table.framework, table.oldest, table.newest) == ("Other", "0.5", "1.2")
    assert [row.default for row in table.at("0.8")][:4] == [0.1, False, NOT_SET, 3]


WRONG = [
    ('"a b" = {same = "x"}\n"b" = {same = "y"}', "'b': another row has one of these names"),
    ("a = {default = 1}", "'a': needs one of same, derived, needless, dropped, refused"),
    (
        'a = {same = "x", refused = "y"}',
        "'a': needs one of same, derived, needless, dropped, refused",
    ),
    (
        'a = {same = "x", kind = "number"}',
        "'a': kind must be one of switch, int, float, text, words, mapping, any",
    ),
    ('a = {same = "x", kind = "int", default = 1}', "'a': has a default, so it needs no kind"),
    ('a = {sam = "x"}', "'a': unknown field sam. Known are same, derived, needless, dropped, "),
]


@pytest.mark.parametrize(("text", "message"), WRONG, ids=[message for _, message in WRONG])
def test_an_error_names_file_and_row(tmp_path, text, message):
    with pytest.raises(ValueError) as error:
        read(tmp_path, f"[own]\n{text}\n")
    assert str(error.value).startswith(f"other.toml, [own] {message}")
