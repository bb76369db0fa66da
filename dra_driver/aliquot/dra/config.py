# SPDX-License-Identifier: Apache-2.0
"""The node's configuration file: how each card is offered. Pure: bytes in, frozen values out.

Never reads a file and never looks at a card's state. Invariant: whatever `CardSettings` exists is complete and
within its limits, so that neither slices nor prepare ask again; a misspelt field is an error that names it, for
a card offered in another way than the file says is worse than a driver that does not start.

    defaults:                       # every card
      mode: auto                    # auto | shared | slots | exclusive
      slots: 4                      # equal parts, or a list of percentages: [50, 25, 25]
      maxShares: 10                 # holders of one shared card
      defaultMemory: 8Gi            # of a share that asks for none; without it: the whole card
      defaultCores: 0               # percent of compute of a share that asks for none; 0 = no limit
      reserve: 512Mi                # never handed out in shares
      contextOverhead: 300Mi        # of one process; without it the hook measures
      memory: 120Gi                 # of a card that does not tell (unified memory)
    cards:                          # in order, later entries win field by field
      - product: "NVIDIA A100*"     # a shell pattern …
        slots: [50, 50]
      - uuid: GPU-0a1b2c3d-…        # … or one card
        mode: exclusive
"""

from __future__ import annotations

import enum
import fnmatch
import json
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from typing import Annotated, Any, Final, Literal

import msgspec

from aliquot.api import quantity
from aliquot.api.errors import RequestError, SettingsError, foreign
from aliquot.api.grant import MAX_MEMORY_BYTES, MIB

DEFAULT_SLOTS: Final = 4
DEFAULT_MAX_SHARES: Final = 10
MAX_SLOTS: Final = 64
MAX_SHARES_LIMIT: Final = 1000


class Wish(enum.Enum):
    """What the operator asked for; `modes.py` decides what a card gets."""

    AUTO = "auto"
    SHARED = "shared"
    SLOTS = "slots"
    EXCLUSIVE = "exclusive"


@dataclass(frozen=True, slots=True, kw_only=True)
class CardSettings:
    """How one card is to be offered, complete."""

    wish: Wish = Wish.AUTO
    slots: tuple[Fraction, ...] = (Fraction(1, DEFAULT_SLOTS),) * DEFAULT_SLOTS
    """Part of the card per slot, together at most 1."""
    max_shares: int = DEFAULT_MAX_SHARES
    default_memory_bytes: int = 0
    """Of a share that asks for no amount; 0 = the whole card."""
    default_cores: int = 0
    reserve_bytes: int = 0
    context_overhead_bytes: int = 0
    memory_bytes: int = 0
    """Total to assume where a card does not tell; 0 = none given."""


_Text = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]


class _CardFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    mode: Literal["auto", "shared", "slots", "exclusive"] | msgspec.UnsetType = msgspec.UNSET
    slots: int | list[int] | msgspec.UnsetType = msgspec.UNSET
    max_shares: int | msgspec.UnsetType = msgspec.UNSET
    default_memory: str | int | msgspec.UnsetType = msgspec.UNSET
    default_cores: int | msgspec.UnsetType = msgspec.UNSET
    reserve: str | int | msgspec.UnsetType = msgspec.UNSET
    context_overhead: str | int | msgspec.UnsetType = msgspec.UNSET
    memory: str | int | msgspec.UnsetType = msgspec.UNSET


class _CardEntry(_CardFields, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    uuid: _Text | msgspec.UnsetType = msgspec.UNSET
    product: _Text | msgspec.UnsetType = msgspec.UNSET


class _File(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    defaults: _CardFields = _CardFields()
    cards: list[_CardEntry] = []


@dataclass(frozen=True, slots=True)
class _Rule:
    uuid: str
    product: str
    changes: tuple[tuple[str, Any], ...]

    def fits(self, uuid: str, product: str) -> bool:
        if self.uuid and self.uuid.lower() != uuid.lower():
            return False
        return not self.product or fnmatch.fnmatchcase(product, self.product)


@dataclass(frozen=True, slots=True)
class NodeConfig:
    """The file, checked. `NodeConfig()` is what holds without a file."""

    rules: tuple[_Rule, ...] = ()

    def card(self, uuid: str, product: str) -> CardSettings:
        """Settings of one card: every rule that fits, in order, later ones win field by field."""
        settings = CardSettings()
        for rule in self.rules:
            if rule.fits(uuid, product):
                settings = replace(settings, **dict(rule.changes))
        return settings

    def unmatched(self, cards: list[tuple[str, str]]) -> list[str]:
        """Selectors of `cards:` that fit no (uuid, product) of the node, for a warning: probably a slip."""
        return [
            rule.uuid or rule.product
            for rule in self.rules
            if (rule.uuid or rule.product) and not any(rule.fits(uuid, product) for uuid, product in cards)
        ]


def decode_config(raw: bytes, *, where: str) -> NodeConfig:
    """The configuration in `raw` (JSON, or YAML where it is not JSON); `where` names the file in errors.

    Raises `SettingsError` that names file, field, value and limit.
    """
    document = _document(raw, where)
    try:
        file = msgspec.convert(document, _File)
    except msgspec.ValidationError as err:
        raise SettingsError(f"configuration {where}: {err}; see aliquot-dra-driver --help for the fields") from err
    rules = [_Rule("", "", _changes(file.defaults, f"configuration {where}: defaults"))]
    for position, entry in enumerate(file.cards):
        at = f"configuration {where}: cards[{position}]"
        uuid = "" if entry.uuid is msgspec.UNSET else entry.uuid
        product = "" if entry.product is msgspec.UNSET else entry.product
        if not uuid and not product:
            raise SettingsError(f"{at} names no card; add `uuid` or `product`, or move it to `defaults`")
        rules.append(_Rule(uuid, product, _changes(entry, at)))
    return NodeConfig(tuple(rules))


def _document(raw: bytes, where: str) -> Any:
    if not raw.strip():
        return {}
    try:
        return json.loads(raw)
    except ValueError:
        pass
    import yaml  # noqa: PLC0415  # only a file that is not JSON pays for the import

    try:
        return yaml.load(raw, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)) or {}  # noqa: S506  # safe loaders
    except yaml.YAMLError as err:
        raise SettingsError(f"configuration {where} is neither JSON nor YAML: {foreign(err)}") from err


def _changes(given: _CardFields, at: str) -> tuple[tuple[str, Any], ...]:
    """The fields that are set, as changes of `CardSettings`, checked against their limits."""
    changes: dict[str, Any] = {}
    if given.mode is not msgspec.UNSET:
        changes["wish"] = Wish(given.mode)
    if given.slots is not msgspec.UNSET:
        changes["slots"] = _slots(given.slots, at)
    if given.max_shares is not msgspec.UNSET:
        changes["max_shares"] = _within(given.max_shares, 1, MAX_SHARES_LIMIT, f"{at}.maxShares")
    if given.default_cores is not msgspec.UNSET:
        changes["default_cores"] = _within(given.default_cores, 0, 100, f"{at}.defaultCores")
    for name, value, target in (
        ("defaultMemory", given.default_memory, "default_memory_bytes"),
        ("reserve", given.reserve, "reserve_bytes"),
        ("contextOverhead", given.context_overhead, "context_overhead_bytes"),
        ("memory", given.memory, "memory_bytes"),
    ):
        if value is not msgspec.UNSET:
            changes[target] = _bytes(value, f"{at}.{name}")
    if 0 < changes.get("default_memory_bytes", 0) < MIB:
        raise SettingsError(f"{at}.defaultMemory is less than 1Mi, the step of shares; give 1Mi or more")
    assert changes.keys() <= {field.name for field in fields(CardSettings)}
    return tuple(sorted(changes.items()))


def _slots(slots: int | list[int], at: str) -> tuple[Fraction, ...]:
    if isinstance(slots, int):
        count = _within(slots, 1, MAX_SLOTS, f"{at}.slots")
        return (Fraction(1, count),) * count
    if not 1 <= len(slots) <= MAX_SLOTS:
        raise SettingsError(f"{at}.slots lists {len(slots)} parts; give 1 to {MAX_SLOTS}")
    for part in slots:
        _within(part, 1, 100, f"{at}.slots")
    if sum(slots) > 100:
        raise SettingsError(f"{at}.slots add up to {sum(slots)} percent; the parts of one card are at most 100")
    return tuple(Fraction(part, 100) for part in slots)


def _within(value: int, low: int, high: int, at: str) -> int:
    if not low <= value <= high:
        raise SettingsError(f"{at} is {value}; give {low} to {high}")
    return value


def _bytes(value: str | int, at: str) -> int:
    try:
        amount = quantity.parse(str(value))
    except RequestError as err:
        raise SettingsError(f"{at} is {value!r}: {err}") from err
    return _within(amount, 0, MAX_MEMORY_BYTES, at)
