# SPDX-License-Identifier: Apache-2.0
from collections.abc import Iterator

import grpc

from aliquot.api.grpc.kubelet.dra.v1 import api_pb2

class DRAPluginStub:
    def __init__(self, channel: grpc.Channel) -> None: ...
    NodePrepareResources: grpc.UnaryUnaryMultiCallable[api_pb2.NodePrepareResourcesRequest, api_pb2.NodePrepareResourcesResponse]
    NodeUnprepareResources: grpc.UnaryUnaryMultiCallable[api_pb2.NodeUnprepareResourcesRequest, api_pb2.NodeUnprepareResourcesResponse]

class DRAPluginServicer:
    def NodePrepareResources(self, request: api_pb2.NodePrepareResourcesRequest, context: grpc.ServicerContext) -> api_pb2.NodePrepareResourcesResponse: ...
    def NodeUnprepareResources(self, request: api_pb2.NodeUnprepareResourcesRequest, context: grpc.ServicerContext) -> api_pb2.NodeUnprepareResourcesResponse: ...

def add_DRAPluginServicer_to_server(servicer: DRAPluginServicer, server: grpc.Server) -> None: ...
