# SPDX-License-Identifier: Apache-2.0
"""Which CDI version a spec needs, and which it may need at most.

Pure. A runtime refuses a whole file when the declared version is lower than the content needs, and when it is
higher than it knows; so the version is always computed, never written down (cases.md B120). Invariant: what
`required` returns is the lowest version that upstream accepts for that content.

Never give `required` a higher default cap without looking at the support table (cdi.md 1.9): 0.5.0 is what every
runtime since containerd 1.7.0, CRI-O 1.25, podman 4.3 and docker 25 reads.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

import msgspec

from aliquot.api.errors import SettingsError
from aliquot.cdi.model import ContainerEdits, Spec

KNOWN: Final = ("0.3.0", "0.4.0", "0.5.0", "0.6.0", "0.7.0", "0.8.0", "1.0.0", "1.1.0")
"""Every version that upstream accepts, oldest first; patch releases of its library are no versions of the spec."""
EARLIEST: Final = KNOWN[0]
DEFAULT_CAP: Final = "0.5.0"


class Reason(NamedTuple):
    """One thing in a spec that an older version does not have."""

    version: str
    where: str
    """Path of the field, for instance `devices[0].containerEdits.mounts[1].type`."""


def order(version: str) -> int:
    """Position of `version` among the known ones, for comparing. Raises `SettingsError` for an unknown one."""
    try:
        return KNOWN.index(version.removeprefix("v"))
    except ValueError:
        raise SettingsError(f"CDI version {version!r} is none of {', '.join(KNOWN)}") from None


def reasons(spec: Spec) -> tuple[Reason, ...]:
    """Everything in `spec` that needs more than 0.3.0, in the order of the file (cdi.md 1.2)."""
    return tuple(_reasons(spec))


def required(spec: Spec, *, cap: str | None = DEFAULT_CAP) -> str:
    """The lowest version that has everything in `spec`.

    Raises `SettingsError` naming the first field that needs more than `cap`; None = no cap.
    """
    lowest = EARLIEST
    for version, where in _reasons(spec):
        if cap is not None and order(version) > order(cap):
            raise SettingsError(
                f"{where} needs CDI {version}, but specs are held to {cap} so that the runtimes in use read them; "
                "leave the field out, or raise the cap if all your runtimes know that version"
            )
        if order(version) > order(lowest):
            lowest = version
    return lowest


def with_lowest_version(spec: Spec, *, cap: str | None = DEFAULT_CAP) -> Spec:
    """`spec` with the version it needs in place of the one it declares. Raises as `required`."""
    return msgspec.structs.replace(spec, cdi_version=required(spec, cap=cap))


def version_problem(spec: Spec) -> str:
    """Why upstream refuses the version that `spec` declares; "" when it does not."""
    declared = spec.cdi_version.removeprefix("v")
    if declared not in KNOWN:
        return f"cdiVersion {spec.cdi_version!r} is none of {', '.join(KNOWN)}"
    for version, where in _reasons(spec):
        if order(version) > order(declared):
            return f"cdiVersion {spec.cdi_version!r} is too low: {where} needs {version}"
    return ""


def _reasons(spec: Spec) -> Iterator[Reason]:
    if "." in spec.kind.partition("/")[2]:
        yield Reason("0.6.0", "kind (a dot in the class)")
    if spec.annotations:
        yield Reason("0.6.0", "annotations")
    for index, device in enumerate(spec.devices):
        at = f"devices[{index}]"
        if "0" <= device.name[:1] <= "9":
            yield Reason("0.5.0", f"{at}.name (begins with a digit)")
        if device.annotations:
            yield Reason("0.6.0", f"{at}.annotations")
        yield from _edit_reasons(device.container_edits, f"{at}.containerEdits")
    yield from _edit_reasons(spec.container_edits, "containerEdits")


def _edit_reasons(edits: ContainerEdits, at: str) -> Iterator[Reason]:
    for index, node in enumerate(edits.device_nodes):
        if node.host_path:
            yield Reason("0.5.0", f"{at}.deviceNodes[{index}].hostPath")
    for index, mount in enumerate(edits.mounts):
        if mount.type:
            yield Reason("0.4.0", f"{at}.mounts[{index}].type")
    if edits.intel_rdt is not None:
        # Even an empty object counts: readers see that the key is there.
        yield Reason("0.7.0", f"{at}.intelRdt")
        if edits.intel_rdt.schemata is not None:
            yield Reason("1.1.0", f"{at}.intelRdt.schemata")
        if edits.intel_rdt.enable_monitoring:
            yield Reason("1.1.0", f"{at}.intelRdt.enableMonitoring")
    if edits.additional_gids:
        yield Reason("0.7.0", f"{at}.additionalGids")
    if edits.net_devices:
        yield Reason("1.1.0", f"{at}.netDevices")
