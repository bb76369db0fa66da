# SPDX-License-Identifier: Apache-2.0
"""One certificate authority per cluster, and the certificates and kubeconfig files it signs.

Never reuses a key between clusters. Invariant: everything signed here is valid for one day, because a test
cluster that is older than that is a mistake.
"""

from __future__ import annotations

import base64
import datetime as dt
import ipaddress
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

_LIFE = dt.timedelta(days=1)
_SKEW = dt.timedelta(minutes=5)


@dataclass(frozen=True)
class Pair:
    """A certificate and its key, both PEM."""

    certificate: bytes
    key: bytes


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption()
    )


class Authority:
    """A fresh certificate authority that lives in memory; `directory` receives the files that servers read."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "aliquot test cluster")])
        self._certificate = (
            self._builder(self._name, self._key.public_key())
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(sign_certificates=True), critical=True)
            .sign(self._key, hashes.SHA256())
        )
        self.pem = self._certificate.public_bytes(serialization.Encoding.PEM)
        self.file = self._write("ca.crt", self.pem)

    def _builder(self, subject: x509.Name, public: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
        now = dt.datetime.now(dt.UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(public)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - _SKEW)
            .not_valid_after(now + _LIFE)
        )

    def _write(self, name: str, content: bytes) -> Path:
        path = self.directory / name
        path.touch(mode=0o600)
        path.write_bytes(content)
        return path

    def issue(self, user: str, groups: Iterable[str] = (), hosts: Iterable[str] = ()) -> Pair:
        """A certificate for client `user` in `groups` and, when `hosts` are given, for serving under those names."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name(
            [
                *(x509.NameAttribute(NameOID.ORGANIZATION_NAME, g) for g in groups),
                x509.NameAttribute(NameOID.COMMON_NAME, user),
            ]
        )
        builder = (
            self._builder(subject, key.public_key())
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(sign_certificates=False), critical=True)
            .add_extension(
                x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH]),
                critical=False,
            )
        )
        names = [_general_name(h) for h in hosts]
        if names:
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        certificate = builder.sign(self._key, hashes.SHA256())
        return Pair(certificate.public_bytes(serialization.Encoding.PEM), _pem(key))

    def issue_files(
        self, name: str, user: str, groups: Iterable[str] = (), hosts: Iterable[str] = ()
    ) -> tuple[Path, Path]:
        """The same, written as `<name>.crt` and `<name>.key`."""
        pair = self.issue(user, groups, hosts)
        return self._write(f"{name}.crt", pair.certificate), self._write(f"{name}.key", pair.key)

    def signing_key(self, name: str) -> Path:
        """A fresh private key file, as the service account issuer needs one."""
        return self._write(f"{name}.key", _pem(ec.generate_private_key(ec.SECP256R1())))

    def kubeconfig(
        self,
        name: str,
        server: str,
        *,
        user: str = "",
        groups: Iterable[str] = (),
        token: str = "",
        namespace: str = "default",
        directory: Path | None = None,
    ) -> Path:
        """A self-contained kubeconfig file for a certificate user, or for `token` where one is given.

        JSON, which every reader of kubeconfig files takes for the YAML it also is.
        """
        if token:
            credentials: dict[str, str] = {"token": token}
        else:
            pair = self.issue(user, groups)
            credentials = {
                "client-certificate-data": base64.b64encode(pair.certificate).decode(),
                "client-key-data": base64.b64encode(pair.key).decode(),
            }
        cluster = {"server": server}
        if server.startswith("https:"):
            cluster["certificate-authority-data"] = base64.b64encode(self.pem).decode()
        content = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "aliquot", "cluster": cluster}],
            "users": [{"name": name, "user": credentials}],
            "contexts": [{"name": "aliquot", "context": {"cluster": "aliquot", "user": name, "namespace": namespace}}],
            "current-context": "aliquot",
        }
        path = (directory or self.directory) / f"{name}.kubeconfig"
        path.touch(mode=0o600)
        path.write_text(json.dumps(content, indent=1))
        return path


def _usage(*, sign_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=not sign_certificates,
        key_cert_sign=sign_certificates,
        crl_sign=sign_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)
