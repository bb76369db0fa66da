# SPDX-License-Identifier: Apache-2.0
"""The checked-in gRPC stubs: up to date, importable together, on the wire what kubelet speaks (dra.md 1.1, 1.2)."""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
import sys
from concurrent import futures
from pathlib import Path

import grpc
import pytest

ROOT = Path(__file__).resolve().parents[2]
APIS = [
    "deviceplugin.v1beta1",
    "dra.v1",
    "dra.v1beta1",
    "drahealth.v1",
    "drahealth.v1alpha1",
    "pluginregistration.v1",
    "podresources.v1",
]
PREFIX = "aliquot.api.grpc.kubelet"


def messages(api: str):
    return importlib.import_module(f"{PREFIX}.{api}.api_pb2")


def services(api: str):
    return importlib.import_module(f"{PREFIX}.{api}.api_pb2_grpc")


def generator():
    spec = importlib.util.spec_from_file_location("aliquot_generate", ROOT / "api" / "generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class TestGenerated:
    def test_regenerating_changes_nothing(self):
        pytest.importorskip("grpc_tools", reason="grpcio-tools is in the `generate` group")
        assert generator().differences(generator().generate()) == []

    def test_a_changed_stub_is_named(self, tmp_path):
        module = generator()
        module.STUB_ROOT = tmp_path
        files = {Path("a.py"): "1\n", Path("b.py"): "2\n"}
        module.write(files)
        (tmp_path / "a.py").write_text("changed\n")
        (tmp_path / "c.py").write_text("stray\n")
        assert module.differences(files) == ["a.py", "c.py"]
        module.write(files)
        assert module.differences(files) == []

    def test_another_compiler_is_refused(self, capsys):
        module = generator()
        module.COMPILER = "0.0.1"
        assert module.main(["--check"]) == 2
        assert "grpcio-tools 0.0.1" in capsys.readouterr().err

    def test_every_api_has_a_proto_file_and_no_other_has_stubs(self):
        protos = {
            p.parent.relative_to(ROOT / "api/proto/kubelet").as_posix() for p in (ROOT / "api/proto").rglob("*.proto")
        }
        assert protos == {api.replace(".", "/") for api in APIS}


class TestImports:
    def test_m1_m3_all_apis_load_in_one_process_without_a_warning(self):
        """A fresh interpreter, so that no other test has loaded half of them before."""
        lines = [f"import {PREFIX}.{api}.api_pb2, {PREFIX}.{api}.api_pb2_grpc" for api in APIS]
        code = "\n".join([*lines, "import sys; assert 'kubelet' not in sys.modules"])
        done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr

    def test_m1_every_descriptor_has_a_path_of_its_own(self):
        names = [messages(api).DESCRIPTOR.name for api in APIS]
        assert len(set(names)) == len(APIS)

    def test_m2_registration_is_compiled_in_one_version_only(self):
        folders = [p.name for p in (ROOT / "api/proto/kubelet/pluginregistration").iterdir()]
        assert folders == ["v1"]


def wire_format(api: str) -> dict[str, dict[str, int]]:
    return {
        name: {field.name: field.number for field in message.fields}
        for name, message in messages(api).DESCRIPTOR.message_types_by_name.items()
    }


class TestWire:
    @pytest.mark.parametrize("version", ["v1", "v1beta1"])
    def test_dra_fields_are_those_of_kubelet(self, version):
        wire = wire_format(f"dra.{version}")
        assert wire["Claim"] == {"namespace": 1, "uid": 2, "name": 3}
        device = {"request_names": 1, "pool_name": 2, "device_name": 3, "cdi_device_ids": 4}
        assert wire["Device"] == (device | {"share_id": 5} if version == "v1" else device)
        assert wire["NodePrepareResourceResponse"] == {"devices": 1, "error": 2}
        assert wire["NodeUnprepareResourceResponse"] == {"error": 1}
        for name in ("NodePrepareResources", "NodeUnprepareResources"):
            assert wire[f"{name}Request"] == wire[f"{name}Response"] == {"claims": 1}

    def test_registration_fields_are_those_of_kubelet(self):
        wire = wire_format("pluginregistration.v1")
        assert wire["PluginInfo"] == {"type": 1, "name": 2, "endpoint": 3, "supported_versions": 4}
        assert wire["RegistrationStatus"] == {"plugin_registered": 1, "error": 2}

    @pytest.mark.parametrize("version", ["v1", "v1alpha1"])
    def test_health_fields_are_those_of_kubelet(self, version):
        module = messages(f"drahealth.{version}")
        assert dict(module.HealthStatus.items()) == {"UNKNOWN": 0, "HEALTHY": 1, "UNHEALTHY": 2}
        assert wire_format(f"drahealth.{version}")["DeviceHealth"] == {
            "device": 1,
            "health": 2,
            "last_updated_time": 3,
            "health_check_timeout_seconds": 4,
            "message": 5,
        }

    def test_device_plugin_fields_are_those_of_kubelet(self):
        wire = wire_format("deviceplugin.v1beta1")
        assert wire["RegisterRequest"] == {"version": 1, "endpoint": 2, "resource_name": 3, "options": 4}
        assert wire["Device"] == {"ID": 1, "health": 2, "topology": 3}
        assert wire["ContainerAllocateResponse"] == {
            "envs": 1,
            "mounts": 2,
            "devices": 3,
            "annotations": 4,
            "cdi_devices": 5,
        }
        assert wire["Mount"] == {"container_path": 1, "host_path": 2, "read_only": 3}
        assert wire["DeviceSpec"] == {"container_path": 1, "host_path": 2, "permissions": 3}
        assert wire["ContainerPreferredAllocationRequest"] == {
            "available_deviceIDs": 1,
            "must_include_deviceIDs": 2,
            "allocation_size": 3,
        }

    def test_pod_resources_fields_are_those_of_kubelet(self):
        wire = wire_format("podresources.v1")
        assert wire["ContainerResources"]["dynamic_resources"] == 5
        assert wire["DynamicResource"] == {"claim_name": 2, "claim_namespace": 3, "claim_resources": 4}
        assert wire["ClaimResource"] == {
            "cdi_devices": 1,
            "driver_name": 2,
            "pool_name": 3,
            "device_name": 4,
            "share_id": 5,
        }

    @pytest.mark.parametrize(
        ("api", "service", "methods"),
        [
            ("dra.v1", "k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin", ["NodePrepareResources", "NodeUnprepareResources"]),
            (
                "dra.v1beta1",
                "k8s.io.kubelet.pkg.apis.dra.v1beta1.DRAPlugin",
                ["NodePrepareResources", "NodeUnprepareResources"],
            ),
            ("pluginregistration.v1", "pluginregistration.Registration", ["GetInfo", "NotifyRegistrationStatus"]),
            ("drahealth.v1", "v1.DRAResourceHealth", ["NodeWatchResources"]),
            ("drahealth.v1alpha1", "v1alpha1.DRAResourceHealth", ["NodeWatchResources"]),
            ("deviceplugin.v1beta1", "v1beta1.Registration", ["Register"]),
            (
                "deviceplugin.v1beta1",
                "v1beta1.DevicePlugin",
                ["GetDevicePluginOptions", "ListAndWatch", "GetPreferredAllocation", "Allocate", "PreStartContainer"],
            ),
            ("podresources.v1", "v1.PodResourcesLister", ["List", "GetAllocatableResources", "Get"]),
        ],
    )
    def test_method_paths_are_those_of_kubelet(self, api, service, methods):
        descriptor = messages(api).DESCRIPTOR.services_by_name[service.rpartition(".")[2]]
        assert descriptor.full_name == service
        assert [method.name for method in descriptor.methods] == methods

    def test_m4_unset_and_empty_share_id_differ(self):
        device = messages("dra.v1").Device
        assert not device().HasField("share_id")
        assert device(share_id="").HasField("share_id")
        assert not device.FromString(device().SerializeToString()).HasField("share_id")
        assert device.FromString(device(share_id="").SerializeToString()).HasField("share_id")

    def test_v1beta1_reads_v1_and_skips_share_id(self):
        new = messages("dra.v1").Device(pool_name="n/gpu", device_name="gpu-0", share_id="s")
        old = messages("dra.v1beta1").Device.FromString(new.SerializeToString())
        assert (old.pool_name, old.device_name) == ("n/gpu", "gpu-0")

    def test_m5_touching_a_key_makes_an_entry_on_the_wire(self):
        pb = messages("dra.v1")
        reply = pb.NodePrepareResourcesResponse()
        _ = reply.claims["uid-1"]
        assert list(pb.NodePrepareResourcesResponse.FromString(reply.SerializeToString()).claims) == ["uid-1"]


def test_a_call_over_a_socket_reaches_the_servicer(tmp_path):
    """The generated client and servicer fit together over a real unix socket."""
    pb, rpc = messages("dra.v1"), services("dra.v1")

    class Plugin(rpc.DRAPluginServicer):
        def NodePrepareResources(self, request, context):
            reply = pb.NodePrepareResourcesResponse()
            for claim in request.claims:
                reply.claims[claim.uid].error = f"no {claim.name}"
            return reply

    server = grpc.server(futures.ThreadPoolExecutor(max_workers=1))
    rpc.add_DRAPluginServicer_to_server(Plugin(), server)
    address = f"unix:{tmp_path}/dra.sock"
    server.add_insecure_port(address)
    server.start()
    try:
        with grpc.insecure_channel(address) as channel:
            request = pb.NodePrepareResourcesRequest(claims=[pb.Claim(namespace="n", uid="u", name="c")])
            reply = rpc.DRAPluginStub(channel).NodePrepareResources(request, timeout=10)
        assert reply.claims["u"].error == "no c"
    finally:
        server.stop(grace=None).wait(10)
