# SPDX-License-Identifier: Apache-2.0
"""OCI image archives out of folders: what `ctr images import` and `kind load image-archive` read.

Knows nothing of what is in the folders. Invariant: the same folder gives the same bytes, so an image's digest says
whether anything changed.
"""

from __future__ import annotations

import hashlib
import io
import json
import platform
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

_LAYER: Final = "application/vnd.oci.image.layer.v1.tar"
_CONFIG: Final = "application/vnd.oci.image.config.v1+json"
_MANIFEST: Final = "application/vnd.oci.image.manifest.v1+json"
_INDEX: Final = "application/vnd.oci.image.index.v1+json"
_GO_NAMES: Final = {"x86_64": "amd64", "aarch64": "arm64"}
_EPOCH: Final = 0


@dataclass(frozen=True)
class Layer:
    """An uncompressed layer as a file; unpacking nothing saves more time here than the bytes cost."""

    path: Path
    digest: str
    """SHA-256 as hexadecimal digits."""
    size: int


def pack_layer(folder: Path, target: Path) -> Layer:
    """Writes the tree below `folder` as a layer: everything owned by root, no times, sorted."""
    half = target.with_name(f".{target.name}.half")
    with tarfile.open(half, "w", format=tarfile.PAX_FORMAT) as tar:
        for path in sorted(folder.rglob("*")):
            info = tar.gettarinfo(path, arcname=str(path.relative_to(folder)))
            if info is None or info.ischr() or info.isblk() or info.isfifo():
                continue
            info.uid = info.gid = 0
            info.uname = info.gname = ""
            info.mtime = _EPOCH
            if info.isreg():
                with path.open("rb") as content:
                    tar.addfile(info, content)
            else:
                tar.addfile(info)
    half.replace(target)
    return read_layer(target)


def read_layer(path: Path) -> Layer:
    """A layer packed earlier."""
    with path.open("rb") as content:
        digest = hashlib.file_digest(content, "sha256").hexdigest()
    return Layer(path, digest, path.stat().st_size)


def write_archive(target: Path, name: str, layers: Sequence[Layer], config: Mapping[str, Any]) -> None:
    """An archive with one image called `name` (`aliquot:dev`); `config` has `Entrypoint`, `Env`, `User` and so on."""
    image = {
        "architecture": _GO_NAMES.get(platform.machine(), platform.machine()),
        "os": "linux",
        "config": dict(config),
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{layer.digest}" for layer in layers]},
        "history": [{"created_by": "aliquot"} for _ in layers],
    }
    config_blob = _Blob.of(image)
    manifest = _Blob.of(
        {
            "schemaVersion": 2,
            "mediaType": _MANIFEST,
            "config": {"mediaType": _CONFIG, **config_blob.descriptor},
            "layers": [
                {"mediaType": _LAYER, "digest": f"sha256:{layer.digest}", "size": layer.size} for layer in layers
            ],
        }
    )
    full_name = reference(name)
    annotations = {
        "io.containerd.image.name": full_name,
        "org.opencontainers.image.ref.name": full_name.rpartition(":")[2],
    }
    index = {
        "schemaVersion": 2,
        "mediaType": _INDEX,
        "manifests": [{"mediaType": _MANIFEST, **manifest.descriptor, "annotations": annotations}],
    }
    half = target.with_name(f".{target.name}.half")
    with tarfile.open(half, "w") as tar:
        _add(tar, "oci-layout", b'{"imageLayoutVersion":"1.0.0"}')
        _add(tar, "index.json", json.dumps(index).encode())
        for blob in (config_blob, manifest):
            _add(tar, f"blobs/sha256/{blob.digest}", blob.content)
        for digest, layer in {layer.digest: layer for layer in layers}.items():
            info = tarfile.TarInfo(f"blobs/sha256/{digest}")
            info.size, info.mode = layer.size, 0o644
            with layer.path.open("rb") as content:
                tar.addfile(info, content)
    half.replace(target)


def reference(name: str) -> str:
    """The full name that a runtime gives to a short one: `aliquot:dev` is `docker.io/library/aliquot:dev`."""
    return name if name.count("/") > 1 else f"docker.io/{name}" if "/" in name else f"docker.io/library/{name}"


@dataclass(frozen=True)
class _Blob:
    content: bytes
    digest: str

    @classmethod
    def of(cls, value: object) -> _Blob:
        content = json.dumps(value, sort_keys=True).encode()
        return cls(content, hashlib.sha256(content).hexdigest())

    @property
    def descriptor(self) -> dict[str, Any]:
        return {"digest": f"sha256:{self.digest}", "size": len(self.content)}


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size, info.mode = len(content), 0o644
    tar.addfile(info, io.BytesIO(content))
