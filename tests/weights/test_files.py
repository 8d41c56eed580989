"""The transport `files`: versions in a shared folder."""

import json
from pathlib import Path

import pytest

from tests.weights.test_buckets import NAMED, assert_equal
from verlite.weights import TransportError
from verlite.weights.files import MANIFEST, FolderWriter, read_folder, read_manifest
from verlite.weights.transport import publish


def write(folder, version, named=NAMED):
    publish(named, [FolderWriter(folder, version, 0xABC)], 2000)


def test_a_version_is_read_as_it_was_written(tmp_path):
    write(tmp_path, 3)
    assert_equal(read_folder(tmp_path, 3, 0xABC, wait_s=0))
    manifest = read_manifest(tmp_path)
    assert (manifest.version, manifest.fingerprint) == (3, 0xABC)
    assert manifest.bytes == sum((tmp_path / name).stat().st_size for name in manifest.files)
    assert len(manifest.files) > 2


def test_a_half_written_version_leaves_the_one_before(tmp_path):
    write(tmp_path, 3)

    def broken():
        yield from NAMED[:3]
        raise OSError("the disk is full")

    with pytest.raises(OSError):
        write(tmp_path, 4, broken())
    assert_equal(read_folder(tmp_path, 3, 0xABC, wait_s=0))
    assert not (tmp_path / "version_4").exists()
    with pytest.raises(TransportError, match="has version 3"):
        read_folder(tmp_path, 4, 0xABC, wait_s=0)
    write(tmp_path, 4)
    assert_equal(read_folder(tmp_path, 4, 0xABC, wait_s=0))


def test_two_versions_are_kept(tmp_path):
    for version in (1, 2, 3, 8, 9, 3, 4):  # resumed after 9, from a checkpoint before
        write(tmp_path, version)
    assert sorted(path.name for path in tmp_path.glob("version_*")) == ["version_3", "version_4"]


def test_other_weights_of_the_same_version_are_refused(tmp_path):
    """A folder that is not shared may have the files of an earlier run."""
    write(tmp_path, 1)
    with pytest.raises(TransportError, match="version 1 of other weights"):
        read_folder(tmp_path, 1, 0xDEF, wait_s=0)


def test_a_full_disk_is_named(tmp_path):
    writer = FolderWriter(tmp_path, 1, 0)
    writer._own = Path("/dev/full/x")
    with pytest.raises(OSError, match="/dev/full/x/bucket-00000.safetensors: .*versions"):
        writer.add(NAMED)


@pytest.mark.parametrize("damage", ["gone", "short", "text", "absent"])
def test_damage_is_reported(tmp_path, damage):
    write(tmp_path, 1)
    first = tmp_path / next(iter(read_manifest(tmp_path).files))
    if damage == "gone":
        first.unlink()
    if damage == "short":
        first.write_bytes(first.read_bytes()[:-1])
    if damage == "text":
        (tmp_path / MANIFEST).write_text("{")
    if damage == "absent":
        (tmp_path / MANIFEST).write_text(json.dumps({"version": 1}))
    with pytest.raises(TransportError, match="version 1 cannot be read"):
        read_folder(tmp_path, 1, 0xABC, wait_s=0)
