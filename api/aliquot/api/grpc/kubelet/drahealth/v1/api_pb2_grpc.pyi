# SPDX-License-Identifier: Apache-2.0
from collections.abc import Iterator

import grpc

from aliquot.api.grpc.kubelet.drahealth.v1 import api_pb2

class DRAResourceHealthStub:
    def __init__(self, channel: grpc.Channel) -> None: ...
    NodeWatchResources: grpc.UnaryStreamMultiCallable[api_pb2.NodeWatchResourcesRequest, api_pb2.NodeWatchResourcesResponse]

class DRAResourceHealthServicer:
    def NodeWatchResources(self, request: api_pb2.NodeWatchResourcesRequest, context: grpc.ServicerContext) -> Iterator[api_pb2.NodeWatchResourcesResponse]: ...

def add_DRAResourceHealthServicer_to_server(servicer: DRAResourceHealthServicer, server: grpc.Server) -> None: ...
