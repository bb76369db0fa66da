# SPDX-License-Identifier: Apache-2.0
"""A reverse proxy in front of a real API server that does on demand what a real one does on bad days.

Drops or silences watches, answers 410, 429 or 500, is slow. Never changes a good answer and never invents an object.
Invariant: the server sees the caller's own identity (its token, or its certificate through request headers), so
authorization is tested behind the proxy as before it.

Run as `python -m aliquot.e2e.fault_proxy SETTINGS.json`; scripted over its control port (see `faults.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import ssl
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import aiohttp
from aiohttp import web

from aliquot.e2e.faults import Rule

_HOP_BY_HOP: Final = {"connection", "keep-alive", "transfer-encoding", "te", "upgrade", "host", "content-length"}
_REASONS: Final = {
    404: "NotFound",
    409: "Conflict",
    410: "Expired",
    429: "TooManyRequests",
    500: "InternalError",
    503: "ServiceUnavailable",
    504: "Timeout",
}


@dataclass
class _Live:
    """A rule and how often it may still act."""

    rule: Rule
    left: int
    hits: int = 0


@dataclass(eq=False)
class _Watch:
    """An open watch; `cut` ends it without a word, `hush` keeps it open and mute."""

    path: str
    cut: asyncio.Event = field(default_factory=asyncio.Event)
    hush: asyncio.Event = field(default_factory=asyncio.Event)


class Proxy:
    """The proxy's state; everything runs in one event loop."""

    def __init__(self, upstream: str, plain: aiohttp.ClientSession, trusted: aiohttp.ClientSession) -> None:
        """`trusted` shows the proxy's certificate, with which the server believes what its headers say of the caller.

        That certificate would win over a token, so callers with a token, and those with nothing, go through `plain`.
        """
        self._upstream = upstream
        self._plain = plain
        self._trusted = trusted
        self._rules: list[_Live] = []
        self._watches: set[_Watch] = set()
        self._log: list[dict[str, Any]] = []

    async def serve(self, request: web.Request) -> web.StreamResponse:
        """One request of a client: a fault where a rule says so, else the server's own answer."""
        watch = request.query.get("watch") in {"1", "true", "True"}
        rule = self._match(request.method, request.rel_url.raw_path, watch=watch)
        entry = {"method": request.method, "path": request.rel_url.raw_path, "watch": watch, "status": 0}
        entry["at"] = time.monotonic()
        self._log.append(entry)
        if rule is not None and rule.delay_s:
            await asyncio.sleep(rule.delay_s)
        if rule is not None and rule.cut:
            _abort(request)
            entry["status"] = -1
            return web.Response(status=500)
        if rule is not None and rule.status:
            entry["status"] = rule.status
            return _failure(rule)
        body = await request.read()
        headers = _forwarded(request)
        session = self._trusted if "X-Remote-User" in headers else self._plain
        url = self._upstream + request.raw_path
        async with session.request(
            request.method, url, data=body or None, headers=headers, allow_redirects=False
        ) as answer:
            entry["status"] = answer.status
            if watch and answer.status == 200:
                return await self._stream(request, answer)
            content = await answer.read()
            return web.Response(status=answer.status, body=content, headers=_copied(answer))

    async def _stream(self, request: web.Request, answer: aiohttp.ClientResponse) -> web.StreamResponse:
        watch = _Watch(request.path)
        self._watches.add(watch)
        response = web.StreamResponse(status=200, headers=_copied(answer))
        await response.prepare(request)
        pump = asyncio.create_task(self._pump(watch, answer, response))
        cut = asyncio.create_task(watch.cut.wait())
        try:
            await asyncio.wait({pump, cut}, return_when=asyncio.FIRST_COMPLETED)
            if cut.done():
                _abort(request)
        finally:
            self._watches.discard(watch)
            for task in (pump, cut):
                task.cancel()
            with contextlib.suppress(asyncio.CancelledError, aiohttp.ClientError, ConnectionError):
                await pump
        return response

    async def _pump(self, watch: _Watch, answer: aiohttp.ClientResponse, response: web.StreamResponse) -> None:
        async for chunk in answer.content.iter_any():
            if not watch.hush.is_set():
                await response.write(chunk)

    def _match(self, method: str, path: str, *, watch: bool) -> Rule | None:
        for live in self._rules:
            rule = live.rule
            if (
                live.left != 0
                and (not rule.method or rule.method == method)
                and (rule.watch is None or rule.watch is watch)
                and re.search(rule.path, path)
            ):
                live.left -= 1
                live.hits += 1
                return rule
        return None

    async def control(self, request: web.Request) -> web.Response:
        """The control port: `PUT /rules`, `POST /watches` (cut or hush), `GET /state`."""
        if request.path == "/rules" and request.method == "PUT":
            self._rules = [_Live(rule, rule.times) for rule in (Rule(**r) for r in await request.json())]
        elif request.path == "/watches" and request.method == "POST":
            order = await request.json()
            touched = [w for w in self._watches if re.search(order["path"], w.path)]
            for watch in touched:
                (watch.cut if order["what"] == "cut" else watch.hush).set()
            return web.json_response({"watches": len(touched)})
        elif request.path != "/state":
            return web.Response(status=404)
        state = {
            "hits": [live.hits for live in self._rules],
            "watches": sorted(w.path for w in self._watches),
            "requests": self._log,
        }
        return web.json_response(state)


def _abort(request: web.Request) -> None:
    if request.transport is not None:
        request.transport.abort()


def _failure(rule: Rule) -> web.Response:
    reason = _REASONS.get(rule.status, "")
    status = {
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": "Failure",
        "message": rule.message or f"injected {rule.status}",
        "reason": reason,
        "code": rule.status,
    }
    headers = {}
    if rule.retry_after_s is not None:
        headers["Retry-After"] = str(rule.retry_after_s)
        status["details"] = {"retryAfterSeconds": rule.retry_after_s}
    if rule.status == 410 and rule.watch:
        # The way a server says it in a watch that it had already accepted.
        return web.json_response({"type": "ERROR", "object": status}, status=200)
    return web.json_response(status, status=rule.status, headers=headers)


def _forwarded(request: web.Request) -> dict[str, str]:
    """The caller's headers, and who it is where it came with a certificate instead of a token."""
    headers = {
        k: v
        for k, v in request.headers.items()
        if k.lower() not in _HOP_BY_HOP and not k.lower().startswith("x-remote-")
    }
    certificate = request.transport.get_extra_info("peercert") if request.transport is not None else None
    if certificate and "Authorization" not in request.headers:
        subject = [pair for part in certificate["subject"] for pair in part]
        headers["X-Remote-User"] = next(value for key, value in subject if key == "commonName")
        groups = [value for key, value in subject if key == "organizationName"]
        # One group is all that the identities of a test need; a dictionary cannot hold a header twice.
        if groups:
            headers["X-Remote-Group"] = groups[0]
    return headers


def _copied(answer: aiohttp.ClientResponse) -> dict[str, str]:
    dropped = _HOP_BY_HOP | {"content-encoding"}
    return {k: v for k, v in answer.headers.items() if k.lower() not in dropped}


def _session(context: ssl.SSLContext) -> aiohttp.ClientSession:
    connector = aiohttp.TCPConnector(ssl=context, limit=0)
    return aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None))


async def _main(settings: dict[str, Any]) -> None:
    unknown = ssl.create_default_context(cafile=settings["ca"])
    trusted = ssl.create_default_context(cafile=settings["ca"])
    trusted.load_cert_chain(settings["certificate"], settings["key"])
    from_client = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=settings["ca"])
    from_client.load_cert_chain(settings["certificate"], settings["key"])
    from_client.verify_mode = ssl.CERT_OPTIONAL
    async with _session(unknown) as plain, _session(trusted) as speaking_for_others:
        proxy = Proxy(settings["upstream"], plain, speaking_for_others)
        for handler, host, port, context in (
            (proxy.serve, settings["bind"], settings["port"], from_client),
            (proxy.control, "127.0.0.1", settings["control_port"], None),
        ):
            application = web.Application(client_max_size=64 << 20)
            application.router.add_route("*", "/{path:.*}", handler)
            runner = web.AppRunner(application, access_log=None, shutdown_timeout=0)
            await runner.setup()
            await web.TCPSite(runner, host, port, ssl_context=context).start()
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_main(json.loads(Path(sys.argv[1]).read_text())))
