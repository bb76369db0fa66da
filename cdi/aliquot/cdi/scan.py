# SPDX-License-Identifier: Apache-2.0
"""What a container runtime sees in its CDI directories: which devices there are, and which files it refuses.

Reads everything afresh on each call and keeps nothing; used by checks, tests and `explain`, not on the way of a
pod. Invariant: a name that `Scan.devices` has is one that a runtime with these directories resolves, to the same
file. Rules in cdi.md 1.5; one of them is a defect of upstream that is repeated here on purpose: two files of equal
rank that claim one device take it away even from a third file of higher rank.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec

from aliquot.api.errors import SettingsError
from aliquot.cdi.load import SPEC_SUFFIXES, load_spec
from aliquot.cdi.model import Device, Spec


class Found(NamedTuple):
    """A device and where it is from."""

    path: Path
    spec: Spec
    device: Device


class Scan(msgspec.Struct, frozen=True, kw_only=True):
    """One look at the directories."""

    directories: tuple[Path, ...]
    """Lowest rank first."""
    devices: Mapping[str, Found]
    """By qualified name."""
    errors: Mapping[Path, tuple[str, ...]]
    """What is wrong, by file, or by directory when that itself cannot be read."""


def scan(directories: Iterable[Path]) -> Scan:
    """Read every spec file of `directories`; a later directory ranks higher.

    Never raises for what it finds: a file or directory that cannot be read is an entry in `errors`.
    """
    order = tuple(directories)
    errors: dict[Path, list[str]] = {}
    devices: dict[str, Found] = {}
    conflicting: set[str] = set()
    for directory in order:
        here: dict[str, Found] = {}
        for path in _spec_files(directory, errors):
            try:
                spec = load_spec(path)
            except SettingsError as error:
                errors.setdefault(path, []).append(str(error))
                continue
            for name, device in zip(spec.qualified_names(), spec.devices, strict=True):
                if name in here:
                    conflicting.add(name)
                    for holder, other in ((path, here[name].path), (here[name].path, path)):
                        errors.setdefault(holder, []).append(f"{name} is also defined by {other}, so neither counts")
                here[name] = Found(path, spec, device)
        devices.update(here)
    return Scan(
        directories=order,
        devices={name: found for name, found in devices.items() if name not in conflicting},
        errors={path: tuple(dict.fromkeys(texts)) for path, texts in errors.items()},
    )


def _spec_files(directory: Path, errors: dict[Path, list[str]]) -> list[Path]:
    try:
        with os.scandir(directory) as entries:
            return sorted(
                Path(entry.path) for entry in entries if entry.name.endswith(SPEC_SUFFIXES) and not entry.is_dir()
            )
    except FileNotFoundError:
        errors.setdefault(directory, []).append(f"{directory} does not exist")
    except OSError as error:
        errors.setdefault(directory, []).append(f"cannot read {directory}: {error.strerror}")
    return []
