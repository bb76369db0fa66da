# SPDX-License-Identifier: Apache-2.0
"""Client, reflector and events against a real kube-apiserver, also through the fault proxy.

What a scripted server cannot show: field dropping, selectors, apply conflicts, what 410, 403 and 422 really look like,
bookmarks, pages of one resourceVersion, admission of Events.
"""

from __future__ import annotations

import threading

import pytest

from aliquot.api.quantity import equal
from aliquot.api.share import share_for
from aliquot.e2e.faults import Rule
from aliquot.kube import paths
from aliquot.kube.backoff import Backoff
from aliquot.kube.client import Kube
from aliquot.kube.errors import AlreadyExists, Conflict, Forbidden, Invalid, NotFound, Unauthorized
from aliquot.kube.events import EventRecorder, Reference
from aliquot.kube.objects import Document, Node, Object, ResourceClaim, ResourceSlice, ServerVersion
from aliquot.kube.reflector import Reflector
from aliquot.kube.writes import change_object

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(180)]

PATIENCE_S = 60.0
CONFIG_MAPS = "configmaps"


@pytest.fixture
def real(control_plane):
    kube = Kube.load(control_plane.kubeconfig, user_agent="aliquot-tests")
    yield kube
    kube.close()


def config_map(name, **data):
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": data}


def maps(namespace, name=None):
    return paths.namespaced("/api/v1", namespace, CONFIG_MAPS, name)


def slice_body(name, *devices, node="n1"):
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceSlice",
        "metadata": {"name": name},
        "spec": {
            "driver": "gpu.aliquot.dev",
            "nodeName": node,
            "pool": {"name": f"{node}/gpu", "generation": 1, "resourceSliceCount": 1},
            "devices": list(devices),
        },
    }


GPU = {
    "name": "gpu-0",
    "attributes": {"uuid": {"string": "GPU-0"}, "index": {"int": 0}, "migCapable": {"bool": False}},
    "capacity": {"memory": {"value": "81920Mi"}},
}


class TestObjects:
    def test_the_servers_version(self, real):
        version = real.get(paths.VERSION, ServerVersion)
        assert version.git_version.startswith(f"v{version.major}.{version.minor}")

    def test_a_slice_comes_back_in_the_servers_form(self, real, namespace):
        stored = real.create(paths.SLICES, slice_body(namespace, GPU))
        try:
            assert stored["spec"]["devices"][0]["capacity"]["memory"]["value"] == "80Gi"
            read = real.get(paths.slice_(namespace), ResourceSlice)
            (device,) = read.spec.devices
            assert equal(device.capacity["memory"].value, "81920Mi")
            assert {name: value.value for name, value in device.attributes.items()} == {
                "uuid": "GPU-0",
                "index": 0,
                "migCapable": False,
            }
            assert read.metadata.uid
        finally:
            assert real.delete(paths.slice_(namespace), uid=stored["metadata"]["uid"])
        assert not real.delete(paths.slice_(namespace))

    def test_a_dry_run_tells_which_fields_are_kept_and_stores_nothing(self, real, namespace):
        echo = real.create(paths.SLICES, slice_body(namespace, GPU), query=[("dryRun", "All")])
        assert echo["spec"]["devices"][0]["name"] == "gpu-0"
        with pytest.raises(NotFound, match=rf"cannot get resourceslices.resource.k8s.io {namespace}: 404 NotFound"):
            real.get_json(paths.slice_(namespace))

    def test_a_slice_against_the_rules_is_invalid_and_says_where(self, real, namespace):
        with pytest.raises(Invalid, match=r"422 Invalid: .*devices\[0\].name"):
            real.create(paths.SLICES, slice_body(namespace, GPU | {"name": "GPU_0"}))

    def test_an_allocated_claim_as_the_driver_reads_it(self, real, namespace):
        claims = paths.namespaced(paths.RESOURCE_API, namespace, "resourceclaims")
        parameters = {"apiVersion": "gpu.aliquot.dev/v1", "kind": "Share", "corePolicy": "force"}
        opaque = {"driver": "gpu.aliquot.dev", "parameters": parameters}
        foreign = {"driver": "gpu.example.com", "parameters": {"kind": "Whatever"}}
        body = {
            "apiVersion": "resource.k8s.io/v1",
            "kind": "ResourceClaim",
            "metadata": {"name": "train"},
            "spec": {"devices": {"requests": [{"name": "gpu", "exactly": {"deviceClassName": "gpu.aliquot.dev"}}]}},
        }
        claim = real.create(claims, body)
        claim["status"] = {
            "allocation": {
                "devices": {
                    "results": [{"request": "gpu", "driver": "gpu.aliquot.dev", "pool": "n1/gpu", "device": "gpu-0"}],
                    "config": [
                        {"source": "FromClass", "requests": ["gpu"], "opaque": foreign},
                        {"source": "FromClaim", "requests": ["gpu"], "opaque": opaque},
                    ],
                }
            }
        }
        real.replace(paths.claim(namespace, "train") + "/status", claim)
        read = real.get(paths.claim(namespace, "train"), ResourceClaim)
        (result,) = read.allocation.results
        assert (result.request, result.pool, result.device, result.share_id) == ("gpu", "n1/gpu", "gpu-0", None)
        assert share_for(read.allocation.config, "gpu", where="x").core_policy.value == "force"

    def test_node(self, real, namespace):
        real.create(paths.NODES, {"apiVersion": "v1", "kind": "Node", "metadata": {"name": namespace}})
        assert real.get(paths.node(namespace), Node).metadata.uid


class TestWrites:
    def test_create_apply_merge_and_json_patch(self, real, namespace):
        real.create(maps(namespace), config_map("a", one="1"))
        with pytest.raises(AlreadyExists):
            real.create(maps(namespace), config_map("a"))
        real.apply(maps(namespace, "a"), config_map("a", two="2"), manager="aliquot")
        real.merge_patch(maps(namespace, "a"), {"data": {"three": "3", "one": None}})
        stored = real.json_patch(maps(namespace, "a"), [{"op": "add", "path": "/data/four", "value": "4"}])
        assert stored["data"] == {"two": "2", "three": "3", "four": "4"}
        with pytest.raises(Invalid):
            real.json_patch(maps(namespace, "a"), [{"op": "test", "path": "/data/four", "value": "5"}])

    def test_apply_creates_and_another_managers_field_is_a_conflict(self, real, namespace):
        real.apply(maps(namespace, "b"), config_map("b", key="ours"), manager="aliquot")
        with pytest.raises(Conflict, match="aliquot"):
            real.apply(maps(namespace, "b"), config_map("b", key="theirs"), manager="other", force=False)
        stored = real.apply(maps(namespace, "b"), config_map("b", key="theirs"), manager="other")
        assert stored["data"] == {"key": "theirs"}

    def test_a_delete_of_another_life_of_the_object_is_a_conflict(self, real, namespace):
        real.create(maps(namespace), config_map("c"))
        with pytest.raises(Conflict):
            real.delete(maps(namespace, "c"), uid="00000000-0000-0000-0000-000000000000")
        assert real.delete(maps(namespace, "c"))

    def test_changes_by_many_at_once_are_all_kept(self, real, namespace):
        real.create(maps(namespace), config_map("d", n="0"))
        failed = []

        def count(body):
            body["data"]["n"] = str(int(body["data"]["n"]) + 1)
            return True

        def work():
            done = 0
            while done < 5:
                try:
                    change_object(real, maps(namespace, "d"), count, stop=threading.Event(), backoff=Backoff(0.02, 0.1))
                except Conflict:
                    continue
                except Exception as error:
                    failed.append(error)
                    return
                done += 1

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
        assert failed == []
        assert real.get_json(maps(namespace, "d"))["data"] == {"n": "20"}


class TestRights:
    def test_what_is_not_allowed_names_the_missing_rule(self, control_plane):
        nobody = Kube.load(control_plane.kubeconfig_for("nobody"))
        with pytest.raises(Forbidden) as refused:
            nobody.list_all(paths.SLICES, ResourceSlice)
        text = str(refused.value)
        assert 'apiGroups ["resource.k8s.io"], resources ["resourceslices"], verbs ["list"]' in text
        assert 'User "nobody"' in text
        nobody.close()

    def test_a_token_nobody_issued_is_unauthorized(self, control_plane):
        stranger = Kube.load(control_plane.kubeconfig_with_token("stranger", "no-such-token"))
        with pytest.raises(Unauthorized):
            stranger.get_json(paths.SLICES)
        stranger.close()


class Followed:
    """A reflector over the config maps of a namespace, and what a test waits for."""

    def __init__(self, kube, namespace, **options):
        self._heard = threading.Condition()
        self.changes = []
        self.reflector = Reflector(kube, maps(namespace), Document, backoff=Backoff(0.05, 0.5), **options)
        self.reflector.subscribe(self._hear)
        self.reflector.start()

    def _hear(self, change):
        with self._heard:
            self.changes.append((change.kind, change.key.rpartition("/")[2]))
            self._heard.notify_all()

    def until(self, *names):
        """Waits until the copy holds exactly these."""
        with self._heard:
            assert self._heard.wait_for(lambda: self.names() == sorted(names), PATIENCE_S), self.names()

    def names(self):
        return sorted(item.metadata.name for item in self.reflector.items())

    def __enter__(self):
        assert self.reflector.synced.wait(PATIENCE_S)
        return self

    def __exit__(self, *_):
        self.reflector.stop()
        assert self.reflector.join(PATIENCE_S)


class TestReflector:
    def test_pages_then_events(self, real, namespace):
        for number in range(7):
            real.create(maps(namespace), config_map(f"m{number}"))
        with Followed(real, namespace, limit=3) as followed:
            followed.until(*[f"m{number}" for number in range(7)])
            real.delete(maps(namespace, "m0"))
            real.create(maps(namespace), config_map("n"))
            followed.until(*[f"m{number}" for number in range(1, 7)], "n")
            assert followed.reflector.stats.lists == 1

    def test_a_selector_shows_an_object_that_leaves_it_as_deleted(self, real, namespace):
        body = config_map("a")
        body["metadata"]["labels"] = {"mine": "yes"}
        real.create(maps(namespace), body)
        real.create(maps(namespace), config_map("b"))
        with Followed(real, namespace, query=[("labelSelector", "mine=yes")]) as followed:
            followed.until("a")
            real.merge_patch(maps(namespace, "a"), {"metadata": {"labels": {"mine": "no"}}})
            followed.until()
            assert followed.changes == [("added", "a"), ("deleted", "a")]

    def test_slices_of_one_node_only(self, real, namespace):
        mine, other = f"{namespace}-1", f"{namespace}-2"
        reflector = Reflector(real, paths.SLICES, ResourceSlice, query=[("fieldSelector", f"spec.nodeName={mine}")])
        changed = threading.Event()
        reflector.subscribe(lambda _: changed.set())
        reflector.start()
        assert reflector.synced.wait(PATIENCE_S)
        real.create(paths.SLICES, slice_body(other, GPU, node=other))
        real.create(paths.SLICES, slice_body(mine, GPU, node=mine))
        assert changed.wait(PATIENCE_S)
        assert [item.metadata.name for item in reflector.items()] == [mine]
        reflector.stop()
        assert reflector.join(PATIENCE_S)
        for name in (mine, other):
            real.delete(paths.slice_(name))

    def test_a_version_from_the_future_is_not_waited_for(self, real, namespace):
        """A server whose store was restored opens such a watch and is silent; measured on 1.36."""
        real.create(maps(namespace), config_map("a"))
        reflector = Reflector(real, maps(namespace), Document, backoff=Backoff(0.05, 0.5), silence_s=1.0)
        reflector._version = "99999999"
        reflector.start()
        assert reflector.synced.wait(PATIENCE_S)
        assert [item.metadata.name for item in reflector.items()] == ["a"]
        reflector.stop()
        assert reflector.join(PATIENCE_S)

    def test_metadata_alone_can_be_followed(self, real, namespace):
        real.create(maps(namespace), config_map("a"))
        listing = real.list_all(maps(namespace), Object)
        assert [item.metadata.key for item in listing.items] == [f"{namespace}/a"]


class TestThroughFaults:
    @pytest.fixture
    def faulty(self, fault_proxy):
        kube = Kube.load(fault_proxy.kubeconfig_for("admin", ["system:masters"]))
        yield kube
        kube.close()

    def test_watches_that_are_cut_and_refused_for_a_while(self, real, faulty, fault_proxy, namespace):
        with Followed(faulty, namespace) as followed:
            real.create(maps(namespace), config_map("a"))
            followed.until("a")
            fault_proxy.set(
                Rule(path=CONFIG_MAPS, watch=True, status=500, times=2),
                Rule(path=CONFIG_MAPS, watch=True, status=429, retry_after_s=1, times=1),
                Rule(path=CONFIG_MAPS, watch=True, status=410, times=1),
                Rule(path=CONFIG_MAPS, watch=False, cut=True, times=2),
            )
            real.create(maps(namespace), config_map("b"))
            real.delete(maps(namespace, "a"))
            assert fault_proxy.cut_watches(CONFIG_MAPS) >= 0
            followed.until("b")
            real.create(maps(namespace), config_map("c"))
            followed.until("b", "c")

    def test_a_watch_that_goes_silent_is_noticed(self, real, faulty, fault_proxy, namespace):
        with Followed(faulty, namespace, silence_s=1.0) as followed:
            real.create(maps(namespace), config_map("a"))
            followed.until("a")
            fault_proxy.silence_watches(CONFIG_MAPS)
            real.create(maps(namespace), config_map("b"))
            followed.until("a", "b")
            assert followed.reflector.stats.failures.get("Unreachable", 0) >= 1


class TestEvents:
    def events(self, real, namespace):
        items = real.get_json(paths.namespaced(paths.EVENTS_API, namespace, "events"))["items"]
        return sorted(items, key=lambda item: item["eventTime"])

    def test_the_server_takes_what_we_tell_and_its_repetition(self, real, namespace):
        regarding = Reference("resource.k8s.io/v1", "ResourceClaim", "train", namespace, "u1")
        now = [0.0]
        recorder = EventRecorder(real, component="gpu.aliquot.dev", instance="n1", clock=lambda: now[0])
        for _ in range(3):
            recorder.warning(regarding, "ShareRefused", "no room: ask for less", action="Prepare")
            recorder.step()
        now[0] += 60
        recorder.normal(regarding, "Prepared", "ready")
        recorder.step()
        refused, prepared = self.events(real, namespace)
        assert (refused["reason"], refused["note"], refused["series"]["count"]) == (
            "ShareRefused",
            "no room: ask for less",
            3,
        )
        assert (prepared["reason"], prepared["type"], prepared["action"]) == ("Prepared", "Normal", "Prepared")
        assert recorder.stats.dropped == {}

    def test_an_event_about_a_node(self, real, namespace):
        recorder = EventRecorder(real, component="gpu.aliquot.dev", instance="n1")
        recorder.warning(Reference("v1", "Node", namespace), "CardLost", "x" * 5000)
        recorder.step()
        assert recorder.stats.dropped == {}
        notes = [event["note"] for event in self.events(real, "default") if event["regarding"]["name"] == namespace]
        assert len(notes) == 1

    def test_an_event_in_a_namespace_that_is_gone_is_dropped(self, real):
        recorder = EventRecorder(real, component="gpu.aliquot.dev", instance="n1")
        recorder.normal(Reference("v1", "Pod", "p", "no-such-namespace"), "X", "y")
        recorder.step()
        assert recorder.stats.dropped == {"refused": 1}
