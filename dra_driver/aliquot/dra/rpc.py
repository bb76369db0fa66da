# SPDX-License-Identifier: Apache-2.0
"""The gRPC face of the engine: both versions of the DRA service on one implementation.

Never fails a whole call for one claim: each claim gets an entry in the answer, with devices or with an error, for a
missing entry fails the pod without a word (dra.md 1.7). Invariant: one claim's slowness is its own: claims of a call
are worked on side by side.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from concurrent.futures import Executor
from typing import Any, Final

import grpc

from aliquot.api import names
from aliquot.api.errors import AliquotError, RequestError
from aliquot.api.grpc.kubelet.dra.v1 import api_pb2 as v1
from aliquot.api.grpc.kubelet.dra.v1 import api_pb2_grpc as v1_grpc
from aliquot.api.grpc.kubelet.dra.v1beta1 import api_pb2 as v1beta1
from aliquot.api.grpc.kubelet.dra.v1beta1 import api_pb2_grpc as v1beta1_grpc
from aliquot.api.log import bound, get_logger
from aliquot.dra.engine import WAIT_S, Engine, Prepared, text_for_event
from aliquot.dra.metrics import Metrics
from aliquot.dra.prepare import ClaimRef
from aliquot.dra.settings import is_uid

log = get_logger(__name__)

SUPPORTED: Final = ("v1.DRAPlugin", "v1beta1.DRAPlugin")
"""Newest first: kubelet takes the first it knows (dra.md 1.4)."""


class _Caller:
    """The engine's view of one gRPC call."""

    def __init__(self, context: grpc.ServicerContext) -> None:
        self._context = context

    def remaining_s(self) -> float:
        left = self._context.time_remaining()
        return WAIT_S if left is None else min(float(left), WAIT_S)

    def waits(self) -> bool:
        return bool(self._context.is_active())


class DraService:
    """What both versions do; `messages` are each version's own."""

    def __init__(self, engine: Engine, metrics: Metrics, executor: Executor) -> None:
        self._engine = engine
        self._metrics = metrics
        self._executor = executor

    def prepare(self, request: Any, context: grpc.ServicerContext, messages: Any) -> Any:
        """NodePrepareResources."""
        caller = _Caller(context)
        response = messages.NodePrepareResourcesResponse()

        def one(claim: Any) -> tuple[tuple[Prepared, ...], str]:
            ref = ClaimRef(uid=claim.uid, namespace=claim.namespace, name=claim.name)
            with bound(claim_uid=ref.uid, claim=f"{ref.namespace}/{ref.name}"):
                return self._counted("prepare", lambda: self._engine.prepare(_checked(ref), caller))

        for claim, (devices, error) in self._each("prepare", request.claims, one):
            answer = response.claims[claim.uid]
            answer.error = error
            for device in devices:
                answer.devices.append(_device(messages, device))
        return response

    def unprepare(self, request: Any, context: grpc.ServicerContext, messages: Any) -> Any:
        """NodeUnprepareResources."""
        caller = _Caller(context)
        response = messages.NodeUnprepareResourcesResponse()

        def one(claim: Any) -> tuple[tuple[Prepared, ...], str]:
            with bound(claim_uid=claim.uid, claim=f"{claim.namespace}/{claim.name}"):
                return self._counted("unprepare", lambda: self._undo(claim.uid, caller))

        for claim, (_, error) in self._each("unprepare", request.claims, one):
            response.claims[claim.uid].error = error
        return response

    def _undo(self, uid: str, caller: _Caller) -> tuple[Prepared, ...]:
        if is_uid(uid):  # nothing can ever have been prepared under another name
            self._engine.unprepare(uid, timeout_s=caller.remaining_s())
        return ()

    def _each(
        self, method: str, claims: Iterable[Any], one: Callable[[Any], tuple[tuple[Prepared, ...], str]]
    ) -> Iterable[tuple[Any, tuple[tuple[Prepared, ...], str]]]:
        """Every claim with its outcome; several at once side by side, in the order kubelet gave."""
        listed = list(claims)
        with self._metrics.request(method):
            if len(listed) == 1:
                return [(listed[0], one(listed[0]))]
            return list(zip(listed, self._executor.map(one, listed), strict=True))

    def _counted(self, operation: str, work: Callable[[], tuple[Prepared, ...]]) -> tuple[tuple[Prepared, ...], str]:
        started = time.monotonic()
        reason = ""
        try:
            return work(), ""
        except AliquotError as err:
            reason = reason_of(err)
            log.warning("claim refused", operation=operation, reason=reason, error=str(err))
            return (), text_for_event(err)
        except Exception as err:
            reason = "bug"
            log.exception("claim failed", operation=operation, reason=reason)
            return (), text_for_event(err)
        finally:
            self._metrics.claim(operation, reason, time.monotonic() - started)


def _checked(ref: ClaimRef) -> ClaimRef:
    if not is_uid(ref.uid):
        raise RequestError(
            f"claim {ref.namespace}/{ref.name} has UID {ref.uid!r}, which is none; report this to kubelet"
        )
    return ref


def reason_of(err: BaseException) -> str:
    """The label under which an error is counted: whose turn it is to do something."""
    for kind in type(err).__mro__:
        name = kind.__name__
        if name in _REASONS:
            return _REASONS[name]
    return "bug"


_REASONS: Final = {
    "RequestError": "request",
    "ClusterError": "cluster",
    "HardwareError": "hardware",
    "ConflictError": "conflict",
    "SettingsError": "settings",
    "InternalError": "internal",
}


def _device(messages: Any, prepared: Prepared) -> Any:
    device = messages.Device(
        request_names=[prepared.request] if prepared.request else [],
        pool_name=prepared.pool,
        device_name=prepared.device,
        cdi_device_ids=[f"{names.CDI_KIND}={prepared.cdi_device}"],
    )
    # Unset and empty differ (dra.md 1.2, M4), and v1beta1 has no such field.
    if prepared.share_id and messages is v1:
        device.share_id = prepared.share_id
    return device


class _V1(v1_grpc.DRAPluginServicer):
    def __init__(self, service: DraService) -> None:
        self._service = service

    def NodePrepareResources(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802
        return self._service.prepare(request, context, v1)

    def NodeUnprepareResources(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802
        return self._service.unprepare(request, context, v1)


class _V1Beta1(v1beta1_grpc.DRAPluginServicer):
    def __init__(self, service: DraService) -> None:
        self._service = service

    def NodePrepareResources(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802
        return self._service.prepare(request, context, v1beta1)

    def NodeUnprepareResources(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802
        return self._service.unprepare(request, context, v1beta1)


def add_to(server: grpc.Server, service: DraService) -> None:
    """Serve both versions."""
    v1_grpc.add_DRAPluginServicer_to_server(_V1(service), server)
    v1beta1_grpc.add_DRAPluginServicer_to_server(_V1Beta1(service), server)
