"""docs/mistakes.md says what is really printed."""

import re
from pathlib import Path

import pytest

from verlite.config import ConfigError

PAGE = Path(__file__).parents[2] / "docs" / "mistakes.md"
ROWS = re.findall(r"^\| `(.+?)` \| (.+) \|$", PAGE.read_text(), re.MULTILINE)


@pytest.mark.parametrize(("added", "said"), ROWS, ids=[added for added, _ in ROWS])
def test_mistakes(material, added, said):
    folder = str(material.folder)
    try:
        messages = material.load(*added.replace("DIR", folder).split(" ")).notes
    except ConfigError as error:
        messages = [str(problem) for problem in error.problems]
    assert messages == [said.replace("DIR", folder)]


def test_there_are_enough_of_them():
    assert len(ROWS) >= 50


def test_the_page_on_configuration_shows_lines_that_work(material):
    text = (PAGE.parent / "configuration.md").read_text()
    (placement,) = re.findall(r"'(\+?cluster\.component_placement=.*)'", text)
    assert material.load(placement).config.cluster.component_placement == {"actor,critic": "0-3", "rollout": "4-7"}
