# SPDX-License-Identifier: Apache-2.0
"""The device health stream that kubelet turns into pod status (dra.md 1.1.3, 1.8).

Never sends a part: each message is the whole list, at once on subscription, on every change, and often enough that
kubelet never calls a device unknown because we were silent. Invariant: a stream that nobody reads any more ends
within one interval, so it does not keep a thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import grpc

from aliquot.api.grpc.kubelet.drahealth.v1 import api_pb2 as v1
from aliquot.api.grpc.kubelet.drahealth.v1 import api_pb2_grpc as v1_grpc
from aliquot.api.grpc.kubelet.drahealth.v1alpha1 import api_pb2 as v1alpha1
from aliquot.api.grpc.kubelet.drahealth.v1alpha1 import api_pb2_grpc as v1alpha1_grpc

SUPPORTED: Final = ("v1.DRAResourceHealth", "v1alpha1.DRAResourceHealth")
INTERVAL_S: Final = 8.0
"""Less than the 10 s after which we promise to have spoken; kubelet gives up after 30."""
TIMEOUT_S: Final = 30
MAX_STREAMS: Final = 4
"""One kubelet needs one; a thread is held by each."""
MESSAGE_LIMIT: Final = 1024


@dataclass(frozen=True, slots=True)
class DeviceHealth:
    """One device's state; `problem` is empty for a healthy one."""

    problem: str
    since: int
    """Unix seconds of the last change."""


class HealthBoard:
    """The current state of all devices, and who wants to hear of changes."""

    def __init__(self, pool: str, *, now: Callable[[], float] = time.time, interval_s: float = INTERVAL_S) -> None:
        self._pool = pool
        self._now = now
        self._interval_s = interval_s
        self._changed = threading.Condition()
        self._version = 0
        self._devices: dict[str, DeviceHealth] = {}
        self._stopped = False
        self._streams = threading.BoundedSemaphore(MAX_STREAMS)

    def update(self, problems: Mapping[str, str]) -> None:
        """Device name → its problem, empty for none: all devices that there are."""
        with self._changed:
            at = int(self._now())
            new = {
                name: old if (old := self._devices.get(name)) and old.problem == problem else DeviceHealth(problem, at)
                for name, problem in problems.items()
            }
            if new != self._devices:
                self._devices = new
                self._wake()

    def stop(self) -> None:
        """End all streams."""
        with self._changed:
            self._stopped = True
            self._wake()

    def watch(self, context: grpc.ServicerContext, messages: Any) -> Iterator[Any]:
        """The stream of one subscriber."""
        if not self._streams.acquire(blocking=False):
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"more than {MAX_STREAMS} health streams")
        try:
            # Only the thread that waits may touch the stream; this merely wakes it.
            context.add_callback(self._poke)
            seen = -1
            while context.is_active():
                with self._changed:
                    self._changed.wait_for(
                        lambda: self._version != seen or self._stopped or not context.is_active(),  # noqa: B023
                        self._interval_s,
                    )
                    if self._stopped or not context.is_active():
                        return
                    seen = self._version
                    devices = dict(self._devices)
                yield self._message(messages, devices)
        finally:
            self._streams.release()

    def _poke(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _wake(self) -> None:
        self._version += 1
        self._changed.notify_all()

    def _message(self, messages: Any, devices: Mapping[str, DeviceHealth]) -> Any:
        return messages.NodeWatchResourcesResponse(
            devices=[
                messages.DeviceHealth(
                    device=messages.DeviceIdentifier(pool_name=self._pool, device_name=name),
                    health=messages.UNHEALTHY if state.problem else messages.HEALTHY,
                    last_updated_time=state.since,
                    health_check_timeout_seconds=TIMEOUT_S,
                    message=state.problem[:MESSAGE_LIMIT],
                )
                for name, state in sorted(devices.items())
            ]
        )

    def add_to(self, server: grpc.Server) -> None:
        """Serve both versions."""
        v1_grpc.add_DRAResourceHealthServicer_to_server(_V1(self), server)
        v1alpha1_grpc.add_DRAResourceHealthServicer_to_server(_V1Alpha1(self), server)


class _V1(v1_grpc.DRAResourceHealthServicer):
    def __init__(self, board: HealthBoard) -> None:
        self._board = board

    def NodeWatchResources(self, request: Any, context: grpc.ServicerContext) -> Iterator[Any]:  # noqa: ARG002, N802
        return self._board.watch(context, v1)


class _V1Alpha1(v1alpha1_grpc.DRAResourceHealthServicer):
    def __init__(self, board: HealthBoard) -> None:
        self._board = board

    def NodeWatchResources(self, request: Any, context: grpc.ServicerContext) -> Iterator[Any]:  # noqa: ARG002, N802
        return self._board.watch(context, v1alpha1)
