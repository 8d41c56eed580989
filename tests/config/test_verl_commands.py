"""Published command lines of verl, verl-recipe and Search-R1 are accepted, or refused for a cause.

`verl_commands` has them.
"""

import pytest

from tests.config import verl_page
from tests.config.conftest import FAR
from tests.config.verl_commands import material, published
from verlite.config import translation
from verlite.config.problems import notes_text

COMMANDS = list(published())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return material(tmp_path_factory.mktemp("verl"))


@pytest.mark.parametrize("published", COMMANDS, ids=[command.origin for command in COMMANDS])
def test_published_command(folder, published):
    verdict, notes = published.judge(folder)
    assert verdict == published.verdict
    assert not [note for note in map(str, notes) if FAR in note]
    remarks = [note for note in notes if note.kind == "remark"]
    assert len(str(notes_text(notes)).splitlines()) <= 3 + len(remarks)


def test_page_of_all_keys_is_current():
    """It also proves that every key of verl has a meaning: `page` raises an error otherwise."""
    assert verl_page.PAGE.read_text(encoding="utf-8") == verl_page.page(), (
        "docs/verl_keys.md is out of date: python -m tests.config.verl_page"
    )


def test_the_page_compresses_only_whole_sections():
    names = ["a.b", "a.c", "a.d", "e.f", "e.g", *(f"h.{number}" for number in range(7))]
    listed = [name for name in names if name not in ("e.g", "h.3")]
    assert list(verl_page.shortened(listed, names)) == ["`a.*` (3)", "`e.f`", "other `h.*` (6)"]


def test_enough_commands():
    assert len(COMMANDS) >= 80
    assert sum(command.verdict == "accepted" for command in COMMANDS) > 40


def test_verls_defaults_are_compared_by_type():
    assert translation.is_default("distillation.enabled", False)
    assert not translation.is_default("distillation.enabled", 0)
    assert not translation.is_default("distillation.enable", False)
