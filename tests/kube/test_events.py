# SPDX-License-Identifier: Apache-2.0
"""Events: told once, counted when repeated, never in anybody's way."""

from __future__ import annotations

import datetime as dt
import threading
import time

import pytest

from aliquot.kube.backoff import Backoff
from aliquot.kube.events import (
    BURST,
    FORGET_S,
    NOTE_LIMIT,
    QUEUE_LIMIT,
    REFILL_S,
    SERIES_S,
    TRIES,
    EventRecorder,
    Reference,
)
from aliquot.kube.objects import ObjectMeta

CLAIM = Reference.to("resource.k8s.io/v1", "ResourceClaim", ObjectMeta(name="train", namespace="team-a", uid="u1"))
NODE = Reference("v1", "Node", "n1", uid="n-uid")
NOW = dt.datetime(2026, 5, 4, 3, 2, 1, 5, tzinfo=dt.UTC)


class Bench:
    """A recorder whose thread is the test itself: `step` writes what is due."""

    def __init__(self, kube, waits=None):
        self.now = [100.0]
        self.waits = waits if waits is not None else []
        ids = iter(range(10_000))

        def sleep(stop, seconds):
            self.waits.append(seconds)
            return stop.is_set()

        self.recorder = EventRecorder(
            kube,
            component="gpu.aliquot.dev",
            instance="n1",
            clock=lambda: self.now[0],
            now=lambda: NOW + dt.timedelta(seconds=self.now[0]),
            new_id=lambda: str(next(ids)),
            backoff=Backoff(sleep=sleep),
        )

    def say(self, note="no room", regarding=CLAIM, reason="ShareRefused"):
        self.recorder.warning(regarding, reason, note, action="Prepare")
        self.recorder.step()

    def owe(self):
        """Lets the time of the repetitions come."""
        self.now[0] += SERIES_S
        self.recorder.step()


@pytest.fixture
def bench(server, kube):
    server.script(server.Reply({}, 201))
    return Bench(kube)


class TestWriting:
    def test_an_event_as_the_server_gets_it(self, server, bench):
        bench.say()
        (request,) = server.requests
        assert (request.method, request.path) == ("POST", "/apis/events.k8s.io/v1/namespaces/team-a/events")
        assert request.json() == {
            "apiVersion": "events.k8s.io/v1",
            "kind": "Event",
            "metadata": {"name": "train.0", "namespace": "team-a"},
            "eventTime": "2026-05-04T03:03:41.000005Z",
            "reportingController": "gpu.aliquot.dev",
            "reportingInstance": "n1",
            "type": "Warning",
            "reason": "ShareRefused",
            "action": "Prepare",
            "note": "no room",
            "regarding": {
                "apiVersion": "resource.k8s.io/v1",
                "kind": "ResourceClaim",
                "name": "train",
                "namespace": "team-a",
                "uid": "u1",
            },
        }

    def test_an_event_about_a_node_is_in_default(self, server, bench):
        bench.recorder.normal(NODE, "CardsPublished", "4 cards")
        bench.recorder.step()
        (request,) = server.requests
        assert request.path == "/apis/events.k8s.io/v1/namespaces/default/events"
        body = request.json()
        assert body["regarding"] == {"apiVersion": "v1", "kind": "Node", "name": "n1", "uid": "n-uid"}
        assert (body["type"], body["action"]) == ("Normal", "CardsPublished")

    def test_what_is_too_long_is_cut_between_characters(self, server, bench):
        bench.say(note="ä" * 2000, reason="R" * 500)
        body = server.requests[0].json()
        assert len(body["note"].encode()) <= NOTE_LIMIT
        assert body["note"].endswith("ä…")
        assert len(body["reason"]) == 128

    def test_any_text_can_be_told(self, server, bench):
        bench.say(note="\udcff\x00")
        assert len(server.requests) == 1


class TestRepetition:
    def test_the_same_again_is_one_event_with_a_count(self, server, bench):
        for _ in range(5):
            bench.say()
        assert [request.method for request in server.requests] == ["POST"]
        bench.owe()
        assert [request.method for request in server.requests] == ["POST", "PATCH"]
        patch = server.requests[1]
        assert patch.path.endswith("/events/train.0")
        assert patch.json() == {"series": {"count": 5, "lastObservedTime": "2026-05-04T03:03:41.000005Z"}}

    def test_a_count_is_written_once_a_minute_and_only_when_it_grew(self, server, bench):
        bench.say()
        for _ in range(10):
            bench.say()
            bench.now[0] += SERIES_S / 10
        bench.recorder.step()
        bench.now[0] += 10 * SERIES_S
        bench.say("something else")
        assert [request.method for request in server.requests] == ["POST", "PATCH", "POST"]

    def test_after_a_count_was_written_the_next_waits_its_minute(self, server, bench):
        bench.say()
        bench.say()
        bench.owe()
        for _ in range(3):
            bench.say()
        assert [request.method for request in server.requests] == ["POST", "PATCH"]
        bench.owe()
        assert server.requests[-1].json()["series"]["count"] == 5

    def test_another_text_or_object_is_another_event(self, server, bench):
        bench.say("one")
        bench.say("two")
        bench.say("one", regarding=NODE)
        assert [request.method for request in server.requests] == ["POST"] * 3

    def test_after_a_long_silence_it_is_told_anew(self, server, bench):
        bench.say()
        bench.now[0] += FORGET_S
        bench.say()
        assert [request.method for request in server.requests] == ["POST", "POST"]

    def test_an_event_that_expired_on_the_server_is_told_anew(self, server, bench):
        bench.say()
        bench.say()
        server.answer = lambda request: (
            server.Reply({}, 201)
            if request.method == "POST"
            else server.Reply(server.status_body(404, "NotFound"), 404)
        )
        bench.owe()
        assert [request.method for request in server.requests] == ["POST", "PATCH", "POST"]


class TestRestraint:
    def test_one_object_causes_a_burst_and_then_one_event_at_a_time(self, server, bench):
        for number in range(BURST + 10):
            bench.say(f"text {number}")
        assert len(server.requests) == BURST
        assert bench.recorder.stats.dropped == {"rate": 10}
        bench.say("about another", regarding=NODE)
        assert len(server.requests) == BURST + 1
        bench.now[0] += REFILL_S
        bench.say("later 1")
        bench.say("later 2")
        assert len(server.requests) == BURST + 2

    def test_a_full_queue_drops_and_never_waits(self, kube):
        recorder = Bench(kube).recorder
        began = time.monotonic()
        for number in range(QUEUE_LIMIT + 5):
            recorder.normal(NODE, "R", str(number))
        assert time.monotonic() - began < 5
        assert recorder.stats.dropped == {"queue": 5}
        assert recorder.stats.said == QUEUE_LIMIT + 5


class TestTrouble:
    def test_a_server_in_trouble_for_a_while_gets_the_event_in_the_end(self, server, bench):
        bad = server.Reply(server.status_body(503), 503, {"Retry-After": "2"})
        server.script(bad, bad, server.Reply({}, 201))
        bench.say()
        assert len(server.requests) == 3
        assert len(bench.waits) == 2
        assert min(bench.waits) >= 2
        assert bench.recorder.stats.written == 1

    def test_a_server_in_trouble_for_long_costs_the_event_only(self, server, bench):
        server.script(server.Reply(server.status_body(500), 500))
        bench.say()
        assert len(server.requests) == TRIES
        assert bench.recorder.stats.dropped == {"unreachable": 1}
        server.script(server.Reply({}, 201))
        bench.say()
        assert bench.recorder.stats.written == 1

    @pytest.mark.parametrize(("code", "reason"), [(404, "NotFound"), (422, "Invalid"), (403, "Forbidden")])
    def test_a_refusal_is_not_tried_again(self, server, bench, code, reason):
        """A namespace that is going away takes no more events."""
        server.script(server.Reply(server.status_body(code, reason), code))
        bench.say()
        assert len(server.requests) == 1
        assert bench.recorder.stats.dropped == {"refused": 1}

    def test_an_event_whose_answer_was_lost_is_there(self, server, bench):
        server.script(
            server.Reply(drop=True), server.Reply(server.status_body(409, "AlreadyExists"), 409), server.Reply({})
        )
        bench.say()
        assert (bench.recorder.stats.written, bench.recorder.stats.dropped) == (1, {})
        bench.say()
        bench.owe()
        assert server.requests[-1].json()["series"]["count"] == 2

    def test_a_count_that_could_not_be_written_is_still_owed(self, server, bench):
        bench.say()
        bench.say()
        server.script(server.Reply(server.status_body(500), 500))
        bench.owe()
        server.script(server.Reply({}))
        bench.owe()
        assert server.requests[-1].json()["series"]["count"] == 2


class TestThread:
    def test_what_was_said_is_written_and_stop_waits_for_it(self, server, kube):
        hold = threading.Event()
        server.script(server.Reply({}, 201, hold=hold), server.Reply({}, 201))
        recorder = EventRecorder(kube, component="c", instance="i")
        recorder.start()
        recorder.normal(NODE, "A", "one")
        recorder.normal(NODE, "B", "two")
        assert not recorder.flush(0.05)
        hold.set()
        recorder.stop(20)
        assert [request.json()["reason"] for request in server.requests] == ["A", "B"]

    def test_stop_ends_a_back_off_at_once(self, server, kube):
        waiting = threading.Event()

        def sleep(stop, _):
            waiting.set()
            return stop.wait(600)

        server.script(server.Reply(server.status_body(500), 500))
        recorder = EventRecorder(kube, component="c", instance="i", backoff=Backoff(sleep=sleep))
        recorder.start()
        recorder.normal(NODE, "A", "one")
        assert waiting.wait(20)
        began = time.monotonic()
        recorder.stop(0.05)
        assert time.monotonic() - began < 10

    def test_a_recorder_without_a_thread_stops_too(self, kube):
        EventRecorder(kube, component="c", instance="i").stop()
