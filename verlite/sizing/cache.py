"""Measurements of engines are kept in the user's cache folder, because each takes seconds."""

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch
import transformers

import verlite
from verlite.engine.folder import load_config
from verlite.files import replace_file
from verlite.sizing.dry_engine import EngineSpec
from verlite.sizing.measure import Passes, RoleMemory, measure

SOURCES = ("engine", "sizing", "algorithms/logprobs.py")
"""Parts of the package that the result depends on."""


def folder() -> Path:
    """Return the folder, by the XDG rules."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "verlite" / "plan"


class Measurer:
    """Measures engines, or returns what it measured before.

    use_cache: False neither reads nor writes the folder.
    measured: engines that were run; found: those whose result was kept.
    """

    def __init__(self, use_cache: bool = True, measure: Callable[..., RoleMemory] = measure):
        self.use_cache = use_cache
        self.measured = 0
        self.found = 0
        self._measure = measure
        self._known: dict[str, RoleMemory] = {}

    def __call__(self, spec: EngineSpec, passes: Passes) -> RoleMemory:
        """Return the memory of a role; see `measure.measure`."""
        key = key_of(spec, passes)
        if key in self._known:
            return self._known[key]
        memory = _read(key) if self.use_cache else None
        if memory is None:
            self.measured += 1
            memory = self._measure(spec, passes)
            if self.use_cache:
                _write(key, memory)
        else:
            self.found += 1
        self._known[key] = memory
        return memory

    def sentence(self) -> str:
        """Return how many engines were run, and where results are kept."""
        if not self.use_cache:
            return f"{self.measured} engines measured; nothing read from or written to the cache"
        return (
            f"{self.measured} engines measured, {self.found} read from the cache, {folder()} "
            "(--no-cache measures again)"
        )


def key_of(spec: EngineSpec, passes: Passes) -> str:
    """Return the hash of everything that a measurement depends on."""
    described = load_config(spec.model).to_dict()
    parts = {
        "config.json": described,
        "spec": asdict(spec) | {"model": asdict(spec.model) | {"path": ""}},
        "passes": asdict(passes),
        "versions": [verlite.__version__, torch.__version__, transformers.__version__],
        "sources": _sources(),
    }
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _sources() -> str:
    """Return a hash of the code that is run."""
    package = Path(verlite.__file__).parent
    digest = hashlib.sha256()
    for part in SOURCES:
        path = package / part
        for file in sorted(path.glob("*.py")) if path.is_dir() else [path]:
            digest.update(file.read_bytes())
    return digest.hexdigest()


def _read(key: str) -> RoleMemory | None:
    try:
        return RoleMemory(**json.loads((folder() / f"{key}.json").read_text()))
    except (OSError, ValueError, TypeError):
        return None


def _write(key: str, memory: RoleMemory) -> None:
    """Keep a result. A folder that cannot be written only means that nothing is kept."""
    try:
        folder().mkdir(parents=True, exist_ok=True)
        replace_file(folder() / f"{key}.json", json.dumps(asdict(memory)))
    except OSError:
        return
