"""Transport `files`: buckets and a manifest in a folder that trainer and engines share.

    version_N/bucket-00000.safetensors ...
    manifest.json       the newest complete version: number, files with sizes, bytes, fingerprint

The manifest is replaced atomically, last. So a reader sees a complete version or the one before.
"""

import json
import shutil
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from verlite.files import replace_file
from verlite.weights import TransportError
from verlite.weights.buckets import Bucket, BucketFiles, flat_bytes, header_of

MANIFEST = "manifest.json"
KEPT_VERSIONS = 2
"""A server may still read the version before the newest."""


@dataclass(frozen=True)
class Manifest:
    """The newest complete version.

    files: {path below the folder: bytes}.
    fingerprint: of all weights; see `weights.fingerprint.fingerprint`.
    """

    version: int
    files: dict[str, int]
    bytes: int
    fingerprint: int


class FolderWriter:
    """Writes one version. Nothing is visible to readers before `finish`."""

    def __init__(self, folder: Path, version: int, fingerprint: int) -> None:
        self.folder = folder
        self.version = version
        self.fingerprint = fingerprint
        self._own = folder / f"version_{version}"
        shutil.rmtree(self._own, ignore_errors=True)
        self._own.mkdir(parents=True)
        self._files: dict[str, int] = {}

    def add(self, bucket: Bucket) -> None:
        """Write a bucket."""
        path = self._own / f"bucket-{len(self._files):05d}.safetensors"
        header, size = header_of(bucket)
        try:
            with path.open("wb") as file:
                file.write(header)
                for _, tensor in bucket:
                    file.write(flat_bytes(tensor.cpu()).numpy().data)
        except OSError as error:
            raise OSError(
                f"{path}: {error.strerror}. {KEPT_VERSIONS + 1} versions of the weights must fit "
                "there (actor_rollout_ref.rollout.weight_transport=files)"
            ) from error
        self._files[str(path.relative_to(self.folder))] = len(header) + size

    def finish(self) -> None:
        """Make the version visible, and remove all but this one and the one before."""
        size = sum(self._files.values())
        manifest = Manifest(self.version, self._files, size, self.fingerprint)
        replace_file(self.folder / MANIFEST, json.dumps(asdict(manifest)))
        kept = {f"version_{self.version - age}" for age in range(KEPT_VERSIONS)}
        for old in self.folder.glob("version_*"):
            if old.name not in kept:
                shutil.rmtree(old, ignore_errors=True)

    def abort(self, reason: str) -> None:
        """Remove what was written."""
        shutil.rmtree(self._own, ignore_errors=True)


def read_folder(folder: Path, version: int, fingerprint: int, wait_s: float = 60.0) -> BucketFiles:
    """Return the weights of a version.

    Args:
        fingerprint: of the weights. An earlier run may have left the same version number there.
        wait_s: how long to wait for the manifest: a network file system may show it late.

    Raises:
        TransportError: the version is not there, or a file is missing or has another size.
    """
    deadline = time.monotonic() + wait_s
    while True:
        problem = _problem(folder, version, fingerprint)
        if problem is None:
            manifest = read_manifest(folder)
            return BucketFiles(tuple(str(folder / name) for name in manifest.files))
        if time.monotonic() > deadline:
            raise TransportError(
                f"the weights of version {version} cannot be read from {folder}: {problem}. "
                "trainer.default_local_dir must be a folder that all nodes share"
            )
        time.sleep(0.2)


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of a folder."""
    return Manifest(**json.loads((folder / MANIFEST).read_text(encoding="utf-8")))


def _problem(folder: Path, version: int, fingerprint: int) -> str | None:
    try:
        manifest = read_manifest(folder)
        if manifest.version != version:
            return f"{MANIFEST} has version {manifest.version}"
        if manifest.fingerprint != fingerprint:
            return f"{MANIFEST} has version {version} of other weights"
        for name, size in manifest.files.items():
            if (folder / name).stat().st_size != size:
                return f"{name} has not {size} bytes"
    except (OSError, ValueError, TypeError) as error:
        return str(error)
    return None
