# SPDX-License-Identifier: Apache-2.0
"""Credentials: in-cluster token, kubeconfig with tokens, exec plugins and certificates, TLS, proxies.

Run against both ends of the supported range of the official package (tests/kube/run_other_client.py).
"""

from __future__ import annotations

import base64
import datetime as dt
import ipaddress
import json
import ssl
import sys
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from aliquot.api.errors import SettingsError
from aliquot.kube import credentials
from aliquot.kube.client import Kube
from aliquot.kube.errors import Unreachable


class Authority:
    """A CA that signs certificates for 127.0.0.1."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name = folder, name
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self.path = folder / f"{name}.crt"
        certificate = self._sign(self._subject, self._key, authority=True)
        self.path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))

    def _sign(self, subject, key, *, authority):
        now = dt.datetime.now(dt.UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._subject)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - dt.timedelta(hours=1))
            .not_valid_after(now + dt.timedelta(hours=1))
            .add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False)
            .add_extension(
                x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False
            )
            .sign(self._key, hashes.SHA256())
        )

    def issue(self, name: str) -> tuple[Path, Path]:
        """Paths of a certificate and its key."""
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = self._sign(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]), key, authority=False)
        paths = self.folder / f"{self.name}-{name}.crt", self.folder / f"{self.name}-{name}.key"
        paths[0].write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        paths[1].write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        return paths

    def server_context(self, *, want_client: bool = False) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*self.issue("server"))
        if want_client:
            context.verify_mode = ssl.CERT_REQUIRED
            context.load_verify_locations(self.path)
        return context


@pytest.fixture
def authority(tmp_path):
    return Authority(tmp_path, "ca")


def encoded(path: Path) -> str:
    return base64.b64encode(path.read_bytes()).decode()


class TestInCluster:
    @pytest.fixture
    def pod(self, tmp_path, authority, make_server):
        """What a pod finds: a token, a CA, the server's address; and that server."""
        server = make_server(authority.server_context())
        server.answer = lambda request: server.Reply({"as": request.headers.get("Authorization")})
        token = tmp_path / "token"
        token.write_text("first\n")
        environ = {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": str(server.port)}
        return server, token, credentials.in_cluster(environ=environ, token_path=token, ca_path=authority.path)

    def test_requests_carry_the_token_over_verified_tls(self, pod):
        server, _, source = pod
        kube = Kube(source)
        assert kube.get_json("/x")["as"].lower() == "bearer first"
        assert kube.host == server.url
        kube.close()

    def test_a_rotated_token_is_picked_up_when_the_old_one_is_refused(self, pod):
        server, token, source = pod
        clock = [0.0]
        kube = Kube(source, clock=lambda: clock[0])
        server.answer = lambda request: (
            server.Reply({})
            if request.headers["Authorization"].endswith("second")
            else server.Reply(server.status_body(401, "Unauthorized"), 401)
        )
        token.write_text("second")
        clock[0] = 30.0
        kube.get_json("/x")
        assert len(server.requests) == 2
        kube.close()

    @pytest.mark.parametrize(("content", "named"), [(None, "token"), ("", "mpty")])
    def test_no_usable_token_is_a_matter_of_settings(self, pod, content, named):
        _, token, source = pod
        token.unlink()
        if content is not None:
            token.write_text(content)
        with pytest.raises(SettingsError, match=rf"in-cluster service account: .*{named}"):
            Kube(source)

    def test_a_server_of_another_authority_is_not_spoken_to(self, pod, tmp_path):
        server, token, _ = pod
        environ = {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": str(server.port)}
        other = Authority(tmp_path, "other")
        kube = Kube(credentials.in_cluster(environ=environ, token_path=token, ca_path=other.path))
        with pytest.raises(Unreachable, match="certificate verify failed"):
            kube.get_json("/x")
        assert server.requests == []


class TestKubeconfig:
    def test_certificates_in_files_and_inline(self, make_server, authority, write_kubeconfig):
        server = make_server(authority.server_context(want_client=True))
        server.script(server.Reply({"ok": 1}))
        certificate, key = authority.issue("client")
        for user, cluster in (
            (
                {"client-certificate": str(certificate), "client-key": str(key)},
                {"certificate-authority": str(authority.path)},
            ),
            (
                {"client-certificate-data": encoded(certificate), "client-key-data": encoded(key)},
                {"certificate-authority-data": encoded(authority.path)},
            ),
        ):
            kube = Kube.load(write_kubeconfig(server.url, user, cluster))
            assert kube.get_json("/x") == {"ok": 1}
            kube.close()

    def test_relative_paths_are_relative_to_the_file(self, make_server, authority, write_kubeconfig):
        server = make_server(authority.server_context())
        server.script(server.Reply({"ok": 1}))
        kube = Kube.load(write_kubeconfig(server.url, {}, {"certificate-authority": authority.path.name}))
        assert kube.get_json("/x") == {"ok": 1}
        kube.close()

    def test_an_exec_plugin_gives_the_token_and_is_asked_again_when_it_expires(
        self, server, write_kubeconfig, tmp_path
    ):
        plugin, calls = tmp_path / "plugin.py", tmp_path / "calls"
        calls.write_text("")
        plugin.write_text(
            "import json, sys\n"
            f"log = open({str(calls)!r}, 'a+'); log.write('x'); log.flush(); log.seek(0); n = len(log.read())\n"
            "json.dump({'apiVersion': 'client.authentication.k8s.io/v1', 'kind': 'ExecCredential',\n"
            "  'status': {'token': f'token-{n}', 'expirationTimestamp': '2020-01-01T00:00:00Z'}}, sys.stdout)\n"
        )
        user = {
            "exec": {
                "apiVersion": "client.authentication.k8s.io/v1",
                "command": sys.executable,
                "args": [str(plugin)],
                "interactiveMode": "Never",
            }
        }
        server.answer = lambda request: server.Reply({"as": request.headers.get("Authorization")})
        kube = Kube.load(write_kubeconfig(server.url, user))
        first, second = (kube.get_json("/x")["as"] for _ in range(2))
        assert first.startswith("Bearer token-")
        assert second != first  # it had expired in 2020
        kube.close()

    def test_an_exec_plugin_that_fails_is_named(self, server, write_kubeconfig):
        """The official package logs it and goes on without credentials."""
        user = {"exec": {"apiVersion": "client.authentication.k8s.io/v1", "command": "/bin/false"}}
        with pytest.raises(SettingsError, match="exec plugin /bin/false gave no credentials"):
            Kube.load(write_kubeconfig(server.url, user))

    def test_a_password_is_sent_as_basic_authentication(self, server, write_kubeconfig):
        server.answer = lambda request: server.Reply({"as": request.headers.get("Authorization")})
        kube = Kube.load(write_kubeconfig(server.url, {"username": "u", "password": "p"}))
        assert kube.get_json("/x")["as"].lower() == "basic " + base64.b64encode(b"u:p").decode().lower()
        kube.close()

    def test_a_proxy_in_the_kubeconfig_is_used(self, server, write_kubeconfig):
        """Version 36 of the official package does not know proxy-url; we do."""
        server.script(server.Reply({"via": "proxy"}))
        kube = Kube.load(write_kubeconfig("http://cluster.invalid", {}, {"proxy-url": server.url}))
        assert kube.get_json("/x") == {"via": "proxy"}
        assert server.requests[0].headers["Host"] == "cluster.invalid"
        kube.close()

    def test_a_server_url_with_a_path_keeps_it(self, server, write_kubeconfig):
        """Rancher and others serve clusters below a path."""
        server.script(server.Reply({}))
        kube = Kube.load(write_kubeconfig(server.url + "/k8s/clusters/c-1/"))
        kube.get_json("/api/v1/nodes")
        assert server.requests[0].path == "/k8s/clusters/c-1/api/v1/nodes"
        kube.close()

    @pytest.mark.parametrize(
        "text",
        ["", "[]", "7", "{", "apiVersion: v1\nkind: Config\n", '{"current-context": "x", "contexts": []}', "\t- x"],
    )
    def test_what_is_no_kubeconfig_is_a_matter_of_settings(self, tmp_path, text):
        path = tmp_path / "config"
        path.write_text(text)
        with pytest.raises(SettingsError, match="cannot use kubeconfig") as refused:
            Kube.load(path)
        assert str(path) in str(refused.value)


class TestFind:
    def test_a_given_file_comes_first(self, tmp_path):
        path = tmp_path / "config"
        path.write_text("{}")
        source = credentials.find(path, {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "KUBECONFIG": "/other"})
        assert source.described == f"kubeconfig {path}"

    def test_a_given_file_that_is_not_there_is_refused(self, tmp_path):
        with pytest.raises(SettingsError, match="is not a file"):
            credentials.find(tmp_path / "none", {})

    def test_in_a_pod_the_service_account(self):
        assert credentials.find(None, {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}).described == "in-cluster service account"

    def test_elsewhere_kubeconfig_of_the_environment_then_of_the_home(self, tmp_path):
        named, home = tmp_path / "named", tmp_path / ".kube" / "config"
        home.parent.mkdir()
        home.write_text("{}")
        assert credentials.find(None, {"HOME": str(tmp_path)}).described == f"kubeconfig {home}"
        named.write_text("{}")
        both = f"{tmp_path / 'missing'}:{named}"
        assert credentials.find(None, {"HOME": str(tmp_path), "KUBECONFIG": both}).described == f"kubeconfig {both}"

    def test_nothing_found_says_what_to_give(self, tmp_path):
        with pytest.raises(SettingsError, match="give --kubeconfig or set KUBECONFIG"):
            credentials.find(None, {"HOME": str(tmp_path)})


def test_no_error_shows_a_credential(server, write_kubeconfig):
    server.script(server.Reply(server.status_body(500, "InternalError", "x"), 500), server.Reply(drop=True))
    kube = Kube.load(write_kubeconfig(server.url, {"token": "sesame"}))
    for _ in range(2):
        with pytest.raises(Exception) as failed:
            kube.create("/x", {})
        error: BaseException | None = failed.value
        while error is not None:
            assert "sesame" not in json.dumps([str(error), repr(error)])
            error = error.__cause__
    kube.close()
