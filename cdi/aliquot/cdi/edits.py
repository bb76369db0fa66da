# SPDX-License-Identifier: Apache-2.0
"""What a grant changes in a container. The only code that decides environment, mounts and device nodes.

Pure. Both doors call it. Invariants, because a container may hold several grants and the runtime merges their
edits by path and by variable name, the last one winning (design.md 5): nothing of *one* grant sits on a path or
in a variable that another grant also uses, and what they share is the same for all of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from aliquot.api.grant import Grant
from aliquot.cdi.driver_files import DriverFiles
from aliquot.cdi.model import ContainerEdits, Spec

Limiter = Literal["hook", "none"]


def edits_for(grant: Grant, files: DriverFiles, *, limiter: Limiter = "hook") -> ContainerEdits:
    """Everything that a container needs to use `grant`.

    `limiter="none"` leaves the hook and its preload file out; that is allowed only for a grant without any limit.
    Grant file and usage folder are mounted all the same, so that such a grant can stand beside a limited one.
    Raises `RequestError` for a limited grant with limiter "none", `HardwareError` for a card without nodes,
    `SettingsError` when the operator's extra edits claim a path or variable of ours.
    """
    raise NotImplementedError


def spec_for(grants: Iterable[tuple[Grant, Limiter]], files: DriverFiles) -> Spec:
    """The spec of one claim: one device per grant, in order, kind `gpu.aliquot.dev/claim`, lowest version.

    Raises what `edits_for` raises, and `InternalError` for two grants of one name.
    """
    raise NotImplementedError


def merge(*parts: ContainerEdits) -> ContainerEdits:
    """All edits one after the other; an edit that is there already is not repeated.

    Raises `SettingsError` when two parts want different things of one path or variable.
    """
    raise NotImplementedError
