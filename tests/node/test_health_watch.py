# SPDX-License-Identifier: Apache-2.0
"""Events and questions over the fake driver: a fault is seen within seconds and ends when it is verified to be over."""

from __future__ import annotations

import json
import os
import select

import pytest

GA, GB = "GPU-aaaaaaaa-0000-4000-8000-00000000000a", "GPU-bbbbbbbb-0000-4000-8000-00000000000b"
TWO_CARDS = ({"profile": "Fake24G", "uuid": GA}, {"profile": "Fake24G", "uuid": GB})

WATCH = """
    from aliquot.api.log import configure
    from aliquot.node.health_watch import HealthWatch
    from aliquot.node.inventory import read_inventory
    from aliquot.node.nvml import Nvml
    configure(level="error", stream=sys.stderr.buffer)
    nvml = Nvml(NVML)
    nvml.open()
    inventory = read_inventory(nvml)
    def changed(health): say({uuid: [f.kind.value, f.xid] for uuid, f in health.faults.items()})
    watch = HealthWatch(nvml, lambda: inventory, on_change=changed, check_s=0.2)
    watch.start()
    while not watch._registered and not watch.unmonitored: pass
    say(sorted(watch.unmonitored))
    sys.stdin.readline()
    watch.stop()
    say("stopped")
"""


class Watch:
    """A running watch whose reports are read one by one."""

    def __init__(self, fake) -> None:
        self.process = fake.start(WATCH)
        self.pipe = self.process.stdout.fileno()
        self.unread = b""
        self.unmonitored = self.next()

    def next(self, within: float = 5) -> object:
        """The next report; B115 allows five seconds."""
        while b"\n" not in self.unread:
            assert select.select([self.pipe], [], [], within)[0], "nothing was reported in time"
            self.unread += os.read(self.pipe, 65536)
        line, _, self.unread = self.unread.partition(b"\n")
        return json.loads(line)

    def until(self, health: object, within: float = 5) -> None:
        """Read reports until this one; a machine changes in steps, and each is reported."""
        while (report := self.next(within)) != health:
            pass
        assert report == health

    def silent(self, for_s: float = 0.8) -> bool:
        """Whether several rounds of questions report nothing."""
        return not self.unread and not select.select([self.pipe], [], [], for_s)[0]

    def stop(self) -> None:
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        self.until("stopped")
        assert self.process.wait(10) == 0
        self.process.communicate()


@pytest.fixture
def watch(fake):
    started: list[Watch] = []

    def start() -> Watch:
        started.append(Watch(fake))
        return started[-1]

    yield start
    for one in started:
        if one.process.poll() is None:
            one.stop()


def test_b115_a_fatal_xid_stays_through_harmless_events_and_ends_with_a_verified_recovery(fake, watch):
    fake.cards(*TWO_CARDS)
    one = watch()
    assert one.unmonitored == []
    reset_due = {"cards": [{"card": 0, "recovery_action": 1}]}
    fatal = {"id": 1, "card": 0, "xid": 79}
    fake.control(events=[fatal], **reset_due)
    one.until({GA: ["xid", 79]})
    fake.control(events=[fatal, {"id": 2, "card": 0, "xid": 43}], **reset_due)
    assert one.silent()
    fake.control(events=[fatal, {"id": 2, "card": 0, "xid": 43}])
    assert one.next() == {}
    one.stop()


def test_a_lost_card_is_seen_and_seen_again_when_it_is_back(fake, watch):
    fake.cards(*TWO_CARDS)
    one = watch()
    fake.control(cards=[{"card": 1, "lost": True}])
    assert one.next() == {GB: ["lost", None]}
    assert one.silent()
    fake.control()
    assert one.next() == {}
    one.stop()


def test_faults_of_applications_change_nothing(fake, watch):
    fake.cards(*TWO_CARDS)
    one = watch()
    fake.control(events=[{"id": n, "card": 0, "xid": xid} for n, xid in enumerate((13, 31, 43, 45, 68, 109), 1)])
    assert one.silent()
    one.stop()


def test_a_card_too_old_for_events_is_asked_all_the_same(fake, watch):
    fake.cards(*TWO_CARDS)
    fake.control(faults=[{"function": "nvmlDeviceRegisterEvents", "code": 3, "card": 0}])
    one = watch()
    assert one.unmonitored == [GA]
    fake.control(cards=[{"card": 0, "lost": True}])
    assert one.next() == {GA: ["lost", None]}
    one.stop()


def test_a_driver_that_goes_away_and_comes_back_is_opened_anew(fake, watch):
    fake.cards(*TWO_CARDS)
    one = watch()
    fake.control(faults=[{"function": "nvml*", "code": 9}])
    one.until({GA: ["lost", None], GB: ["lost", None]})
    fake.control()
    one.until({}, within=20)
    # And events come again, in the new opening.
    fake.control(events=[{"id": 9, "card": 1, "xid": 48}], cards=[{"card": 1, "recovery_action": 1}])
    one.until({GB: ["xid", 48]})
    one.stop()


def test_an_error_while_waiting_says_nothing_of_the_cards(fake, watch):
    fake.cards(*TWO_CARDS)
    one = watch()
    fake.control(faults=[{"function": "nvmlEventSetWait*", "code": 999, "count": 2}])
    assert one.silent(3)
    fake.control(cards=[{"card": 0, "lost": True}])
    assert one.next() == {GA: ["lost", None]}
    one.stop()


@pytest.mark.usefixtures("as_root")
def test_b115_a_fault_of_one_mig_instance_is_that_instances_alone(fake, watch):
    fake.cards({"profile": "H200", "mig_enabled": True, "uuid": GA})
    program = """
        from aliquot.node.nvml import Nvml
        from aliquot.node.inventory import read_inventory
        with Nvml(NVML) as nvml:
            device = nvml.handle("nvmlDeviceGetHandleByIndex", 0)
            for _ in range(2):
                info = nvml.call("nvmlDeviceGetGpuInstanceProfileInfo", device, 0)
                instance = nvml.handle("nvmlDeviceCreateGpuInstance", device, info.id)
                compute = nvml.call("nvmlGpuInstanceGetComputeInstanceProfileInfo", instance, 0, 0)
                nvml.call("nvmlGpuInstanceCreateComputeInstance", instance, compute.id)
            mig = read_inventory(nvml).cards[0].mig
            say([[m.uuid, m.gpu_instance, m.compute_instance] for m in mig])
    """
    (first, gi, ci), _ = fake.run(program)[0]
    one = watch()
    due = {"cards": [{"card": 0, "recovery_action": 1}]}
    fake.control(events=[{"id": 1, "card": 0, "xid": 63, "gi": gi, "ci": ci}], **due)
    one.until({GA: ["recovery", None], first: ["xid", 63]})
    fake.control(events=[{"id": 1, "card": 0, "xid": 63, "gi": gi, "ci": ci}])
    assert one.next() == {}
    one.stop()
