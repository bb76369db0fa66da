# SPDX-License-Identifier: Apache-2.0
"""Sockets of instances: names that fit, living ones that stay, dead ones that go, and the health stream on them."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from pathlib import Path

import dra_rig
import grpc
import pytest

from aliquot.api.errors import ConflictError, SettingsError
from aliquot.api.grpc.kubelet.drahealth.v1 import api_pb2 as v1
from aliquot.api.grpc.kubelet.drahealth.v1 import api_pb2_grpc as v1_grpc
from aliquot.api.grpc.kubelet.drahealth.v1alpha1 import api_pb2 as v1alpha1
from aliquot.api.grpc.kubelet.drahealth.v1alpha1 import api_pb2_grpc as v1alpha1_grpc
from aliquot.api.grpc.kubelet.pluginregistration.v1 import api_pb2 as registration
from aliquot.api.grpc.kubelet.pluginregistration.v1 import api_pb2_grpc as registration_grpc
from aliquot.dra.health import HealthBoard
from aliquot.dra.registration import Registration
from aliquot.dra.serving import SocketServer
from aliquot.dra.sockets import PATH_LIMIT, InstanceLock, inode, remove_stale, socket_paths

UID = "7b9d1b1e-6c0f-4b0e-8f0a-0a0a0a0a0a0a"
PLUGINS, REGISTRY = Path("/var/lib/kubelet/plugins/gpu.aliquot.dev"), Path("/var/lib/kubelet/plugins_registry")


@pytest.fixture
def short():
    """A folder whose path leaves room for socket names."""
    folder = Path(tempfile.mkdtemp(prefix="aq", dir="/tmp"))
    yield folder
    shutil.rmtree(folder)


def test_names_are_per_instance_or_single():
    assert socket_paths(PLUGINS, REGISTRY, "").service == PLUGINS / "dra.sock"
    assert socket_paths(PLUGINS, REGISTRY, "").registration == REGISTRY / "gpu.aliquot.dev-reg.sock"
    assert socket_paths(PLUGINS, REGISTRY, UID).service == PLUGINS / f"dra-{UID}.sock"
    assert socket_paths(PLUGINS, REGISTRY, UID).registration == REGISTRY / f"gpu.aliquot.dev-{UID}-reg.sock"


def test_long_roots_get_hashed_names_that_still_fit_and_differ():
    for length in range(20, 71):
        root = Path("/" + "r" * length)
        paths = [socket_paths(root, root, uid) for uid in (UID, UID.replace("7", "8"))]
        for pair in paths:
            for path in (pair.service, pair.registration):
                assert len(os.fsencode(path)) <= PATH_LIMIT
                assert not path.name.startswith(".")
        assert len({path for pair in paths for path in (pair.service, pair.registration)}) == 4


def test_a_root_that_is_too_long_even_so_is_a_setting():
    with pytest.raises(SettingsError, match="shorter --kubelet-root"):
        socket_paths(Path("/" + "r" * 100), REGISTRY, UID)


def test_m7_single_instances_exclude_each_other_and_named_ones_do_not(short):
    alone = InstanceLock(short, alone=True)
    for other in (True, False):
        with pytest.raises(ConflictError, match=f"process {os.getpid()}"):
            InstanceLock(short, alone=other)
    alone.close()
    first, second = InstanceLock(short, alone=False), InstanceLock(short, alone=False)
    with pytest.raises(ConflictError):
        InstanceLock(short, alone=True)
    first.close()
    second.close()


def bound(path: Path, *, listen: bool) -> socket.socket:
    one = socket.socket(socket.AF_UNIX)
    one.bind(str(path))
    if listen:
        one.listen(1)
    return one


def test_b116_stale_sockets_of_ours_go_and_living_and_foreign_ones_stay(short):
    own = socket_paths(short, short, "")
    living = bound(short / f"gpu.aliquot.dev-{UID}-reg.sock", listen=True)
    starting = bound(short / "dra-starting.sock", listen=False)
    dead = short / "dra-dead.sock"
    bound(dead, listen=True).close()
    foreign = short / "nic.example.com-reg.sock"
    bound(foreign, listen=True).close()
    plain = short / "dra-plain.sock"
    plain.write_text("no socket")
    now = dead.stat().st_mtime
    assert remove_stale(short, short, own, now=lambda: now + 1) == []
    os.utime(short / "dra-starting.sock", (now + 10, now + 10))
    assert remove_stale(short, short, own, now=lambda: now + 11) == [dead]
    assert sorted(p.name for p in short.iterdir()) == sorted(
        [living.getsockname().rpartition("/")[2], "dra-starting.sock", foreign.name, plain.name]
    )
    living.close()
    starting.close()


def test_own_stale_sockets_go_at_once(short):
    own = socket_paths(short, short, "")
    bound(own.service, listen=True).close()
    bound(own.registration, listen=True).close()
    assert set(remove_stale(short, short, own)) == {own.service, own.registration}


def test_req1_a_socket_that_is_not_ours_survives_our_stop(short):
    path = short / "x.sock"
    server = SocketServer(path, lambda _server: None, workers=1, name="t")
    server.start()
    path.unlink()
    stranger = bound(path, listen=True)
    mark = inode(path)
    assert not server.intact()
    server.stop(0.0)
    assert inode(path) == mark
    stranger.close()


def test_a_socket_is_roots_alone(short):
    server = SocketServer(short / "x.sock", lambda _server: None, workers=1, name="t")
    server.start()
    assert (short / "x.sock").stat().st_mode & 0o777 == 0o600
    server.stop(0.0)
    assert not (short / "x.sock").exists()


def test_registration_status_is_what_readiness_says(short):
    service = Registration(short / "dra.sock")
    server = SocketServer(short / "r.sock", service.add_to, workers=2, name="t")
    server.start()
    with grpc.insecure_channel(f"unix:{short}/r.sock") as channel:
        stub = registration_grpc.RegistrationStub(channel)
        for _ in range(3):
            assert stub.GetInfo(registration.InfoRequest()).endpoint == str(short / "dra.sock")
        assert not service.registered
        assert "has not asked" in service.problem
        stub.NotifyRegistrationStatus(registration.RegistrationStatus(plugin_registered=False, error="no\nroom"))
        assert service.problem == "kubelet refused: no room"
        stub.NotifyRegistrationStatus(registration.RegistrationStatus(plugin_registered=True))
        assert service.registered
        assert service.problem == ""
    server.stop(0.0)


@pytest.mark.parametrize(("messages", "stubs"), [(v1, v1_grpc), (v1alpha1, v1alpha1_grpc)])
def test_the_health_stream_is_whole_at_once_on_change_and_often(short, messages, stubs):
    board = HealthBoard("n1/gpu", now=lambda: 1000.0, interval_s=0.2)
    server = SocketServer(short / "h.sock", board.add_to, workers=4, name="t")
    server.start()
    with grpc.insecure_channel(f"unix:{short}/h.sock") as channel:
        stream = stubs.DRAResourceHealthStub(channel).NodeWatchResources(messages.NodeWatchResourcesRequest())
        assert list(next(stream).devices) == []  # answered with no device at all (dra.md 7.8, T27)
        board.update({"gpu-a": "", "gpu-b": "fell off the bus"})
        seen = next(stream)
        while not seen.devices:
            seen = next(stream)
        assert [(d.device.pool_name, d.device.device_name, d.health, d.message) for d in seen.devices] == [
            ("n1/gpu", "gpu-a", messages.HEALTHY, ""),
            ("n1/gpu", "gpu-b", messages.UNHEALTHY, "fell off the bus"),
        ]
        assert seen.devices[0].health_check_timeout_seconds == 30
        assert next(stream).devices == seen.devices  # again, without a change
        board.stop()
        with pytest.raises(StopIteration):
            for _ in range(100):
                next(stream)
    server.stop(1.0)


def test_health_streams_are_bounded_and_abandoned_ones_end(short):
    board = HealthBoard("n1/gpu", interval_s=0.1)
    server = SocketServer(short / "h.sock", board.add_to, workers=8, name="t")
    server.start()
    with grpc.insecure_channel(f"unix:{short}/h.sock") as channel:
        stub = v1_grpc.DRAResourceHealthStub(channel)
        streams = [stub.NodeWatchResources(v1.NodeWatchResourcesRequest()) for _ in range(4)]
        for stream in streams:
            next(stream)
        with pytest.raises(grpc.RpcError) as caught:
            next(stub.NodeWatchResources(v1.NodeWatchResourcesRequest()))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        streams[0].cancel()

        def another():
            try:
                return next(stub.NodeWatchResources(v1.NodeWatchResourcesRequest())) is not None
            except grpc.RpcError:
                return False

        dra_rig.wait_for(another, "a free place", 5)
    board.stop()
    server.stop(1.0)


@pytest.mark.cluster
def test_a_driver_that_waits_for_kubelet_says_so(rig):
    shutil.rmtree(rig.folders.kubelet)
    daemon = dra_rig.Daemon(rig.folders, rig.inventory)
    daemon._thread.start()
    dra_rig.wait_for(lambda: any("start kubelet" in p for p in daemon.driver.not_ready()), "the sentence")
    assert daemon.driver.not_alive() == []
    rig.folders.kubelet.mkdir()
    (rig.folders.kubelet / "plugins_registry").mkdir()
    dra_rig.wait_for(rig.kubelet.registration_sockets, "the socket")
    dra_rig.wait_for(daemon.driver.registration_server.intact, "the socket served")
    rig.kubelet.register()
    daemon.stop()


@pytest.mark.cluster
def test_a_second_single_instance_ends_with_the_holders_process(rig):
    rig.start()
    second = dra_rig.Daemon(rig.folders, rig.inventory)
    with pytest.raises(ConflictError, match="give every instance its --pod-uid"):
        second.start()
