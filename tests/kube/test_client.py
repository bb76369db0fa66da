# SPDX-License-Identifier: Apache-2.0
"""The client over a socket: what it sends, what it makes of answers, faults and hanging connections."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import pytest

from aliquot.kube import paths
from aliquot.kube.backoff import Backoff
from aliquot.kube.client import Kube
from aliquot.kube.credentials import find
from aliquot.kube.errors import (
    AlreadyExists,
    Conflict,
    Forbidden,
    Gone,
    NotFound,
    ServerError,
    TooManyRequests,
    Unauthorized,
    Unreachable,
)
from aliquot.kube.objects import Document, ResourceSlice, ServerVersion
from aliquot.kube.writes import TRIES, change_object


def page(*names, version="5", more=""):
    items = [{"metadata": {"name": name, "resourceVersion": "1"}} for name in names]
    return {"metadata": {"resourceVersion": version, "continue": more}, "items": items}


class TestRequest:
    def test_what_is_sent(self, server, write_kubeconfig):
        kube = Kube.load(write_kubeconfig(server.url, {"token": "secret"}), user_agent="aliquot-dra-driver/1.0")
        server.script(server.Reply({"a": 1}))
        answer = kube.request("POST", "/apis/x/v1/y", query=[("dryRun", "All"), ("a", "b c&d")], body={"k": [1, None]})
        assert (answer.status, answer.json()) == (200, {"a": 1})
        (request,) = server.requests
        assert (request.method, request.path, request.query) == (
            "POST",
            "/apis/x/v1/y",
            {"dryRun": "All", "a": "b c&d"},
        )
        assert request.json() == {"k": [1, None]}
        assert request.headers["Authorization"] == "Bearer secret"
        assert request.headers["Content-Type"] == request.headers["Accept"] == "application/json"
        assert request.headers["User-Agent"] == "aliquot-dra-driver/1.0"

    def test_a_struct_is_decoded(self, server, kube):
        server.script(server.Reply({"major": "1", "minor": "36", "gitVersion": "v1.36.3", "platform": "x"}))
        assert kube.get(paths.VERSION, ServerVersion).git_version == "v1.36.3"

    @pytest.mark.parametrize("body", [b"", b"<html>", b"[1]", b"\xff"])
    def test_a_success_that_is_no_object_is_the_servers_error(self, server, kube, body):
        server.script(server.Reply(body))
        with pytest.raises(ServerError, match="not the JSON expected"):
            kube.get_json(paths.SLICES)

    def test_an_error_status_is_raised_with_what_was_asked(self, server, kube):
        server.script(server.Reply(server.status_body(403, "Forbidden", "no"), 403))
        with pytest.raises(Forbidden, match=r"not allowed to get nodes n1: .*verbs \[\"get\"\]"):
            kube.get_json(paths.node("n1"))

    def test_too_many_requests_says_how_long(self, server, kube):
        server.script(server.Reply(server.status_body(429), 429, {"Retry-After": "4"}))
        with pytest.raises(TooManyRequests) as refused:
            kube.get_json(paths.SLICES)
        assert refused.value.retry_after_s == 4
        assert len(server.requests) == 1  # nothing below waits or tries again by itself

    def test_a_redirect_is_not_followed_with_our_token(self, server, make_server, write_kubeconfig):
        elsewhere = make_server()
        server.script(server.Reply(b"", 302, {"Location": elsewhere.url + "/x"}))
        with pytest.raises(ServerError):
            Kube.load(write_kubeconfig(server.url, {"token": "secret"})).get_json(paths.SLICES)
        assert elsewhere.requests == []

    def test_many_threads_share_one_client(self, server, kube):
        server.script(server.Reply({"ok": True}))
        failed = []

        def work():
            try:
                for _ in range(20):
                    assert kube.get_json("/x")["ok"]
            except BaseException as error:
                failed.append(error)

        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert failed == []
        assert len(server.requests) == 160


class TestNoAnswer:
    def test_nobody_listens(self, make_server, write_kubeconfig):
        server = make_server()
        kube = Kube.load(write_kubeconfig(server.url))
        server.close()
        with pytest.raises(Unreachable, match=rf"cannot list .*{server.port}.*refused"):
            kube.get_json(paths.SLICES)

    def test_a_silent_server_costs_the_read_timeout_only(self, server, kube):
        hold = threading.Event()
        server.script(server.Reply(hold=hold))
        began = time.monotonic()
        with pytest.raises(Unreachable) as silent:
            kube.request("GET", "/x", timeout=(1, 0.2))
        assert silent.value.reason == "ReadTimeoutError"
        assert time.monotonic() - began < 10
        assert len(server.requests) == 1
        hold.set()

    def test_a_get_on_a_connection_the_server_had_closed_is_asked_again(self, server, kube):
        server.script(server.Reply({}), server.Reply(drop=True), server.Reply({"second": True}))
        kube.get_json("/x")
        assert kube.get_json("/x") == {"second": True}

    def test_a_write_on_a_broken_connection_is_not(self, server, kube):
        server.script(server.Reply(drop=True), server.Reply({}))
        with pytest.raises(Unreachable):
            kube.create("/x", {})
        assert len(server.requests) == 1

    def test_a_server_that_always_drops_is_unreachable(self, server, kube):
        server.script(server.Reply(drop=True))
        with pytest.raises(Unreachable):
            kube.get_json("/x")
        assert len(server.requests) == 2

    def test_the_same_client_works_once_the_server_is_back(self, make_server, write_kubeconfig):
        server = make_server()
        kube = Kube.load(write_kubeconfig(server.url))
        server.close()
        with pytest.raises(Unreachable):
            kube.get_json("/x")
        again = make_server(port=server.port)
        again.script(again.Reply({"back": 1}))
        assert kube.get_json("/x") == {"back": 1}


class TestListAll:
    def test_pages_are_followed(self, server, kube):
        server.script(
            server.Reply(page("a", "b", more="t1")), server.Reply(page("c", more="t2")), server.Reply(page("d"))
        )
        listing = kube.list_all(paths.SLICES, ResourceSlice, query=[("fieldSelector", "spec.nodeName=n")])
        assert [item.metadata.name for item in listing.items] == ["a", "b", "c", "d"]
        assert (listing.resource_version, listing.problems) == ("5", [])
        assert [request.query.get("continue") for request in server.requests] == [None, "t1", "t2"]
        assert {request.query["limit"] for request in server.requests} == {"500"}
        assert {request.query["fieldSelector"] for request in server.requests} == {"spec.nodeName=n"}

    def test_a_place_the_server_forgot_means_everything_at_once(self, server, kube):
        gone = server.Reply(server.status_body(410, "Expired"), 410)
        server.script(server.Reply(page("a", more="t1")), gone, server.Reply(page("a", "b", version="9")))
        listing = kube.list_all(paths.SLICES, Document)
        assert [item.metadata.name for item in listing.items] == ["a", "b"]
        assert listing.resource_version == "9"
        assert "limit" not in server.requests[2].query

    def test_a_server_that_forgets_always_is_an_error(self, server, kube):
        server.script(server.Reply(server.status_body(410, "Expired"), 410))
        with pytest.raises(Gone):
            kube.list_all(paths.SLICES, Document)
        assert len(server.requests) == 2

    def test_an_unreadable_item_is_left_out_and_named(self, server, kube):
        listed = page("a", "b")
        listed["items"][0]["spec"] = {"devices": "none"}
        server.script(server.Reply(listed))
        listing = kube.list_all(paths.SLICES, ResourceSlice)
        assert [item.metadata.name for item in listing.items] == ["b"]
        assert listing.problems[0].startswith("a: ")

    @pytest.mark.parametrize("body", [{}, {"kind": "Status"}, [1], b"<html>"])
    def test_what_is_no_list_is_the_servers_error(self, server, kube, body):
        server.script(server.Reply(body))
        with pytest.raises(ServerError, match="list resourceslices"):
            kube.list_all(paths.SLICES, ResourceSlice)

    def test_a_stop_between_pages_ends_it(self, server, kube):
        server.script(server.Reply(page("a", more="t")))
        kube.list_all(paths.SLICES, Document, keep_on=lambda: len(server.requests) < 3)
        assert len(server.requests) == 3


class TestWrites:
    @pytest.mark.parametrize(
        ("call", "method", "content_type", "query"),
        [
            (
                lambda k: k.create("/x", {"a": 1}, query=[("dryRun", "All")]),
                "POST",
                "application/json",
                {"dryRun": "All"},
            ),
            (lambda k: k.replace("/x", {"a": 1}), "PUT", "application/json", {}),
            (lambda k: k.merge_patch("/x", {"a": 1}), "PATCH", "application/merge-patch+json", {}),
            (lambda k: k.json_patch("/x", [{"op": "test"}]), "PATCH", "application/json-patch+json", {}),
            (
                lambda k: k.apply("/x", {"a": 1}, manager="me"),
                "PATCH",
                "application/apply-patch+yaml",
                {"fieldManager": "me", "force": "true"},
            ),
            (
                lambda k: k.apply("/x", {"a": 1}, manager="me", force=False),
                "PATCH",
                "application/apply-patch+yaml",
                {"fieldManager": "me", "force": "false"},
            ),
        ],
    )
    def test_method_content_type_and_query(self, server, kube, call, method, content_type, query):
        server.script(server.Reply({"stored": True}, 201))
        assert call(kube) == {"stored": True}
        (request,) = server.requests
        assert (request.method, request.headers["Content-Type"], request.query) == (method, content_type, query)
        assert request.json() in ({"a": 1}, [{"op": "test"}])

    def test_a_delete_says_which_object_is_meant(self, server, kube):
        server.script(server.Reply({"status": "Success"}))
        assert kube.delete("/x/a", uid="u", resource_version="3")
        assert server.requests[0].json()["preconditions"] == {"uid": "u", "resourceVersion": "3"}
        assert kube.delete("/x/a")
        assert "preconditions" not in server.requests[1].json()

    def test_a_delete_of_what_is_gone_is_no_error(self, server, kube):
        server.script(server.Reply(server.status_body(404, "NotFound"), 404))
        assert not kube.delete("/x/a")

    def test_an_object_that_exists(self, server, kube):
        server.script(server.Reply(server.status_body(409, "AlreadyExists"), 409))
        with pytest.raises(AlreadyExists):
            kube.create("/x", {})


def instant() -> Backoff:
    return Backoff(sleep=lambda stop, _: stop.is_set())


STORED = {"metadata": {"name": "a", "resourceVersion": "1"}, "newerField": {"kept": [1]}, "mine": 0}


class TestChangeObject:
    @staticmethod
    def set_mine(body):
        body["mine"] = 1
        return True

    def test_unknown_fields_and_the_version_go_back(self, server, kube):
        server.answer = lambda request: server.Reply(STORED if request.method == "GET" else request.json())
        assert change_object(kube, "/x/a", self.set_mine, stop=threading.Event()) == STORED | {"mine": 1}
        assert server.requests[1].json() == STORED | {"mine": 1}

    def test_nothing_to_change_writes_nothing(self, server, kube):
        server.script(server.Reply(STORED))
        assert change_object(kube, "/x/a", lambda _: False, stop=threading.Event()) == STORED
        assert [request.method for request in server.requests] == ["GET"]

    def test_a_conflict_reads_again_and_writes_what_is_there_then(self, server, kube):
        conflicts = [1, 1]
        reads = iter(range(1, 10))

        def answer(request):
            if request.method == "GET":
                return server.Reply({"metadata": {"resourceVersion": str(next(reads))}})
            if conflicts:
                conflicts.pop()
                return server.Reply(server.status_body(409, "Conflict"), 409)
            return server.Reply(request.json())

        server.answer = answer
        stored = change_object(kube, "/x/a", self.set_mine, stop=threading.Event(), backoff=instant())
        assert stored == {"metadata": {"resourceVersion": "3"}, "mine": 1}

    def test_others_that_are_always_faster_are_an_error_in_the_end(self, server, kube):
        server.answer = lambda request: server.Reply(
            *((STORED, 200) if request.method == "GET" else (server.status_body(409, "Conflict"), 409))
        )
        with pytest.raises(Conflict):
            change_object(kube, "/x/a", self.set_mine, stop=threading.Event(), backoff=instant())
        assert len(server.requests) == 2 * TRIES

    def test_a_stop_ends_the_tries(self, server, kube):
        server.answer = lambda request: server.Reply(
            *((STORED, 200) if request.method == "GET" else (server.status_body(409, "Conflict"), 409))
        )
        stop = threading.Event()
        stop.set()
        with pytest.raises(Conflict):
            change_object(kube, "/x/a", self.set_mine, stop=stop)
        assert len(server.requests) == 2


class TestStream:
    def test_lines_however_they_are_cut(self, server, kube):
        server.script(server.Stream(b'{"a":', b'1}\n{"b":2}\n\n{"c', b'":3}\n').close())
        with kube.stream("/x") as stream:
            assert list(stream.lines()) == [b'{"a":1}', b'{"b":2}', b'{"c":3}']

    def test_an_answer_without_chunks(self, server, kube):
        server.script(server.Reply(b"one\ntwo\n"))
        with kube.stream("/x") as stream:
            assert list(stream.lines()) == [b"one", b"two"]
            stream.abort()

    def test_a_silent_answer_on_a_connection_that_will_close_can_be_aborted(self, server, kube):
        """The connection has let go of its socket then; only the answer still holds it."""
        script = server.Stream(b"one\n", headers={"Connection": "close"})
        server.script(script)
        with kube.stream("/x") as stream:
            lines = stream.lines()
            assert next(lines) == b"one"
            threading.Timer(0.05, stream.abort).start()
            assert list(lines) == []

    def test_an_error_status_is_raised_when_it_is_opened(self, server, kube):
        server.script(server.Reply(server.status_body(410, "Expired", "too old"), 410))
        with pytest.raises(Gone, match="too old"):
            kube.stream("/x")

    def test_a_line_arrives_when_it_is_sent_not_when_more_follows(self, server, kube):
        script = server.Stream(b"one\n")
        server.script(script)
        with kube.stream("/x") as stream:
            lines = stream.lines()
            assert next(lines) == b"one"
            script.send(b"two\n")
            assert next(lines) == b"two"

    def test_a_broken_connection_is_unreachable(self, server, kube):
        server.script(server.Stream(b"one\n").drop())
        with kube.stream("/x") as stream, pytest.raises(Unreachable, match="connection broke"):
            list(stream.lines())

    def test_silence_is_unreachable(self, server, kube):
        server.script(server.Stream(b"one\n"))
        with kube.stream("/x", timeout=(1, 0.2)) as stream, pytest.raises(Unreachable):
            list(stream.lines())

    def test_a_line_without_end_is_refused(self, server, kube):
        script = server.Stream()
        server.script(script)
        chunk = b"x" * (1 << 20)
        script.send(*[chunk] * 40)
        with kube.stream("/x") as stream, pytest.raises(ServerError, match="no event"):
            list(stream.lines())

    def test_an_abort_from_another_thread_ends_a_waiting_reader_at_once(self, server, kube):
        script = server.Stream(b"one\n")
        server.script(script)
        with kube.stream("/x") as stream:
            lines = stream.lines()
            assert next(lines) == b"one"
            threading.Timer(0.05, stream.abort).start()
            began = time.monotonic()
            assert list(lines) == []
            assert time.monotonic() - began < 10
        stream.abort()  # harmless when it is over

    def test_nothing_is_given_out_after_an_abort(self, server, kube):
        server.script(server.Stream(b"one\ntwo\n"))
        with kube.stream("/x") as stream:
            lines = stream.lines()
            assert next(lines) == b"one"
            stream.abort()
            assert list(lines) == []


class TestExpiredCredentials:
    def test_a_refused_token_is_read_again_and_the_request_repeated(self, server, write_kubeconfig, tmp_path):
        token = tmp_path / "token"
        token.write_text("old")
        clock = [0.0]
        path = write_kubeconfig(server.url, {"tokenFile": str(token)})
        kube = Kube(find(path), clock=lambda: clock[0])
        server.answer = lambda request: (
            server.Reply({"ok": request.json()})
            if request.headers["Authorization"] == "Bearer new"
            else server.Reply(server.status_body(401, "Unauthorized"), 401)
        )
        token.write_text("new")
        clock[0] = 60.0
        assert kube.create("/x", {"a": 1}) == {"ok": {"a": 1}}
        assert [request.headers["Authorization"] for request in server.requests] == ["Bearer old", "Bearer new"]

    def test_a_server_that_refuses_us_is_not_asked_twice_each_time(self, server, write_kubeconfig):
        clock = [60.0]
        kube = Kube(find(write_kubeconfig(server.url, {"token": "x"})), clock=lambda: clock[0])
        server.script(server.Reply(server.status_body(401, "Unauthorized", "who?"), 401))
        for _ in range(3):
            with pytest.raises(Unauthorized, match=r"does not accept our credentials.*who\?"):
                kube.get_json("/x")
        assert len(server.requests) == 3
        clock[0] += 11
        with pytest.raises(Unauthorized):
            kube.stream("/x")
        assert len(server.requests) == 5  # read afresh once in ten seconds


def test_importing_the_client_does_not_import_the_official_package():
    """It costs 0.1 to 0.4 s and 40 MiB, and is needed only once credentials are read."""
    code = "import sys, aliquot.kube.client, aliquot.kube.reflector; print('kubernetes' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_loading_imports_no_model_of_the_newest_package(write_kubeconfig):
    """37 imports its thousand models when asked for; we never ask (36 always imports them)."""
    path = write_kubeconfig("http://127.0.0.1:1")
    code = (
        "import sys, pathlib, aliquot.kube.client as c;"
        f"c.Kube.load(pathlib.Path({str(path)!r}));"
        "import kubernetes as k;"
        "print(k.__version__.split('.')[0], sum(m.startswith('kubernetes.client.models.') for m in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    major, models = map(int, done.stdout.split())
    assert major == 36 or models == 0


def test_not_found_of_a_whole_api(server, kube):
    server.script(server.Reply(b"404 page not found\n", 404))
    with pytest.raises(NotFound, match="404 page not found"):
        kube.list_all(paths.SLICES, Document)
