# SPDX-License-Identifier: Apache-2.0
"""Our spec files in the directory that the container runtime reads."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from aliquot.api.names import CDI_CLASS, CDI_VENDOR
from aliquot.cdi.model import Spec


class SpecStore:
    """One CDI directory, and in it the files of one vendor and class, one per claim."""

    def __init__(self, directory: Path, *, vendor: str = CDI_VENDOR, class_: str = CDI_CLASS) -> None:
        self.directory = directory
        self.vendor = vendor
        self.class_ = class_

    def prepare(self) -> None:
        """Create the directory (0755) and prove that we may write there.

        Raises `SettingsError` naming the directory and what is wrong with it.
        """
        raise NotImplementedError

    def write(self, spec: Spec, transient_id: str) -> Path:
        """Put `spec` in place of the claim's file, whole or not at all, durable, readable by everyone.

        Raises `InternalError` for a spec that our strict rules refuse, `ConflictError` when another file claims
        one of its device names, `HardwareError` when the disk refuses (full, read-only).
        """
        raise NotImplementedError

    def remove(self, transient_id: str) -> bool:
        """Remove the claim's file; True when there was one. Its absence is no error."""
        raise NotImplementedError

    def list_own(self) -> tuple[str, ...]:
        """Transient ids (claim UIDs) of our files, sorted."""
        raise NotImplementedError

    def sweep(self, live: Collection[str]) -> tuple[str, ...]:
        """Remove our files whose id is not in `live`, and what dead writers left; returns the ids removed.

        Never touches a file of another vendor or class, nor one of ours that is not a claim's.
        """
        raise NotImplementedError
