# SPDX-License-Identifier: Apache-2.0
"""A DRA plugin that does nothing: the floor beneath every DRA plugin's time in kubelet's metric, on the same machine.

Registers with kubelet and answers each prepare and unprepare at once: no API server asked, nothing written. What
kubelet measures of it is its own waiting for a processor, and gRPC. `python bench/idle_plugin.py DRIVER` (in a node).
"""

from __future__ import annotations

import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc

from aliquot.api.grpc.kubelet.dra.v1 import api_pb2 as v1
from aliquot.api.grpc.kubelet.dra.v1 import api_pb2_grpc as v1_grpc
from aliquot.api.grpc.kubelet.pluginregistration.v1 import api_pb2 as registration
from aliquot.api.grpc.kubelet.pluginregistration.v1 import api_pb2_grpc as registration_grpc

KUBELET = Path("/var/lib/kubelet")


class Idle(v1_grpc.DRAPluginServicer):
    """Says of every claim that it is prepared, without devices."""

    def NodePrepareResources(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: ARG002, N802
        answer = v1.NodePrepareResourcesResponse()
        for claim in request.claims:
            answer.claims[claim.uid].error = ""
        return answer

    def NodeUnprepareResources(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: ARG002, N802
        answer = v1.NodeUnprepareResourcesResponse()
        for claim in request.claims:
            answer.claims[claim.uid].error = ""
        return answer


class Registration(registration_grpc.RegistrationServicer):
    """Tells kubelet where it is."""

    def __init__(self, driver: str, endpoint: Path) -> None:
        self._info = registration.PluginInfo(
            type="DRAPlugin", name=driver, endpoint=str(endpoint), supported_versions=["v1.DRAPlugin"]
        )

    def GetInfo(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: ARG002, N802
        return self._info

    def NotifyRegistrationStatus(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: ARG002, N802
        return registration.RegistrationStatusResponse()


def main() -> int:
    driver = sys.argv[1]
    endpoint = KUBELET / "plugins" / driver / "dra.sock"
    endpoint.parent.mkdir(parents=True, exist_ok=True)
    server = grpc.server(ThreadPoolExecutor(16))
    v1_grpc.add_DRAPluginServicer_to_server(Idle(), server)
    registration_grpc.add_RegistrationServicer_to_server(Registration(driver, endpoint), server)
    for path in (endpoint, KUBELET / "plugins_registry" / f"{driver}-reg.sock"):
        path.unlink(missing_ok=True)
        server.add_insecure_port(f"unix:{path}")
    server.start()
    signal.sigwait({signal.SIGTERM, signal.SIGINT})
    server.stop(None)
    return 0


if __name__ == "__main__":
    sys.exit(main())
