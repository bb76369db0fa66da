# SPDX-License-Identifier: Apache-2.0
"""The reflector under every fault we know: it is never hot, never stuck, and always ends up with the server's state."""

from __future__ import annotations

import random
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aliquot.kube import paths
from aliquot.kube.backoff import Backoff
from aliquot.kube.client import Kube
from aliquot.kube.objects import Document, Object, ObjectMeta, ResourceSlice
from aliquot.kube.reflector import LIVED_S, Reflector, differences

PATIENCE_S = 20.0


def thing(name, version, uid="", **fields):
    return {"metadata": {"name": name, "resourceVersion": str(version), "uid": uid or f"uid-{name}"}} | fields


def listing(*things, version="10", more=""):
    return {"metadata": {"resourceVersion": version, "continue": more}, "items": list(things)}


def event(kind, body):
    return {"type": kind, "object": body}


def bookmark(version):
    return event("BOOKMARK", {"metadata": {"resourceVersion": str(version)}})


class Heard:
    """A handler that keeps what it was told, and lets a test wait for it."""

    def __init__(self):
        self.changes = []
        self._changed = threading.Condition()

    def __call__(self, change):
        with self._changed:
            self.changes.append((change.kind, change.key))
            self._changed.notify_all()

    def wait_for(self, count):
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.changes) >= count, PATIENCE_S), self.changes
        return self.changes


class Waits:
    """Takes the place of waiting: keeps what was asked for, and says that time is up."""

    def __init__(self, gate=None):
        self.asked = []
        self._gate = gate

    def __call__(self, stop, seconds):
        self.asked.append(seconds)
        if self._gate is not None:
            self._gate(len(self.asked))
        return stop.is_set()


class Highest(random.Random):
    def uniform(self, a, b):
        return b


class Rig:
    def __init__(self, server, kube):
        self.server, self.kube = server, kube
        self.heard = Heard()
        self.waits = Waits()
        self.now = [1000.0]
        self.reflectors = []

    def start(self, *, item=ResourceSlice, path=paths.SLICES, sleep=None, handlers=(), **options):
        reflector = Reflector(
            self.kube,
            path,
            item,
            backoff=Backoff(rng=Highest(), sleep=sleep or self.waits),
            clock=lambda: self.now[0],
            **options,
        )
        for handler in (self.heard, *handlers):
            reflector.subscribe(handler)
        self.reflectors.append(reflector)
        reflector.start()
        return reflector

    def end(self):
        for reflector in self.reflectors:
            reflector.stop()
            assert reflector.join(PATIENCE_S)
        self.kube.close()

    def names(self, reflector):
        return sorted(item.metadata.name for item in reflector.items())


@pytest.fixture
def rig(server, kube):
    made = Rig(server, kube)
    yield made
    made.end()


class TestListAndWatch:
    def test_the_first_list_is_told_as_additions_and_then_synced(self, rig):
        rig.server.script(rig.server.Reply(listing(thing("a", 1), thing("b", 2))), rig.server.Stream())
        reflector = rig.start()
        assert reflector.synced.wait(PATIENCE_S)
        assert rig.heard.changes == [("added", "a"), ("added", "b")]
        assert rig.names(reflector) == ["a", "b"]
        assert reflector.get("a").metadata.resource_version == "1"
        assert reflector.get("c") is None

    def test_events_change_the_copy_before_handlers_hear_of_them(self, rig):
        stream = rig.server.Stream()
        rig.server.script(rig.server.Reply(listing(thing("a", 1))), stream)
        seen = []
        reflector = rig.start()
        reflector.synced.wait(PATIENCE_S)
        reflector.subscribe(lambda change: seen.append((change.kind, change.old, change.new, rig.names(reflector))))
        last = Heard()
        reflector.subscribe(last)
        stream.send(event("ADDED", thing("b", 11)), event("MODIFIED", thing("a", 12)), event("DELETED", thing("b", 13)))
        last.wait_for(3)
        kinds = [
            (kind, old and old.metadata.resource_version, new and new.metadata.resource_version)
            for kind, old, new, _ in seen
        ]
        assert kinds[-3:] == [("added", None, "11"), ("modified", "1", "12"), ("deleted", "11", None)]
        assert [names for *_, names in seen][-3:] == [["a", "b"], ["a", "b"], ["a"]]

    def test_what_is_asked_of_the_server(self, rig):
        rig.server.script(rig.server.Reply(listing(version="77")), rig.server.Stream())
        rig.start(query=[("fieldSelector", "spec.nodeName=n1")])
        rig.server.wait_for(lambda requests: len(requests) == 2)
        first, watch = rig.server.requests
        assert first.query == {"fieldSelector": "spec.nodeName=n1", "limit": "500"}
        limit = int(watch.query.pop("timeoutSeconds"))
        assert 240 <= limit <= 360
        assert watch.query == {
            "fieldSelector": "spec.nodeName=n1",
            "watch": "1",
            "resourceVersion": "77",
            "allowWatchBookmarks": "true",
        }

    def test_no_part_of_a_list_is_ever_seen(self, rig):
        hold = threading.Event()
        server = rig.server
        server.script(
            server.Reply(listing(thing("a", 1), more="t")),
            server.Reply(listing(thing("b", 2)), hold=hold),
            server.Stream(),
        )
        reflector = rig.start()
        server.wait_for(lambda requests: len(requests) == 2)
        assert reflector.items() == []
        assert not reflector.synced.is_set()
        hold.set()
        assert reflector.synced.wait(PATIENCE_S)
        assert rig.names(reflector) == ["a", "b"]

    def test_namespaced_objects_are_kept_apart(self, rig):
        one = {"metadata": {"name": "a", "namespace": "x", "resourceVersion": "1"}}
        other = {"metadata": {"name": "a", "namespace": "y", "resourceVersion": "1"}}
        rig.server.script(rig.server.Reply(listing(one, other)), rig.server.Stream())
        reflector = rig.start(item=Document, path=paths.CLAIMS)
        reflector.synced.wait(PATIENCE_S)
        assert reflector.get("x/a").body == one
        assert len(reflector.items()) == 2

    def test_the_age_of_the_last_word_from_the_server(self, rig):
        stream = rig.server.Stream()
        rig.server.script(rig.server.Reply(listing()), stream)
        reflector = rig.start()
        reflector.synced.wait(PATIENCE_S)
        rig.now[0] += 40
        assert reflector.last_event_age_s() == 40
        stream.send(bookmark(11), event("ADDED", thing("a", 12)))
        rig.heard.wait_for(1)
        assert reflector.last_event_age_s() == 0
        assert reflector.stats.bookmarks == 1


class TestResume:
    def test_after_a_drop_from_the_last_event_without_a_list(self, rig):
        server = rig.server
        server.script(
            server.Reply(listing(thing("a", 1))),
            server.Stream(event("ADDED", thing("b", 11))).drop(),
            server.Stream(event("ADDED", thing("c", 12))),
        )
        reflector = rig.start()
        rig.heard.wait_for(3)
        assert rig.names(reflector) == ["a", "b", "c"]
        assert [request.query["resourceVersion"] for request in server.watches()] == ["10", "11"]
        assert len(server.lists()) == 1

    def test_from_a_bookmark_where_nothing_else_came(self, rig):
        server = rig.server
        server.script(server.Reply(listing()), server.Stream(bookmark(40)).close(), server.Stream())
        rig.start()
        server.wait_for(lambda requests: len(requests) == 3)
        assert server.watches()[1].query["resourceVersion"] == "40"

    def test_silence_after_events_resumes_from_the_last(self, rig):
        server = rig.server
        server.script(
            server.Reply(listing()),
            server.Stream(event("ADDED", thing("a", 11))),
            server.Stream(event("ADDED", thing("b", 12))),
        )
        reflector = rig.start(silence_s=0.2)
        rig.heard.wait_for(2)
        assert server.watches()[1].query["resourceVersion"] == "11"
        assert reflector.stats.failures["Unreachable"] >= 1

    def test_a_watch_that_never_said_a_word_means_a_new_list(self, rig):
        """So a server behaves towards a version from the future, after its store was restored from a backup."""
        server = rig.server
        server.script(
            server.Reply(listing(thing("a", 1), version="900")),
            server.Stream(),
            server.Reply(listing(version="100")),
            server.Stream(),
        )
        rig.start(silence_s=0.2)
        assert rig.heard.wait_for(2)[1] == ("deleted", "a")

    @pytest.mark.parametrize("how", ["status", "event"])
    def test_410_means_a_new_list_and_its_differences(self, rig, how):
        server = rig.server
        expired = server.status_body(410, "Expired", "too old resource version")
        server.script(
            server.Reply(listing(thing("a", 1), thing("b", 2), thing("c", 3), version="10")),
            server.Reply(expired, 410) if how == "status" else server.Stream(event("ERROR", expired)),
            server.Reply(listing(thing("b", 2), thing("c", 33), thing("d", 4), version="50")),
            server.Stream(),
        )
        reflector = rig.start()
        rig.heard.wait_for(6)
        assert rig.heard.changes[3:] == [("deleted", "a"), ("modified", "c"), ("added", "d")]
        server.wait_for(lambda requests: len(requests) == 4)
        assert server.watches()[1].query["resourceVersion"] == "50"
        assert reflector.stats.failures == {"Gone": 1}

    @pytest.mark.parametrize(("code", "reason"), [(504, "Timeout"), (400, "BadRequest"), (422, "Invalid")])
    def test_a_version_the_server_cannot_serve_means_a_new_list(self, rig, code, reason):
        """What a server says to a version it does not have (yet)."""
        server = rig.server
        server.script(
            server.Reply(listing(thing("a", 1), version="900")),
            server.Reply(server.status_body(code, reason, "Too large resource version"), code),
            server.Reply(listing(version="100")),
            server.Stream(),
        )
        rig.start()
        assert rig.heard.wait_for(2)[1] == ("deleted", "a")

    def test_a_line_that_is_no_event_means_a_new_list(self, rig):
        server = rig.server
        server.script(
            server.Reply(listing()),
            server.Stream(b"<html>proxy error</html>\n"),
            server.Reply(listing(thing("a", 1))),
            server.Stream(),
        )
        reflector = rig.start()
        rig.heard.wait_for(1)
        assert reflector.stats.failures == {"ServerError": 1}

    def test_an_object_made_again_under_its_name_is_two_changes(self, rig):
        server = rig.server
        server.script(
            server.Reply(listing(thing("a", 1, uid="first"))),
            server.Reply(server.status_body(410), 410),
            server.Reply(listing(thing("a", 2, uid="second"))),
            server.Stream(),
        )
        rig.start()
        assert rig.heard.wait_for(3) == [("added", "a"), ("deleted", "a"), ("added", "a")]


class TestBackOff:
    def test_500_for_a_while_grows_the_wait_and_then_it_goes_on(self, rig):
        server = rig.server
        bad = server.Reply(server.status_body(500, "InternalError"), 500)
        server.script(*[bad] * 8, server.Reply(listing(thing("a", 1))), server.Stream())
        reflector = rig.start()
        assert reflector.synced.wait(PATIENCE_S)
        assert rig.waits.asked == [0.5, 1, 2, 4, 8, 16, 30, 30]
        assert reflector.stats.failures == {"ServerError": 8}

    def test_410_for_a_while_is_no_storm_of_lists(self, rig):
        server = rig.server
        gone = server.Reply(server.status_body(410, "Expired"), 410)
        rounds = [reply for _ in range(5) for reply in (server.Reply(listing()), gone)]
        server.script(*rounds, server.Reply(listing(thing("a", 1))), server.Stream())
        rig.start()
        rig.heard.wait_for(1)
        assert rig.waits.asked == [0.5, 1, 2, 4, 8]

    def test_429_waits_as_long_as_the_server_asks_and_more(self, rig):
        server = rig.server
        server.script(
            server.Reply(server.status_body(429), 429, {"Retry-After": "9"}), server.Reply(listing()), server.Stream()
        )
        reflector = rig.start()
        assert reflector.synced.wait(PATIENCE_S)
        assert rig.waits.asked == [9.5]

    def test_streams_that_close_early_are_failures(self, rig):
        server = rig.server
        server.script(
            server.Reply(listing()),
            *[server.Stream().close() for _ in range(4)],
            server.Stream(event("ADDED", thing("a", 11))),
        )
        reflector = rig.start()
        rig.heard.wait_for(1)
        assert rig.waits.asked == [0.5, 1, 2, 4]
        assert reflector.stats.failures == {"Closed": 4}

    def test_only_a_stream_that_lived_begins_the_back_off_anew(self, rig):
        server = rig.server
        bad = server.Reply(server.status_body(500), 500)
        lived = server.Stream()
        server.script(
            server.Reply(listing()),
            bad,
            bad,
            lived,
            server.Stream(event("ADDED", thing("a", 12))).drop(),
            server.Stream(),
        )
        rig.start()
        assert lived.opened.wait(PATIENCE_S)
        lived.send(event("ADDED", thing("z", 11)))
        rig.heard.wait_for(1)
        rig.now[0] += LIVED_S
        lived.close()
        server.wait_for(lambda requests: len(requests) == 6)
        # 0.5 and 1 for the two failures, nothing after the stream that lived and ended in order, 0.5 after the drop.
        assert rig.waits.asked == [0.5, 1, 0.5]

    def test_a_list_that_hangs_long_shows_nothing_good(self, rig):
        server = rig.server
        hold = threading.Event()
        slow = server.Reply(server.status_body(500), 500, hold=hold)
        server.script(server.Reply(server.status_body(500), 500), slow, server.Reply(listing()), server.Stream())
        reflector = rig.start()
        server.wait_for(lambda requests: len(requests) == 2)
        rig.now[0] += 60
        hold.set()
        assert reflector.synced.wait(PATIENCE_S)
        assert rig.waits.asked == [0.5, 1]

    def test_a_server_that_is_away_for_a_while(self, make_server, write_kubeconfig, request):
        server = make_server()
        stream = server.Stream()
        server.script(server.Reply(listing(thing("a", 1))), stream)
        rig = Rig(server, Kube.load(write_kubeconfig(server.url)))
        request.addfinalizer(rig.end)
        back = {}

        def gate(count):
            if count == 5:
                back["server"] = make_server(port=server.port)
                back["server"].script(back["server"].Stream(event("ADDED", thing("b", 11))))

        reflector = rig.start(sleep=Waits(gate))
        assert stream.opened.wait(PATIENCE_S)
        server.close()
        rig.heard.wait_for(2)
        assert rig.names(reflector) == ["a", "b"]
        assert reflector.stats.failures["Unreachable"] == 5


class TestBadItems:
    def test_an_unreadable_object_is_left_out_and_counted(self, rig):
        bad = thing("bad", 2, spec={"devices": 7})
        stream = rig.server.Stream(event("ADDED", thing("worse", 11, spec=[])), event("ADDED", thing("b", 12)))
        rig.server.script(rig.server.Reply(listing(thing("a", 1), bad)), stream)
        reflector = rig.start()
        rig.heard.wait_for(2)
        assert rig.names(reflector) == ["a", "b"]
        assert reflector.stats.unreadable == 2

    def test_a_handler_that_fails_stops_neither_the_others_nor_the_next_event(self, rig):
        stream = rig.server.Stream()
        rig.server.script(rig.server.Reply(listing(thing("a", 1))), stream)
        reflector = rig.start()

        def broken(change):
            raise ValueError(change.key)

        last = Heard()
        reflector.synced.wait(PATIENCE_S)
        reflector.subscribe(broken)
        reflector.subscribe(last)
        stream.send(event("ADDED", thing("b", 11)), event("ADDED", thing("c", 12)))
        last.wait_for(2)
        assert reflector.stats.handler_errors == 2
        assert reflector.stats.failures == {}

    def test_events_of_unknown_kinds_and_deletions_of_unknown_objects_change_nothing(self, rig):
        stream = rig.server.Stream(
            event("DELETED", thing("x", 11)), event("RENAMED", thing("y", 12)), event("ADDED", thing("b", 13))
        )
        rig.server.script(rig.server.Reply(listing()), stream)
        reflector = rig.start()
        assert rig.heard.wait_for(1) == [("added", "b")]
        assert rig.names(reflector) == ["b"]


class TestStop:
    def ends_at_once(self, reflector):
        began = time.monotonic()
        reflector.stop()
        assert reflector.join(PATIENCE_S)
        assert time.monotonic() - began < 5

    def test_in_a_silent_watch(self, rig):
        stream = rig.server.Stream()
        rig.server.script(rig.server.Reply(listing()), stream)
        reflector = rig.start()
        assert stream.opened.wait(PATIENCE_S)
        self.ends_at_once(reflector)

    def test_in_a_back_off(self, rig):
        waiting = threading.Event()

        def sleep(stop, _):
            waiting.set()
            return stop.wait(600)

        rig.server.script(rig.server.Reply(rig.server.status_body(500), 500))
        reflector = rig.start(sleep=sleep)
        assert waiting.wait(PATIENCE_S)
        self.ends_at_once(reflector)

    def test_a_list_without_answer_delays_the_end_but_is_told_to_nobody(self, rig):
        hold = threading.Event()
        rig.server.script(rig.server.Reply(listing(thing("a", 1)), hold=hold))
        reflector = rig.start()
        rig.server.wait_for(lambda requests: len(requests) == 1)
        reflector.stop()  # returns at once
        hold.set()
        assert reflector.join(PATIENCE_S)
        assert rig.heard.changes == []
        assert not reflector.synced.is_set()

    def test_before_it_began(self, rig):
        reflector = Reflector(rig.kube, paths.SLICES, ResourceSlice)
        reflector.stop()
        reflector.run()
        assert rig.server.requests == []
        assert reflector.join(0)

    def test_by_a_handler(self, rig):
        rig.server.script(rig.server.Reply(listing(thing("a", 1), thing("b", 2))), rig.server.Stream())
        reflector = Reflector(rig.kube, paths.SLICES, ResourceSlice)
        heard = []
        reflector.subscribe(lambda change: (heard.append(change.key), reflector.stop()))
        reflector.run()
        assert heard == ["a"]


objects = st.dictionaries(
    st.sampled_from("abcdef"), st.tuples(st.sampled_from(["u1", "u2"]), st.integers(1, 3)), max_size=6
).map(lambda d: {k: Object(ObjectMeta(name=k, uid=u, resource_version=str(v))) for k, (u, v) in d.items()})


@given(objects, objects)
def test_differences_turn_the_old_state_into_the_new(old, new):
    state = dict(old)
    for change in differences(old, new):
        assert state.get(change.key) == change.old
        if change.new is None:
            del state[change.key]
        else:
            state[change.key] = change.new
    assert state == new


class World:
    """A collection with a history, served with random faults: what a bad day of an API server looks like."""

    def __init__(self, server, seed):
        self._server, self._rng = server, random.Random(seed)
        self._lock = threading.Lock()
        self.version, self.objects, self._history = 1, {}, []
        self.calm = False

    def end(self):
        """One last change, and all is well from now on."""
        with self._lock:
            self.version += 1
            self.objects["last"] = thing("last", self.version)
            self._history.append((self.version, event("ADDED", self.objects["last"])))
            self.calm = True

    def step(self):
        with self._lock:
            self.version += 1
            name = self._rng.choice("abcdefgh")
            if name in self.objects and self._rng.random() < 0.4:
                body = self.objects.pop(name) | {}
                body["metadata"] = body["metadata"] | {"resourceVersion": str(self.version)}
                self._history.append((self.version, event("DELETED", body)))
            else:
                kind = "MODIFIED" if name in self.objects else "ADDED"
                uid = self.objects[name]["metadata"]["uid"] if name in self.objects else f"u{self.version}"
                self.objects[name] = thing(name, self.version, uid)
                self._history.append((self.version, event(kind, self.objects[name])))

    def answer(self, request):
        server, rng = self._server, self._rng
        with self._lock:
            if not self.calm and rng.random() < 0.3:
                code = rng.choice([410, 429, 500, 503, 504])
                return rng.choice([server.Reply(server.status_body(code), code), server.Reply(drop=True)])
            if not request.is_watch:
                return server.Reply(listing(*self.objects.values(), version=str(self.version)))
            seen = int(request.query["resourceVersion"])
            lines = [line for version, line in self._history if version > seen]
            if self.calm:
                return server.Stream(*lines)
            stream = server.Stream(*lines[: rng.randint(0, len(lines))])
            fault = rng.randint(0, 3)
            if fault == 0:
                stream.send(event("ERROR", server.status_body(410, "Expired")))
            elif fault == 1:
                stream.send(b"\x00garbage\n")
            return stream.drop() if fault == 2 else stream.close()


@pytest.mark.parametrize("seed", range(5))
def test_after_a_bad_day_copy_and_handlers_have_the_servers_state(rig, seed):
    world = World(rig.server, seed)
    rig.server.answer = world.answer
    replayed = {}

    def replay(change):
        assert (replayed.get(change.key) is None) == (change.old is None)
        if change.new is None:
            del replayed[change.key]
        else:
            replayed[change.key] = change.new.metadata.resource_version

    settled = threading.Event()

    def compare(_):
        versions = {name: body["metadata"]["resourceVersion"] for name, body in world.objects.items()}
        copy = {item.metadata.name: item.metadata.resource_version for item in reflector.items()}
        if "last" in replayed and replayed == copy == versions:
            settled.set()

    def step(waits):
        if waits < 60:
            world.step()
        elif not world.calm:
            world.end()

    reflector = rig.start(sleep=Waits(step), handlers=[replay, compare])
    assert settled.wait(PATIENCE_S), (replayed, world.objects)
    assert reflector.stats.handler_errors == 0
