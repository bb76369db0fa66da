# SPDX-License-Identifier: Apache-2.0
"""Images made without an engine: archives that are what they say, the same bytes for the same content."""

from __future__ import annotations

import hashlib
import json
import os
import tarfile

import pytest

from aliquot.e2e.images.archive import pack_layer, reference, write_archive


@pytest.fixture
def tree(tmp_path):
    root = tmp_path / "tree"
    (root / "bin").mkdir(parents=True)
    (root / "bin" / "program").write_bytes(b"\x7fELF")
    (root / "bin" / "program").chmod(0o755)
    (root / "bin" / "other").symlink_to("program")
    (root / "tmp").mkdir()
    (root / "tmp").chmod(0o1777)
    return root


def test_same_content_gives_the_same_digest(tree, tmp_path):
    first = pack_layer(tree, tmp_path / "one")
    os.utime(tree / "bin" / "program", (1, 1))
    assert pack_layer(tree, tmp_path / "two").digest == first.digest
    (tree / "bin" / "program").write_bytes(b"\x7fELF2")
    assert pack_layer(tree, tmp_path / "three").digest != first.digest


def test_layer_keeps_modes_and_links_and_forgets_owners(tree, tmp_path):
    layer = pack_layer(tree, tmp_path / "layer")
    with tarfile.open(layer.path) as tar:
        members = {m.name: m for m in tar}
    assert members["bin/program"].mode == 0o755
    assert members["tmp"].mode == 0o1777
    assert members["bin/other"].linkname == "program"
    assert {(m.uid, m.gid, m.uname, m.mtime) for m in members.values()} == {(0, 0, "", 0)}


def test_archive_is_consistent_from_index_to_layers(tree, tmp_path):
    layer = pack_layer(tree, tmp_path / "layer")
    write_archive(tmp_path / "image.tar", "some:tag", [layer], {"Cmd": ["/bin/program"]})
    with tarfile.open(tmp_path / "image.tar") as tar:
        content = {m.name: tar.extractfile(m).read() for m in tar}
    for name, data in content.items():
        if name.startswith("blobs/"):
            assert hashlib.sha256(data).hexdigest() == name.rpartition("/")[2]

    def blob(descriptor):
        data = content["blobs/sha256/" + descriptor["digest"].removeprefix("sha256:")]
        assert len(data) == descriptor["size"]
        return data

    (entry,) = json.loads(content["index.json"])["manifests"]
    assert entry["annotations"]["io.containerd.image.name"] == "docker.io/library/some:tag"
    manifest = json.loads(blob(entry))
    config = json.loads(blob(manifest["config"]))
    assert config["config"] == {"Cmd": ["/bin/program"]}
    assert config["rootfs"]["diff_ids"] == [f"sha256:{layer.digest}"]
    assert blob(manifest["layers"][0]) == layer.path.read_bytes()


@pytest.mark.parametrize(
    ("short", "full"),
    [("a:1", "docker.io/library/a:1"), ("b/a:1", "docker.io/b/a:1"), ("host.example/b/a:1", "host.example/b/a:1")],
)
def test_short_names_become_what_a_runtime_makes_of_them(short, full):
    assert reference(short) == full
