"""`make site` fails on every warning of mkdocs."""

import subprocess
import sys
from pathlib import Path

import pytest

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
