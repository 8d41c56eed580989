"""Hooks of mkdocs: pages of the site that are made from other files of the repository.

README.md becomes the first page. A link of a page to a file outside docs/ leads to a page with that
file. The keys of the configuration and the help of the commands become pages of the reference.
"""

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
LINK = re.compile(r"(\]\()(?!https?:|mailto:|#)([^)\s#]+)(#[^)\s]*)?(\))")
TOP = "Top level"
FIRST_FOUND = {"knobs.md": 4, "memory.md": 2, "trackers.md": 2, "tutorial_data.md": 2}
"""Pages that a search shows before others with the same words, and by what factor."""
LANGUAGES = {".py": "python", ".sh": "bash", ".yaml": "yaml", ".yml": "yaml", ".json": "json"}


def on_files(files: Any, config: Any) -> Any:
    """Add the generated pages, and every file of the repository that a page links to."""
    from mkdocs.structure.files import File

    def add(uri: str, content: str | bytes) -> None:
        files.append(File.generated(config, uri, content=content))

    add(_uri("README.md"), _with_links("README.md", (ROOT / "README.md").read_text()))
    for uri, text in (*key_pages(), ("reference/commands.md", commands_page())):
        add(uri, text)
    todo = [f"docs/{file.src_uri}" for file in files if file.src_uri.endswith(".md")]
    todo += ["README.md"]
    seen = set(todo)
    while todo:
        name = todo.pop()
        if not (ROOT / name).exists():  # a generated page
            continue
        for target in _targets(name):
            if target in seen or target.startswith("docs/"):
                continue
            seen.add(target)
            todo += [target] * target.endswith(".md")
            add(_uri(target), _page(target))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Let links out of docs/ lead to the pages of those files, and rank the page in searches."""
    uri = page.file.src_uri
    if uri in FIRST_FOUND:
        page.meta["search"] = {"boost": FIRST_FOUND[uri]}
    if page.file.generated_by:
        return markdown
    return _with_links(f"docs/{uri}", markdown)


def _targets(name: str) -> Iterator[str]:
    """Yield the files of the repository that a page links to."""
    for match in LINK.finditer((ROOT / name).read_text()):
        target = _resolved(name, match[2])
        if target:
            yield target


def _resolved(name: str, link: str) -> str | None:
    """Return the file that a link of the file `name` means, by its path in the repository."""
    path = os.path.normpath(PurePosixPath(name).parent / link)
    if (ROOT / path).is_dir():
        readme = f"{path}/README.md"
        return readme if (ROOT / readme).exists() else path
    return path if (ROOT / path).exists() else None


def _uri(name: str) -> str:
    """Return where the site has a file of the repository."""
    if name == "README.md":
        return "index.md"
    if name.startswith("docs/"):
        return name.removeprefix("docs/")
    path = ROOT / name
    if path.is_dir():
        return f"repository/{name}/index.md"
    as_it_is = path.suffix in (".md", ".png", ".svg")
    return f"repository/{name}" if as_it_is else f"repository/{name}.md"


def _with_links(name: str, text: str) -> str:
    """Return the text of a page with links that hold in the site."""
    folder = PurePosixPath(_uri(name)).parent

    def change(match: re.Match[str]) -> str:
        target = _resolved(name, match[2])
        if target is None:
            return match[0]
        link = os.path.relpath(_uri(target), folder)
        return f"{match[1]}{link}{match[3] or ''}{match[4]}"

    return LINK.sub(change, text)


def _page(name: str) -> str | bytes:
    """Return the page of a file or folder outside docs/."""
    path = ROOT / name
    if path.suffix in (".png", ".svg"):
        return path.read_bytes()
    if path.suffix == ".md":
        return _with_links(name, path.read_text())
    head = f"---\nsearch:\n  exclude: true\n---\n\n# {name}\n\n"
    if path.is_dir():
        files = sorted(found for found in path.iterdir() if found.is_file())
        return head + "\n\n".join(_code(found.read_text(), found, found.name) for found in files)
    return head + _code(path.read_text(), path)


def _code(text: str, path: Path, title: str = "") -> str:
    options = f' title="{title}"' if title else ""
    return f"``````{LANGUAGES.get(path.suffix, 'text')}{options}\n{text.rstrip()}\n``````\n"


def key_pages() -> Iterator[tuple[str, str]]:
    """Yield a page of all keys for each training command."""
    from verlite.config.commands import DPO, PPO, SFT

    for command, uri, module in (
        (PPO, "reference/keys.md", "verlite.main_ppo"),
        (SFT, "reference/keys_sft.md", "verlite.main_sft"),
        (DPO, "reference/keys_dpo.md", "verlite.main_dpo"),
    ):
        yield uri, keys_page(command, module)


def keys_page(command: Any, module: str) -> str:
    """Return a page with each key: type, default, meaning, legal values, conditions, old names."""
    from verlite.config.explain import explain

    keys = [key for key in command.keys.values() if not key.section]
    sections = dict.fromkeys(key.name.rpartition(".")[0] for key in keys)
    lines = ["---", "hide: [toc]", "---", "", f"# Keys of `python -m {module}`", ""]
    lines += [f"`{command.explain} KEY` prints the same.", ""]
    lines += [f"- [{name or TOP}](#{name.replace('.', '') or 'top-level'})" for name in sections]
    lines += [""]
    section = None
    for key in keys:
        parent = key.name.rpartition(".")[0]
        if parent != section:
            section = parent
            lines += [f"## {section or TOP}", ""]
            if section:
                lines += [command.keys[section].doc, ""]
        kind, *meaning = (line.strip() for line in explain(key.name, command).splitlines()[1:])
        lines += [
            f"### `{key.name}`",
            "",
            f"*{kind}*",
            "",
            *(f"{line}<br>" for line in meaning),
            "",
        ]
    return "\n".join(lines)


def commands_page() -> str:
    """Return a page with the help of each command of `verlite`."""
    import click
    import typer

    from verlite.cli import app

    lines = ["# Commands", ""]

    def add(command: click.Command, words: list[str], parent: click.Context | None) -> None:
        context = click.Context(command, info_name=words[-1], parent=parent, terminal_width=100)
        lines.extend([f"{'#' * min(len(words) + 1, 3)} `{' '.join(words)}`", ""])
        lines.extend(["```text", command.get_help(context).rstrip(), "```", ""])
        for name, child in getattr(command, "commands", {}).items():
            add(child, [*words, name], context)

    add(typer.main.get_command(app), ["verlite"], None)
    return "\n".join(lines)
