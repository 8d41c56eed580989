"""`make site` fails on every warning of mkdocs. The keys of docs/knobs.md exist."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from markdown.extensions.toc import slugify

from verlite.config.commands import PPO

ROOT = Path(__file__).parents[1]
CONFIG = "site_name: planted\nvalidation: {links: {anchors: warn}}\n"


def _site_command() -> str:
    """Return the line with which `make site` builds the site."""
    lines = (ROOT / "Makefile").read_text().splitlines()
    return lines[lines.index("site: setup-test") + 1].strip()


@pytest.mark.parametrize(
    ("page", "code", "warning"),
    [
        ("# Page\n\n[there](#page)\n", 0, ""),
        ("# Page\n\n[nowhere](#gone)\n", 1, "contains a link '#gone'"),
        ("# Page\n\n[nowhere](gone.md)\n", 1, "contains a link 'gone.md'"),
    ],
)
def test_a_warning_fails_the_gate(tmp_path: Path, page: str, code: int, warning: str) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text(page)
    (tmp_path / "mkdocs.yml").write_text(CONFIG)
    command = _site_command().replace("$(BIN)", str(Path(sys.executable).parent))
    done = subprocess.run(
        ["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == code, done.stderr
    assert warning in done.stderr


@pytest.mark.parametrize("page", ["README.md", "CHANGELOG.md", "CONTRIBUTING.md"])
def test_links_of_pages_outside_the_site_have_a_target(page: str) -> None:
    links = re.findall(r"\]\((?!https?:)([^)#\s]*)#?([^)\s]*)\)", (ROOT / page).read_text())
    assert links
    for path, anchor in links:
        target = ROOT / (path or page)
        assert target.exists(), path
        if anchor:
            headings = re.findall(r"^#+ (.+)", target.read_text(), re.MULTILINE)
            assert anchor in [slugify(heading, "-") for heading in headings], (path, anchor)


def test_the_keys_of_the_page_of_knobs_exist() -> None:
    text = (ROOT / "docs" / "knobs.md").read_text()
    named = [word for span in re.findall("`([^`]+)`", text) for word in span.split()]
    typed = {word.partition("=")[0] for word in named if re.match(r"[a-z_]+\.[a-z_.]+(=|$)", word)}
    typed -= {"my_reward.py"}
    short = ("actor.", "rollout.", "model.")
    keys = {f"actor_rollout_ref.{key}" if key.startswith(short) else key for key in typed}
    assert len(keys) > 40
    assert [key for key in sorted(keys) if PPO.find(key) is None] == []
