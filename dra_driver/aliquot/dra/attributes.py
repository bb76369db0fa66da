# SPDX-License-Identifier: Apache-2.0
"""What a card says about itself, in the form that the API server accepts. Pure.

Never invents a value: what the driver does not know is left out, so that a selector finds it absent instead of
wrong. Invariant: every attribute made here passes the server's checks, because one value that does not makes the
whole slice, and so the node, vanish (dra.md 2.4, cases.md B111, B113).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from aliquot.node.inventory import Card, Inventory, MigInstance

STRING_LIMIT: Final = 64
"""Bytes of a string or version attribute (dra.md 2.3)."""
ENTRIES_LIMIT: Final = 32
"""Attributes and capacities of one device together (dra.md 2.3)."""
_STANDARD: Final = "resource.kubernetes.io"

NAME: Final = re.compile(r"(?:[a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z_][A-Za-z0-9_]{0,31}")
"""A C identifier of at most 32 characters, perhaps in a domain."""

_VERSION: Final = re.compile(r"(\d+)(?:\.(\d+))?(?:\.(\d+))?")

Attribute = Mapping[str, Any]
"""One of {"string": …}, {"int": …}, {"bool": …}, {"version": …}: the API's own shape."""


def text(value: str) -> str:
    """`value` cut to what an attribute may hold: 64 bytes of whole characters, no blanks or controls at its ends."""
    clean = "".join(c if c.isprintable() else " " for c in value).strip()
    return clean.encode()[:STRING_LIMIT].decode(errors="ignore").strip()


def version(value: str) -> str | None:
    """`value` as semantic version, or None where it begins with no number.

    NVIDIA writes `570.195.03`, which is no semantic version because of the zero: this is 570.195.3.
    """
    match = _VERSION.match(value.strip())
    if match is None:
        return None
    return ".".join(str(int(part or 0)) for part in match.groups())


def card_attributes(card: Card, inventory: Inventory) -> dict[str, Attribute]:
    """What is true of the card however it is offered (dra.md 10.2)."""
    found: dict[str, Attribute] = {"uuid": {"string": card.uuid}, "index": {"int": card.index}}
    _put(found, "productName", "string", text(card.name))
    _put(found, "brand", "string", text(card.brand or ""))
    _put(found, "architecture", "string", text(card.architecture or ""))
    if card.compute_capability is not None:
        found["cudaComputeCapability"] = {"version": "{}.{}.0".format(*card.compute_capability)}
    _put(found, "driverVersion", "version", version(inventory.driver_version or ""))
    if inventory.cuda_version is not None:
        found["cudaDriverVersion"] = {"version": "{}.{}.0".format(*inventory.cuda_version)}
    _put(found, "minor", "int", card.minor)
    _put(found, "memoryMiB", "int", None if card.memory_bytes is None else card.memory_bytes >> 20)
    _put(found, "multiprocessors", "int", card.multiprocessors)
    _put(found, "migCapable", "bool", card.mig_capable)
    _put(found, "eccEnabled", "bool", card.ecc)
    _put(found, f"{_STANDARD}/pciBusID", "string", text(card.bus_id))
    _put(found, f"{_STANDARD}/pcieRoot", "string", text(card.pci_root or ""))
    _put(found, f"{_STANDARD}/numaNode", "int", card.numa_node)
    return found


def mig_attributes(card: Card, instance: MigInstance, inventory: Inventory) -> dict[str, Attribute]:
    """What is true of a MIG instance: its card's attributes with its own identity and size."""
    found = card_attributes(card, inventory)
    found["uuid"] = {"string": instance.uuid}
    found["parentUUID"] = {"string": card.uuid}
    for own in ("memoryMiB", "multiprocessors"):
        found.pop(own, None)
    _put(found, "profile", "string", text(instance.profile))
    _put(found, "memoryMiB", "int", None if instance.memory_bytes is None else instance.memory_bytes >> 20)
    _put(found, "multiprocessors", "int", instance.multiprocessors)
    return found


def _put(found: dict[str, Attribute], name: str, kind: str, value: object) -> None:
    """Set an attribute unless its value is unknown (None) or empty."""
    if value is not None and value != "":
        found[name] = {kind: value}
