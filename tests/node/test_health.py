# SPDX-License-Identifier: Apache-2.0
"""What faults mean and when they are over."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aliquot.node.health import Check, Event, FaultKind, Health, after_check, after_event, without
from aliquot.node.inventory import Card, MemorySource, MigInstance

GA = "GPU-aaaaaaaa-0000-4000-8000-00000000000a"


def mig(uuid: str, gi: int, ci: int) -> MigInstance:
    return MigInstance(
        uuid=uuid,
        parent_uuid=GA,
        profile="1g.5gb",
        gpu_instance=gi,
        compute_instance=ci,
        memory_bytes=None,
        multiprocessors=None,
    )


def card(*instances: MigInstance) -> Card:
    return Card(
        uuid=GA,
        index=0,
        minor=0,
        name="Fake",
        serial=None,
        bus_id="0000:01:00.0",
        pci_root=None,
        numa_node=None,
        memory_bytes=1 << 30,
        memory_source=MemorySource.NVML,
        reserved_bytes=None,
        compute_capability=(8, 0),
        architecture="Ampere",
        brand=None,
        multiprocessors=None,
        ecc=None,
        mig_capable=True,
        mig_enabled=bool(instances),
        mig=instances,
    )


CARD = card()
GOOD = Check(GA, answers=True, recovery_action=0)
OLD_DRIVER = Check(GA, answers=True, recovery_action=None)
SILENT = Check(GA, answers=False, reason="GPU is lost")


def test_b115_a_fatal_fault_stays_through_harmless_events_and_goes_after_verified_recovery():
    fatal = after_event(Health(), Event(GA, 79), CARD)
    assert fatal.of(CARD).kind is FaultKind.XID
    assert fatal.of(CARD).xid == 79
    for harmless in (13, 31, 43, 45, 68, 109):
        assert after_event(fatal, Event(GA, harmless), CARD) == fatal
    resetting = after_check(fatal, Check(GA, answers=True, recovery_action=1), CARD)
    assert resetting == fatal
    assert after_check(fatal, SILENT, CARD) == fatal
    assert after_check(fatal, GOOD, CARD) == Health()


def test_b115_the_same_for_one_mig_instance():
    one, two = mig("MIG-1", 1, 0), mig("MIG-2", 2, 0)
    parent = card(one, two)
    fatal = after_event(Health(), Event(GA, 63, gpu_instance=1, compute_instance=0), parent)
    assert set(fatal.faults) == {"MIG-1"}
    assert fatal.of(parent) is None
    assert fatal.of(parent, "MIG-1") is not None
    assert fatal.of(parent, "MIG-2") is None
    assert after_event(fatal, Event(GA, 43, gpu_instance=1), parent) == fatal
    assert after_check(fatal, GOOD, parent) == Health()


def test_a_fault_of_the_card_is_one_of_all_its_instances():
    parent = card(mig("MIG-1", 1, 0))
    fatal = after_event(Health(), Event(GA, 79), parent)
    assert fatal.of(parent, "MIG-1") is not None


def test_an_event_for_all_compute_instances_hits_each_and_for_an_unknown_one_the_card():
    parent = card(mig("MIG-1", 1, 0), mig("MIG-2", 1, 1), mig("MIG-3", 2, 0))
    assert set(after_event(Health(), Event(GA, 63, gpu_instance=1), parent).faults) == {"MIG-1", "MIG-2"}
    assert set(after_event(Health(), Event(GA, 63, gpu_instance=9, compute_instance=0), parent).faults) == {GA}


@pytest.mark.parametrize("xid", [13, 31, 43, 45, 68, 109])
def test_faults_of_applications_are_none_of_the_cards(xid):
    assert after_event(Health(), Event(GA, xid), CARD) == Health()


def test_more_faults_can_be_ignored_by_the_operator():
    assert after_event(Health(), Event(GA, 63), CARD, frozenset({63})) == Health()


def test_a_lost_card_is_found_again_even_on_a_driver_that_knows_no_recovery_action():
    lost = after_check(Health(), SILENT, CARD)
    assert lost.of(CARD).kind is FaultKind.LOST
    assert "does not answer: GPU is lost" in lost.of(CARD).text
    assert after_check(lost, OLD_DRIVER, CARD) == Health()


def test_an_old_driver_is_believed_about_an_xid_only_after_it_was_loaded_anew():
    fatal = after_event(Health(), Event(GA, 48), CARD)
    assert after_check(fatal, OLD_DRIVER, CARD) == fatal
    assert after_check(fatal, Check(GA, answers=True, driver_reloaded=True), CARD) == Health()
    needs_reset = Check(GA, answers=True, recovery_action=1, driver_reloaded=True)
    assert after_check(fatal, needs_reset, CARD) == fatal


def test_a_recovery_action_is_a_fault_by_itself_and_names_the_step():
    due = after_check(Health(), Check(GA, answers=True, recovery_action=1), CARD)
    assert due.of(CARD).kind is FaultKind.RECOVERY
    assert "asks to reset the card" in due.of(CARD).text
    assert after_check(due, GOOD, CARD) == Health()


def test_faults_of_devices_that_are_gone_are_forgotten():
    fatal = after_event(Health(), Event(GA, 79), CARD)
    assert without(fatal, [GA]) == fatal
    assert without(fatal, []) == Health()


@given(st.lists(st.one_of(st.integers(1, 150), st.sampled_from([GOOD, OLD_DRIVER, SILENT])), max_size=20))
def test_only_a_verified_check_ever_ends_an_xid(happenings):
    health, ill = Health(), False
    for happening in happenings:
        if isinstance(happening, int):
            health = after_event(health, Event(GA, happening), CARD)
            ill = ill or happening not in {13, 31, 43, 45, 68, 109}
        else:
            health = after_check(health, happening, CARD)
            fault = health.of(CARD)
            if happening is GOOD:
                ill = False
            elif fault is not None and fault.kind is FaultKind.LOST:
                assert not ill
        if ill:
            assert health.of(CARD) is not None
