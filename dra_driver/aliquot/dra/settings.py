# SPDX-License-Identifier: Apache-2.0
"""Flags and environment of the driver, read once into one frozen value.

Never opens a socket and never looks at the node; the only files it reads are the two it is told to read.
Invariant: whatever is wrong here is said in one sentence that names the flag, the value and the next step, and
ends the process with a documented code, because waiting cannot help.
"""

from __future__ import annotations

import argparse
import ipaddress
import re
import textwrap
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NoReturn

from aliquot.api import names
from aliquot.api.errors import SettingsError, foreign
from aliquot.dra.config import NodeConfig, decode_config
from aliquot.dra.exits import MEANINGS, Exit

DEFAULT_PORT: Final = 9410
_NODE_NAME: Final = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_CONFIG_LIMIT: Final = 1 << 20


class FileSettingsError(SettingsError):
    """A file that a flag names is missing, unreadable or wrong."""


class _UsageError(SettingsError):
    """argparse's own complaint, turned into ours."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Everything the operator can choose."""

    node_name: str
    kubeconfig: Path | None
    """None = the service account of the pod, else what kubectl would use."""
    kubelet_root: Path
    cdi_dir: Path
    state_dir: Path
    run_dir: Path
    driver_root: Path
    """Root of the GPU driver's files as the host (and so the container runtime) sees it."""
    host_prefix: str
    """Where this process sees the host's `/`; empty where it sees the host's paths as they are."""
    nvml_library: str
    """Path or soname; empty = libnvidia-ml.so.1 below the driver root, else the loader's."""
    hook_dir: Path | None
    """Where libvgpu-strict.so lies; None = the one that came with the package."""
    extra_edits: Path | None
    """CDI containerEdits of the operator's, decoded by who merges them."""
    config: NodeConfig
    config_file: Path | None
    http_address: str
    """Empty = every address of IPv4 and, where there is one, of IPv6."""
    http_port: int
    """0 = no HTTP endpoint."""
    pod_uid: str
    """Names the sockets of this instance; empty = the only instance of its node."""
    log_format: str
    log_level: str
    check: bool
    check_output: str

    @property
    def registry_dir(self) -> Path:
        """Where kubelet looks for registration sockets."""
        return self.kubelet_root / "plugins_registry"

    @property
    def plugin_dir(self) -> Path:
        """Our own directory below kubelet's root."""
        return self.kubelet_root / "plugins" / names.DRIVER

    @property
    def pool(self) -> str:
        """Name of the node's pool; unique to this driver (dra.md 3.5, REQ-4)."""
        return f"{self.node_name}/gpu"


@dataclass(frozen=True, slots=True)
class _Option:
    flag: str
    env: str
    default: str
    metavar: str
    text: str
    choices: tuple[str, ...] = ()


_OPTIONS: Final = (
    _Option("--node-name", "NODE_NAME", "", "NAME", "name of the Node object (spec.nodeName of the pod); required"),
    _Option(
        "--kubeconfig",
        "ALIQUOT_KUBECONFIG",
        "",
        "FILE",
        "how to reach the API server; without it the pod's service account, else KUBECONFIG or ~/.kube/config",
    ),
    _Option("--kubelet-root", "ALIQUOT_KUBELET_ROOT", names.DEFAULT_KUBELET_ROOT, "DIR", "kubelet's --root-dir"),
    _Option("--cdi-dir", "ALIQUOT_CDI_DIR", names.DEFAULT_CDI_DIR, "DIR", "a CDI directory that the runtime scans"),
    _Option(
        "--state-dir", "ALIQUOT_STATE_DIR", names.DEFAULT_STATE_DIR, "DIR", "checkpoint and hook; same path on host"
    ),
    _Option(
        "--run-dir", "ALIQUOT_RUN_DIR", names.DEFAULT_RUN_DIR, "DIR", "grants and usage (tmpfs); same path on host"
    ),
    _Option("--driver-root", "ALIQUOT_DRIVER_ROOT", "/", "DIR", "root of the GPU driver's files as seen here"),
    _Option(
        "--driver-root-host",
        "ALIQUOT_DRIVER_ROOT_HOST",
        "",
        "DIR",
        "the same root as the host sees it, where that differs: /run/nvidia/driver beside /host/run/nvidia/driver",
    ),
    _Option("--nvml-library", "ALIQUOT_NVML_LIBRARY", "", "FILE", "libnvidia-ml.so.1 to load; else searched"),
    _Option("--hook-dir", "ALIQUOT_HOOK_DIR", "", "DIR", "where libvgpu-strict.so lies; else the packaged one"),
    _Option("--config", "ALIQUOT_CONFIG", "", "FILE", "how the cards are offered, see below"),
    _Option("--extra-edits", "ALIQUOT_EXTRA_EDITS", "", "FILE", "CDI containerEdits added to those of every grant"),
    _Option(
        "--http-address", "ALIQUOT_HTTP_ADDRESS", "", "IP", "where /metrics, /healthz, /readyz listen; without it all"
    ),
    _Option("--http-port", "ALIQUOT_HTTP_PORT", str(DEFAULT_PORT), "PORT", "their port; 0 = none"),
    _Option("--pod-uid", "POD_UID", "", "UID", "names this instance's sockets, so that two may overlap in an update"),
    _Option("--log-format", "ALIQUOT_LOG_FORMAT", "json", "", "format of the log", ("json", "console")),
    _Option(
        "--log-level", "ALIQUOT_LOG_LEVEL", "info", "", "least level logged", ("debug", "info", "warning", "error")
    ),
)

_CONFIG_HELP: Final = """\
configuration file (JSON or YAML; every field optional, an unknown one is an error):
  defaults:                   every card
    mode: auto                auto | shared | slots | exclusive; auto = shared where the API server keeps
                              consumable capacity (1.36, or gate DRAConsumableCapacity), else slots
    slots: 4                  equal parts of a card, or percentages: [50, 25, 25]
    maxShares: 10             holders of one shared card
    defaultMemory: 8Gi        of a share that asks for none; without it the whole card
    defaultCores: 0           percent of compute of a share that asks for none; 0 = no limit
    reserve: 512Mi            never handed out in shares
    contextOverhead: 300Mi    what one process's context takes; without it it is measured
    memory: 120Gi             of a card that does not tell its memory
  cards:                      in order; later entries win field by field
    - product: "NVIDIA A100*" a shell pattern over product names …
      slots: [50, 50]
    - uuid: GPU-0a1b2c3d-…    … or one card
      mode: exclusive
"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise _UsageError(f"{message}; see aliquot-dra-driver --help")


def parser() -> argparse.ArgumentParser:
    """The command line, with help that is enough to run the driver by hand."""
    codes = "\n".join(f"  {code.value}  {text}" for code, text in MEANINGS.items())
    built = _Parser(
        prog="aliquot-dra-driver",
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=textwrap.dedent(
            f"""\
            Kubelet plugin {names.DRIVER}: publishes this node's GPUs as ResourceSlices and prepares ResourceClaims
            that got a share of them. Runs as root on a node whose kubelet and container runtime are up; what is
            not there yet (GPU driver, card, kubelet, API server) is waited for, and /readyz says so.
            Every flag may be given as the environment variable named in brackets; the flag wins.

            by hand:  aliquot-dra-driver --node-name $(hostname) --kubeconfig ~/.kube/config --log-format console
            first:    the same with --check"""
        ),
        epilog=f"{_CONFIG_HELP}\nexit status:\n{codes}\n",
    )
    for option in _OPTIONS:
        default = f"; default {option.default}" if option.default else ""
        built.add_argument(
            option.flag,
            metavar=option.metavar or None,
            choices=option.choices or None,
            help=f"{option.text} [{option.env}{default}]",
        )
    built.add_argument(
        "--check", action="store_true", help="say what works and what does not, with next steps; then end"
    )
    built.add_argument("--output", choices=("table", "json"), default="table", help="form of the --check report")
    return built


def read_settings(arguments: Sequence[str], environ: Mapping[str, str]) -> Settings:
    """Settings from the command line and the environment.

    Raises `SettingsError` (exit `Exit.USAGE`) or `FileSettingsError` (exit `Exit.FILE`). `--help` exits as
    argparse does.
    """
    given = parser().parse_args(arguments)
    values: dict[str, str] = {}
    for option in _OPTIONS:
        name = option.flag[2:].replace("-", "_")
        flag: str | None = getattr(given, name)
        value = flag if flag is not None else environ.get(option.env, "") or option.default
        if option.choices and value not in option.choices:
            raise SettingsError(f"{option.env}={value!r} is none of {', '.join(option.choices)}; set one of these")
        values[name] = value
    node_name = values["node_name"]
    if not node_name:
        raise SettingsError("the node's name is not known; give --node-name or NODE_NAME (spec.nodeName of the pod)")
    if len(node_name) > 253 or not _NODE_NAME.fullmatch(node_name):
        raise SettingsError(f"--node-name {node_name!r} is not the name of a Node; see `kubectl get nodes`")
    pod_uid = values["pod_uid"]
    if pod_uid and not is_uid(pod_uid):
        raise SettingsError(f"--pod-uid {pod_uid!r} is not a UID; take metadata.uid of the pod, or leave it out")
    root_host, prefix = _driver_root(values["driver_root"], values["driver_root_host"])
    config_file = Path(values["config"]) if values["config"] else None
    return Settings(
        node_name=node_name,
        kubeconfig=_file(values["kubeconfig"], "--kubeconfig") if values["kubeconfig"] else None,
        kubelet_root=_absolute(values["kubelet_root"], "--kubelet-root"),
        cdi_dir=_absolute(values["cdi_dir"], "--cdi-dir"),
        state_dir=_absolute(values["state_dir"], "--state-dir"),
        run_dir=_absolute(values["run_dir"], "--run-dir"),
        driver_root=Path(root_host),
        host_prefix=prefix,
        nvml_library=values["nvml_library"],
        hook_dir=_absolute(values["hook_dir"], "--hook-dir") if values["hook_dir"] else None,
        extra_edits=_file(values["extra_edits"], "--extra-edits") if values["extra_edits"] else None,
        config=decode_file(config_file) if config_file is not None else NodeConfig(),
        config_file=config_file,
        http_address=_address(values["http_address"]),
        http_port=_port(values["http_port"]),
        pod_uid=pod_uid.lower(),
        log_format=values["log_format"],
        log_level=values["log_level"],
        check=given.check,
        check_output=given.output,
    )


def decode_file(path: Path) -> NodeConfig:
    """The configuration file at `path`. Raises `FileSettingsError`."""
    raw = _read(path, "--config")
    try:
        return decode_config(raw, where=str(path))
    except SettingsError as err:
        raise FileSettingsError(str(err)) from err


def is_uid(text: str) -> bool:
    """Whether `text` is a Kubernetes UID, and so safe in a file name (dra.md 7.8, T23)."""
    try:
        return str(uuid.UUID(text)) == text.lower()
    except ValueError:
        return False


def _read(path: Path, flag: str) -> bytes:
    try:
        with path.open("rb") as file:
            raw = file.read(_CONFIG_LIMIT + 1)
    except OSError as err:
        raise FileSettingsError(
            f"{flag} {path} cannot be read: {foreign(err.strerror)}; correct the path or its rights"
        ) from err
    if len(raw) > _CONFIG_LIMIT:
        raise FileSettingsError(f"{flag} {path} is larger than 1 MiB; this is hardly the file you mean")
    return raw


def _file(text: str, flag: str) -> Path:
    """A file that must be there now; it is decoded by whoever knows its format."""
    path = Path(text).absolute()
    _read(path, flag)
    return path


def _absolute(text: str, flag: str) -> Path:
    path = Path(text)
    if not path.is_absolute():
        raise SettingsError(f"{flag} {text!r} is a relative path; give it from / (host and container must agree on it)")
    return path


def _driver_root(here: str, host: str) -> tuple[str, str]:
    """The driver's root as the host sees it, and where this process sees the host's `/`."""
    seen = str(_absolute(here, "--driver-root"))
    if not host:
        return seen, ""
    real = str(_absolute(host, "--driver-root-host"))
    end = "" if real == "/" else real
    if not seen.endswith(end):
        raise SettingsError(
            f"--driver-root {seen} does not end in --driver-root-host {real}; mount the host's / somewhere and give "
            "the driver's root below it, so that links in it lead where they lead on the host"
        )
    return real, seen[: len(seen) - len(end)].rstrip("/")


def _address(text: str) -> str:
    if not text:
        return ""
    try:
        return str(ipaddress.ip_address(text))
    except ValueError as err:
        raise SettingsError(f"--http-address {text!r} is not an IP address; give for example 127.0.0.1") from err


def _port(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) <= 65535):
        raise SettingsError(f"--http-port {text!r} is not a port; give 1 to 65535, or 0 for none")
    return int(text)


def exit_code(error: SettingsError) -> Exit:
    """The documented exit status of an error of this module."""
    return Exit.FILE if isinstance(error, FileSettingsError) else Exit.USAGE
