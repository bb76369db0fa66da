# SPDX-License-Identifier: Apache-2.0
"""Cards to devices to slices: names, amounts, policies, order, limits, and which way a card is offered."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aliquot.api.quantity import parse
from aliquot.dra import attributes, layout
from aliquot.dra.cards import View
from aliquot.dra.config import CardSettings, Wish, decode_config
from aliquot.dra.defects import defects_of
from aliquot.dra.devices import Kind, card_names
from aliquot.dra.layout import Features, Kept, Mode, choose_layout
from aliquot.dra.metrics import Metrics
from aliquot.dra.offering import Offering
from aliquot.dra.prepare import Book, ClaimRef, plan_prepare
from aliquot.dra.slices import pool_for
from aliquot.node.inventory import MigInstance

MIB = 1 << 20


def published(offered, **kwargs):
    pool = pool_for(offered, node_name="n1", pool="n1/gpu", **kwargs)
    assert pool.left_out == ()
    return [device for part in pool.devices for device in part]


def test_a_shared_card_has_all_three_capacities_with_policies(make):
    (device,) = published(make.offer(make.card()))
    assert device["name"] == "gpu-aaaaaaaa-shared"
    assert device["allowMultipleAllocations"] is True
    assert device["capacity"] == {
        "memory": {
            "value": "24Gi",
            "requestPolicy": {"default": "24Gi", "validRange": {"min": "1Mi", "step": "1Mi", "max": "24Gi"}},
        },
        "cores": {
            "value": "100",
            "requestPolicy": {"default": "0", "validRange": {"min": "0", "step": "1", "max": "100"}},
        },
        "slots": {
            "value": "10",
            "requestPolicy": {"default": "1", "validRange": {"min": "1", "step": "1", "max": "10"}},
        },
    }
    assert device["attributes"]["type"] == {"string": "gpu-shared"}
    assert device["attributes"]["mode"] == {"string": "shared"}
    assert device["attributes"]["modeReason"] == {"string": layout.SHARED_KEPT}
    assert device["attributes"]["driverVersion"] == {"version": "570.195.3"}
    assert device["attributes"]["cudaDriverVersion"] == {"version": "12.8.0"}
    assert device["attributes"]["resource.kubernetes.io/pciBusID"] == {"string": "0000:01:00.0"}


def test_without_consumable_capacity_a_card_is_four_slots(make):
    devices = published(make.offer(make.card(), features=make.no_shares))
    assert [d["name"] for d in devices] == [f"gpu-aaaaaaaa-s{k}" for k in range(4)]
    assert [d["capacity"] for d in devices] == [{"memory": {"value": "6Gi"}, "cores": {"value": "25"}}] * 4
    assert all("allowMultipleAllocations" not in d for d in devices)
    assert devices[1]["attributes"]["profile"] == {"string": "1of4"}
    assert devices[1]["attributes"]["parentUUID"] == {"string": make.uuids[0]}


def test_unequal_slots_are_listed_small_first_over_all_cards(make):
    config = decode_config(b'{"defaults": {"mode": "slots", "slots": [50, 25, 25]}}', where="f")
    offered = make.offer(make.card(0), make.card(1), config=config)
    assert [d.name[-12:] for d in offered.devices] == [
        "-aaaaaaaa-s1", "-aaaaaaaa-s2", "-bbbbbbbb-s1", "-bbbbbbbb-s2", "-aaaaaaaa-s0", "-bbbbbbbb-s0",
    ]  # fmt: skip
    assert offered.by_name["gpu-aaaaaaaa-s0"].attributes["profile"] == {"string": "50percent"}


def test_three_slots_are_thirds_not_thirty_three_percent(make):
    config = decode_config(b'{"defaults": {"mode": "slots", "slots": 3}}', where="f")
    offered = make.offer(make.card(memory_bytes=24 << 30), config=config)
    assert [d.memory_bytes for d in offered.devices] == [8 << 30] * 3
    assert [d.cores for d in offered.devices] == [33] * 3


@pytest.mark.parametrize(
    ("card", "settings", "features", "mode", "reason"),
    [
        ({}, {}, Kept.YES, Mode.SHARED, layout.SHARED_KEPT),
        ({}, {}, Kept.DROPPED, Mode.SLOTS, layout.SHARED_DROPPED),
        ({}, {}, Kept.REFUSED, Mode.SLOTS, layout.SHARED_REFUSED),
        ({}, {"wish": Wish.SHARED}, Kept.YES, Mode.SHARED, layout.CONFIGURED),
        ({}, {"wish": Wish.SHARED}, Kept.DROPPED, Mode.SLOTS, layout.CONFIGURED_BUT_DROPPED),
        ({}, {"wish": Wish.SLOTS}, Kept.YES, Mode.SLOTS, layout.CONFIGURED),
        ({}, {"wish": Wish.EXCLUSIVE}, Kept.YES, Mode.EXCLUSIVE, layout.CONFIGURED),
        ({"memory_bytes": None}, {}, Kept.YES, Mode.EXCLUSIVE, layout.MEMORY_UNKNOWN),
        ({"memory_bytes": None}, {"memory_bytes": 1 << 34}, Kept.YES, Mode.SHARED, layout.SHARED_KEPT),
        ({"memory_bytes": MIB}, {}, Kept.YES, Mode.EXCLUSIVE, layout.TOO_SMALL),
        ({"mig_enabled": True}, {}, Kept.YES, Mode.MIG, layout.MIG_ENABLED),
    ],
)  # fmt: skip
def test_mode_and_reason(make, card, settings, features, mode, reason):
    choice = choose_layout(make.card(**card), CardSettings(**settings), Features(consumable_capacity=features))
    assert (choice.layout.mode, choice.reason) == (mode, reason)
    assert len(reason.encode()) <= 64


def test_a_card_whose_memory_is_unknown_is_given_whole_and_publishes_no_memory(make):
    (device,) = published(make.offer(make.card(memory_bytes=None)))
    assert device["name"] == "gpu-aaaaaaaa"
    assert device["capacity"] == {"cores": {"value": "100"}}
    assert "memoryMiB" not in device["attributes"]


def test_a_held_card_keeps_its_layout_to_the_byte(make):
    before = choose_layout(make.card(), CardSettings(), make.shares).layout
    for features, settings in ((make.no_shares, CardSettings()), (make.shares, CardSettings(reserve_bytes=1 << 30))):
        choice = choose_layout(make.card(), settings, features, before)
        assert (choice.layout, choice.reason) == (before, layout.HELD)
    assert choose_layout(make.card(), CardSettings(), make.shares, before).reason == layout.SHARED_KEPT


def test_one_share_only_needs_no_range_without_a_step(make):
    config = decode_config(b'{"defaults": {"maxShares": 1}}', where="f")
    (device,) = published(make.offer(make.card(), config=config))
    assert device["capacity"]["slots"] == {"value": "1", "requestPolicy": {"default": "1", "validValues": ["1"]}}


@given(
    total=st.integers(2 * MIB, 1 << 41),
    reserve=st.integers(0, 1 << 34),
    default=st.integers(MIB, 1 << 41),
    shares=st.integers(1, 1000),
)
def test_policies_always_pass_the_servers_arithmetic(make, total, reserve, default, shares):
    """dra.md 2.4: min ≤ value, min ≤ default ≤ max ≤ value, min + step ≤ value, differences are multiples of step."""
    settings = CardSettings(reserve_bytes=reserve, default_memory_bytes=default, max_shares=shares)
    config_offer = make.offer(make.card(memory_bytes=total), config=_Fixed(settings))
    for device in published(config_offer):
        for capacity in device["capacity"].values():
            policy = capacity.get("requestPolicy")
            if policy is None:
                assert "allowMultipleAllocations" not in device
                continue
            value, preset = parse(capacity["value"]), parse(policy["default"])
            if "validValues" in policy:
                assert preset in [parse(v) for v in policy["validValues"]]
                continue
            low, high, step = (parse(policy["validRange"][k]) for k in ("min", "max", "step"))
            assert low <= preset <= high <= value
            assert low + step <= value
            assert (preset - low) % step == 0
            assert (high - low) % step == 0


class _Fixed:
    def __init__(self, settings):
        self._settings = settings

    def card(self, _uuid, _product):
        return self._settings


@given(st.integers(8 * MIB, 1 << 41), st.integers(1, 64))
def test_slots_never_exceed_the_card(make, total, count):
    settings = CardSettings(wish=Wish.SLOTS, slots=(Fraction(1, count),) * count)
    offered = make.offer(make.card(memory_bytes=total), config=_Fixed(settings))
    assert sum(d.memory_bytes for d in offered.devices) <= total
    assert all(d.memory_bytes % MIB == 0 for d in offered.devices)
    assert sum(d.cores for d in offered.devices) <= 100


def test_device_names_come_from_the_uuid_and_survive_a_changed_index(make):
    one = make.offer(make.card(0), make.card(1))
    swapped = make.offer(make.card(1, index=0), make.card(0, index=1))
    assert {d.grant_uuid: d.name for d in one.devices} == {d.grant_uuid: d.name for d in swapped.devices}


def test_cards_whose_first_digits_agree_get_longer_names():
    twins = ["GPU-aaaaaaaa-0000-4000-8000-000000000001", "GPU-aaaaaaaa-0000-4000-8000-000000000002", "GPU-b0000000-1"]
    named = card_names(twins)
    assert len(set(named.values())) == 3
    assert named[twins[2]] == "gpu-b0000000"
    assert all(len(name) <= 63 - len("-shared") for name in named.values())


def test_same_hardware_gives_the_same_bytes(make):
    cards = [make.card(n) for n in range(3)]
    assert published(make.offer(*cards)) == published(make.offer(*cards))
    assert list(published(make.offer(*cards))[0]["attributes"]) == sorted(
        published(make.offer(*cards))[0]["attributes"]
    )


def test_b111_long_product_name_is_cut_to_whole_characters(make):
    name = "NVIDIÄ " + "Ü" * 40 + "x "
    assert len(name.encode()) >= 80
    devices = published(make.offer(make.card(name=name), make.card(1)))
    value = devices[0]["attributes"]["productName"]["string"]
    assert len(value.encode()) <= 64
    assert value == value.strip()
    assert name.startswith(value)
    assert devices[1]["attributes"]["productName"] == {"string": "NVIDIA-Fake24G"}


@given(st.text())
def test_any_text_becomes_a_fitting_attribute(text):
    cut = attributes.text(text)
    assert len(cut.encode(errors="surrogatepass")) <= 64
    assert cut == cut.strip()


@pytest.mark.parametrize(
    ("raw", "semantic"),
    [
        ("570.195.03", "570.195.3"),
        ("570.86.15", "570.86.15"),
        ("470.256", "470.256.0"),
        ("580", "580.0.0"),
        ("580.95.05-beta", "580.95.5"),
        ("Rel", None),
        ("", None),
    ],
)
def test_versions_become_semantic(raw, semantic):
    assert attributes.version(raw) == semantic


def test_b112_more_devices_than_a_slice_holds_are_split(make):
    devices = [make.card(n) for n in range(130)]
    pool = pool_for(make.offer(*devices), node_name="n1", pool="n1/gpu")
    assert [len(part) for part in pool.devices] == [128, 2]
    assert {pool.spec(i, 4)["pool"]["resourceSliceCount"] for i in range(2)} == {2}
    assert {pool.spec(i, 4)["pool"]["generation"] for i in range(2)} == {4}

    sick = {make.card(5).uuid: "lost"}
    tainted = make.offer(*[make.card(n) for n in range(70)], sick=sick)
    pool = pool_for(tainted, node_name="n1", pool="n1/gpu", taints_kept=True)
    assert [len(part) for part in pool.devices] == [64, 6]
    assert sum("taints" in d for part in pool.devices for d in part) == 1
    pool = pool_for(tainted, node_name="n1", pool="n1/gpu", taints_kept=False)
    assert [len(part) for part in pool.devices] == [70]


def test_no_cards_are_one_slice_without_devices(make):
    assert pool_for(make.offer(), node_name="n1", pool="n1/gpu").devices == ((),)


def test_b113_a_device_with_a_bad_attribute_is_named_and_left_out(make):
    offered = make.offer(make.card(0), make.card(1))
    bad = replace(offered.devices[0], attributes={**offered.devices[0].attributes, "numa-1": {"int": 1}})
    pool = pool_for(replace(offered, devices=(bad, offered.devices[1])), node_name="n1", pool="n1/gpu")
    assert [d["name"] for part in pool.devices for d in part] == [offered.devices[1].name]
    assert pool.left_out == (f"device {bad.name}: attribute 'numa-1' is no C identifier of at most 32 characters",)
    many = replace(bad, attributes={f"a{n}": {"int": n} for n in range(40)})
    pool = pool_for(replace(offered, devices=(many,)), node_name="n1", pool="n1/gpu")
    assert "40 attributes" in pool.left_out[0] or "43 attributes" in pool.left_out[0]


def test_every_attribute_fits_into_a_device(make):
    card = make.card(mig_capable=True, ecc=True, multiprocessors=132)
    for device in published(make.offer(card)):
        assert len(device["attributes"]) + len(device["capacity"]) <= 32
        assert all(attributes.NAME.fullmatch(name) for name in device["attributes"])


def test_b114_every_card_is_published_in_every_mode(make):
    plain = make.card(0)
    mig = make.card(1, mig_capable=True, mig_enabled=True, mig=tuple(
        MigInstance(
            uuid=f"MIG-{k}", parent_uuid=make.uuids[1], profile="1g.5gb", gpu_instance=k + 7, compute_instance=0,
            memory_bytes=(5 << 30) - 7, multiprocessors=14,
        ) for k in range(2)
    ))  # fmt: skip
    for features, expected in ((make.shares, 1), (make.no_shares, 4)):
        offered = make.offer(plain, mig, features=features)
        kinds = [device.kind for device in offered.devices]
        assert kinds.count(Kind.MIG) == 2
        assert len(kinds) == expected + 2
        assert kinds[:2] == [Kind.MIG, Kind.MIG]
    first = offered.devices[0]
    assert first.name == "gpu-bbbbbbbb-mig-1g5gb-7-0"
    assert (first.grant_uuid, first.card_uuid) == ("MIG-0", make.uuids[1])
    assert first.memory_bytes == (5 << 30) - MIB


@pytest.mark.parametrize(
    ("version", "shares", "both"),
    [
        ("v1.34.3", {"136269"}, {"134100", "139034", "136269"}),
        ("v1.34.4", set(), {"134100", "139034"}),
        ("v1.35.0", {"136269"}, {"139034", "140433", "140434", "136269"}),
        ("v1.35.6", set(), {"139034", "140433", "140434"}),
        ("v1.36.1", set(), {"139034", "140433", "140434"}),
        ("v1.36.2", set(), {"140433", "140434"}),
        ("v1.36.3-rc.1+x", set(), {"140433"}),
        ("v1.37.2", set(), set()),
        ("v1.33.9", {"136269"}, {"134100", "139034", "140433", "140434", "136269"}),
        ("garbage", {"136269"}, {"134100", "139034", "140433", "140434", "136269"}),
    ],
)
def test_b117_known_accounting_defects_by_version(make, version, shares, both):
    def numbers(*properties):
        return {d.issue.rpartition("#")[2] for d in defects_of(version, frozenset(properties))}

    assert numbers("shares") == shares
    assert numbers("shares", "counters") == both
    for features in (make.shares, make.no_shares):
        for device in published(make.offer(make.card(), features=replace(features, server_version=version))):
            assert not ("allowMultipleAllocations" in device and "consumesCounters" in device)


def test_b119_memory_has_one_name_and_unit_in_every_mode(make):
    whole = decode_config(b'{"defaults": {"mode": "exclusive"}}', where="f")
    for config, features in ((None, make.shares), (None, make.no_shares), (whole, make.shares)):
        for device in published(make.offer(make.card(), config=config, features=features)):
            assert parse(device["capacity"]["memory"]["value"]) % MIB == 0
            assert "consumesCounters" not in device


def test_b119_a_queue_can_charge_each_claim_from_slice_and_claim_alone(make):
    """A mapping by capacity: what was consumed of it where that is told, else all that the device has."""
    mig = MigInstance(
        uuid="MIG-0", parent_uuid=make.uuids[1], profile="1g.5gb", gpu_instance=7, compute_instance=0,
        memory_bytes=5 << 30, multiprocessors=14,
    )  # fmt: skip
    cards = make.card(0), make.card(1, mig_capable=True, mig_enabled=True, mig=(mig,)), make.card(2)
    config = decode_config(f'{{"cards": [{{"uuid": "{make.uuids[2]}", "mode": "exclusive"}}]}}'.encode(), where="f")
    by_name = {device["name"]: device for device in published(make.offer(*cards, config=config))}
    forms = {tuple(sorted(name for name in device["capacity"] if "mem" in name.lower())) for device in by_name.values()}
    assert forms == {("memory",)}
    assert not [device for device in by_name.values() if "consumesCounters" in device]

    def charge(result):
        capacity = by_name[result["device"]]["capacity"]["memory"]
        default = capacity.get("requestPolicy", {}).get("default", capacity["value"])
        return parse(result.get("consumedCapacity", {}).get("memory", default))

    share = make.result("gpu-aaaaaaaa-shared", share="s", memory=4 << 30, cores=0, slots=1)
    (partition,) = (name for name in by_name if "-mig-" in name)
    assert charge(share) == 4 << 30
    assert charge(make.result(partition)) == 5 << 30
    assert charge(make.result("gpu-cccccccc")) == 24 << 30
    # The same as an extended resource, which cannot name an amount: the default, and the scheduler says so too.
    default = make.result("gpu-aaaaaaaa-shared", share="s", request="container-0-request-0")
    told = make.result("gpu-aaaaaaaa-shared", share="s", memory=24 << 30, request="container-0-request-0")
    assert charge(default) == charge(told) == 24 << 30


def test_b115_a_fault_of_one_mig_instance_taints_that_device_alone(make):
    instances = tuple(
        MigInstance(
            uuid=f"MIG-{k}", parent_uuid=make.uuids[0], profile="1g.5gb", gpu_instance=k, compute_instance=0,
            memory_bytes=5 << 30, multiprocessors=14,
        ) for k in range(2)
    )  # fmt: skip
    cards = make.card(0, mig_capable=True, mig_enabled=True, mig=instances), make.card(1)

    def tainted(**sick):
        return {
            d.grant_uuid
            for d in make.offer(*cards, sick={k.replace("_", "-"): v for k, v in sick.items()}).devices
            if d.taints
        }

    assert tainted(MIG_1="Xid 63") == {"MIG-1"}
    assert tainted() == set()
    assert tainted(**{make.uuids[0]: "Xid 79"}) == {"MIG-0", "MIG-1"}


def test_without_taints_a_sick_card_is_withdrawn_unless_it_is_held(make):
    records: dict = {}
    offering = Offering(
        config=decode_config(b"", where="f"),
        node_name="n1",
        pool="n1/gpu",
        records=lambda: records,
        metrics=Metrics(version="t"),
        changed=lambda: None,
    )
    offering.set_view(View(inventory=make.inventory(make.card(0), make.card(1)), problem=""))
    offering.set_features(make.no_shares)
    assert len(offering.offer.devices) == 8
    offering.set_faults({make.uuids[0]: "Xid 79"})
    assert [d.name[:12] for d in offering.offer.devices] == ["gpu-bbbbbbbb"] * 4
    slot = make.offer(make.card(0), features=make.no_shares).by_name["gpu-aaaaaaaa-s0"]
    uid = make.uid()
    claim = make.decoded(make.claim(uid, make.result(slot.name)))
    offered = make.offer(make.card(0), features=make.no_shares)
    ref = ClaimRef(uid=uid, namespace="t", name="c")
    records[uid] = plan_prepare(ref, claim, Book(records={}), offered, pool="n1/gpu").record
    offering.refresh()
    assert len(offering.offer.devices) == 8
    offering.set_features(make.shares)
    tainted = [d.name for d in offering.offer.devices if d.taints]
    assert tainted == [f"gpu-aaaaaaaa-s{k}" for k in range(4)]  # held as slots, so it stays slots
    offering.set_faults({})
    assert not [d.name for d in offering.offer.devices if d.taints]
