# SPDX-License-Identifier: Apache-2.0
"""The node's configuration file: what is read, what is refused, and what a card ends up with."""

from __future__ import annotations

import json
from fractions import Fraction

import pytest

from aliquot.api.errors import SettingsError
from aliquot.dra.config import CardSettings, NodeConfig, Wish, decode_config

GA = "GPU-aaaaaaaa-0000-4000-8000-00000000000a"


def read(document: object) -> NodeConfig:
    return decode_config(json.dumps(document).encode(), where="/etc/a.json")


def test_without_a_file_a_card_gets_the_defaults():
    assert NodeConfig().card(GA, "x") == CardSettings()
    assert decode_config(b"  \n", where="f").card(GA, "x") == CardSettings()


def test_json_and_yaml_say_the_same():
    yaml = (
        b"defaults:\n  mode: slots\n  slots: [50, 25]\n  reserve: 1Gi\ncards:\n  - uuid: "
        + GA.encode()
        + b"\n    mode: exclusive\n"
    )
    as_json = read(
        {
            "defaults": {"mode": "slots", "slots": [50, 25], "reserve": "1Gi"},
            "cards": [{"uuid": GA, "mode": "exclusive"}],
        }
    )
    assert decode_config(yaml, where="f") == as_json


def test_later_entries_win_field_by_field():
    config = read(
        {
            "defaults": {"maxShares": 3, "defaultCores": 20, "contextOverhead": "300Mi", "memory": 1 << 30},
            "cards": [
                {"product": "NVIDIA A100*", "slots": 2, "defaultMemory": "8Gi"},
                {"uuid": GA.upper(), "maxShares": 7},
            ],
        }
    )
    card = config.card(GA, "NVIDIA A100-SXM4-80GB")
    assert card.slots == (Fraction(1, 2), Fraction(1, 2))
    assert (card.max_shares, card.default_cores) == (7, 20)
    assert (card.default_memory_bytes, card.context_overhead_bytes, card.memory_bytes) == (8 << 30, 300 << 20, 1 << 30)
    assert card.wish is Wish.AUTO
    assert config.card("GPU-b", "Tesla T4").max_shares == 3
    assert (
        config.unmatched([("GPU-b", "Tesla T4")])
        == ["GPU-AAAAAAAA-0000-4000-8000-00000000000A".replace("GPU", "GPU"), "NVIDIA A100*"][::-1]
    )


@pytest.mark.parametrize(
    ("document", "says"),
    [
        ({"default": {}}, "unknown field `default`"),
        ({"defaults": {"maxShare": 3}}, "unknown field `maxShare`"),
        ({"defaults": {"mode": "share"}}, "$.defaults.mode"),
        ({"defaults": {"slots": 65}}, "defaults.slots is 65; give 1 to 64"),
        ({"defaults": {"slots": [60, 60]}}, "add up to 120 percent"),
        ({"defaults": {"slots": []}}, "lists 0 parts"),
        ({"defaults": {"slots": [0]}}, "give 1 to 100"),
        ({"defaults": {"maxShares": 0}}, "maxShares is 0; give 1 to 1000"),
        ({"defaults": {"defaultCores": 101}}, "defaultCores is 101; give 0 to 100"),
        ({"defaults": {"defaultMemory": "1k"}}, "less than 1Mi"),
        ({"defaults": {"reserve": "12Q"}}, "reserve is '12Q'"),
        ({"cards": [{"mode": "slots"}]}, "cards[0] names no card"),
        ([], "Expected `object`"),
    ],
)
def test_what_is_wrong_is_named(document, says):
    with pytest.raises(SettingsError) as caught:
        read(document)
    assert says in str(caught.value)
    assert "/etc/a.json" in str(caught.value)


def test_neither_json_nor_yaml_is_one_sentence():
    with pytest.raises(SettingsError, match="neither JSON nor YAML"):
        decode_config(b"{a: [", where="f")
