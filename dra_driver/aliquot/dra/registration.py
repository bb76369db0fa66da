# SPDX-License-Identifier: Apache-2.0
"""The registration service: kubelet finds the socket, asks who we are, and tells whether it took us.

Never does work in GetInfo: kubelet and health checks call it at any time, any number of times. Invariant: what
kubelet said last is what readiness says (dra.md 9, row 13).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import grpc

from aliquot.api import names
from aliquot.api.errors import foreign
from aliquot.api.grpc.kubelet.pluginregistration.v1 import api_pb2, api_pb2_grpc
from aliquot.api.log import get_logger
from aliquot.dra import health, rpc

log = get_logger(__name__)

SUPPORTED: Final = (*rpc.SUPPORTED, *health.SUPPORTED)


class Registration(api_pb2_grpc.RegistrationServicer):
    """What kubelet asks and tells."""

    def __init__(self, endpoint: Path, *, on_status: Callable[[], None] = lambda: None) -> None:
        self._info = api_pb2.PluginInfo(
            type="DRAPlugin", name=names.DRIVER, endpoint=str(endpoint), supported_versions=SUPPORTED
        )
        self._on_status = on_status
        self._lock = threading.Lock()
        self._registered = False
        self._problem = "kubelet has not asked yet"

    @property
    def registered(self) -> bool:
        """Whether kubelet took us."""
        return self._registered

    @property
    def problem(self) -> str:
        """Why not; empty when it did."""
        with self._lock:
            return "" if self._registered else self._problem

    def GetInfo(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: ARG002, N802
        """Who we are."""
        return self._info

    def NotifyRegistrationStatus(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: ARG002, N802
        """What kubelet made of it."""
        with self._lock:
            self._registered = bool(request.plugin_registered)
            self._problem = (
                "" if self._registered else f"kubelet refused: {foreign(request.error) or 'without a reason'}"
            )
        if self._registered:
            log.info("kubelet registered the driver")
        else:
            log.warning("kubelet refused the driver", error=foreign(request.error))
        self._on_status()
        return api_pb2.RegistrationStatusResponse()

    def add_to(self, server: grpc.Server) -> None:
        """Serve it."""
        api_pb2_grpc.add_RegistrationServicer_to_server(self, server)
