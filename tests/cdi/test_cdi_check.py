# SPDX-License-Identifier: Apache-2.0
"""The self-check: which directories the runtimes read, and whether a device written to ours resolves there."""

from __future__ import annotations

from pathlib import Path

import pytest

from aliquot.cdi.check import DEFAULT_DIRECTORIES, State, check, read_runtimes
from aliquot.cdi.store import SpecStore

CONTAINERD_2 = 'version = 3\n[plugins."io.containerd.cri.v1.runtime"]\n'
CONTAINERD_1 = 'version = 2\n[plugins."io.containerd.grpc.v1.cri"]\n'


def put(root: Path, name: str, text: str) -> None:
    path = root / name.lstrip("/")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def states(findings: tuple[object, ...]) -> set[State]:
    return {finding.state for finding in findings}  # type: ignore[attr-defined]


def text(findings: tuple[object, ...]) -> str:
    return "\n".join(f"{finding.state.value} {finding.subject}: {finding.text}" for finding in findings)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("files", "directories", "enabled"),
    [
        ({}, DEFAULT_DIRECTORIES, None),
        ({"/etc/containerd/config.toml": CONTAINERD_2}, DEFAULT_DIRECTORIES, True),
        ({"/etc/containerd/config.toml": CONTAINERD_2 + "enable_cdi = false\n"}, DEFAULT_DIRECTORIES, False),
        ({"/etc/containerd/config.toml": CONTAINERD_2 + 'cdi_spec_dirs = ["/x"]\n'}, ("/x",), True),
        ({"/etc/containerd/config.toml": CONTAINERD_1}, DEFAULT_DIRECTORIES, None),
        ({"/etc/containerd/config.toml": CONTAINERD_1 + "enable_cdi = true\n"}, DEFAULT_DIRECTORIES, True),
        ({"/etc/containerd/config.toml": CONTAINERD_1 + "enable_cdi = false\n"}, DEFAULT_DIRECTORIES, False),
        (
            {
                "/etc/containerd/config.toml": 'imports = ["/etc/containerd/conf.d/*.toml"]\nversion = 3\n',
                "/etc/containerd/conf.d/50-cdi.toml": CONTAINERD_2 + 'cdi_spec_dirs = ["/a", "/b"]\n',
                "/etc/containerd/conf.d/other.txt": "not TOML [",
            },
            ("/a", "/b"),
            True,
        ),
        ({"/var/lib/rancher/k3s/agent/etc/containerd/config.toml": CONTAINERD_2}, DEFAULT_DIRECTORIES, True),
        ({"/etc/crio/crio.conf": "[crio.runtime]\nlog_level = 'info'\n"}, DEFAULT_DIRECTORIES, True),
        (
            {
                "/etc/crio/crio.conf": "[crio.runtime]\ncdi_spec_dirs = ['/a']\n",
                "/etc/crio/crio.conf.d/99-cdi.conf": "[crio.runtime]\ncdi_spec_dirs = ['/b']\n",
            },
            ("/b",),
            True,
        ),
        ({"/etc/containerd/config.toml": "this is [ not TOML"}, DEFAULT_DIRECTORIES, None),
        ({"/etc/containerd/config.toml": "version = 'x'\nplugins = 3\nimports = 'y'\n"}, DEFAULT_DIRECTORIES, None),
        ({"/etc/crio/crio.conf": "crio = 3\n"}, DEFAULT_DIRECTORIES, True),
        ({"/etc/crio/crio.conf": "[crio.runtime]\ncdi_spec_dirs = 'x'\n"}, DEFAULT_DIRECTORIES, True),
    ],
)
def test_what_a_runtimes_configuration_says(
    tmp_path: Path, files: dict[str, str], directories: tuple[str, ...], enabled: bool | None
) -> None:
    for name, content in files.items():
        put(tmp_path, name, content)
    (runtime,) = read_runtimes(str(tmp_path))
    assert (runtime.directories, runtime.enabled) == (directories, enabled)
    assert runtime.source in {*files, "defaults"}


def test_two_runtimes_on_one_node_are_both_looked_at(tmp_path: Path) -> None:
    put(tmp_path, "/etc/containerd/config.toml", CONTAINERD_2)
    put(tmp_path, "/etc/crio/crio.conf", "[crio.runtime]\ncdi_spec_dirs = ['/elsewhere']\n")
    assert [runtime.name for runtime in read_runtimes(str(tmp_path))] == ["containerd", "CRI-O"]
    findings = check(tmp_path / "var/run/cdi", host_prefix=str(tmp_path))
    assert [finding.state for finding in findings if finding.subject.startswith("CRI-O")][-1] is State.FAILED
    assert [finding.state for finding in findings if finding.subject.startswith("containerd")][-1] is State.OK


def test_b126_all_is_well(tmp_path: Path) -> None:
    put(tmp_path, "/etc/containerd/config.toml", CONTAINERD_2)
    (tmp_path / "etc/cdi").mkdir(parents=True)
    (tmp_path / "var/run/cdi").mkdir(parents=True)
    findings = check(tmp_path / "var/run/cdi", host_prefix=str(tmp_path))
    assert states(findings) == {State.OK}
    assert "reads /etc/cdi and /var/run/cdi" in text(findings)
    assert f"a device written to {tmp_path}/var/run/cdi resolves" in text(findings)
    assert list((tmp_path / "var/run/cdi").iterdir()) == []


@pytest.mark.parametrize("present", ["etc/cdi", "var/run/cdi"])
def test_b126_only_one_of_the_two_directories_exists(tmp_path: Path, present: str) -> None:
    put(tmp_path, "/etc/containerd/config.toml", CONTAINERD_2)
    (tmp_path / present).mkdir(parents=True)
    findings = check(tmp_path / present, host_prefix=str(tmp_path))
    missing = {"etc/cdi": "/var/run/cdi", "var/run/cdi": "/etc/cdi"}[present]
    assert f"warning containerd (/etc/containerd/config.toml): {missing} does not exist" in text(findings)
    assert states(findings) == {State.OK, State.WARNING}


def test_b126_a_directory_that_is_missing_at_start_is_made(tmp_path: Path) -> None:
    put(tmp_path, "/etc/containerd/config.toml", CONTAINERD_2)
    findings = check(tmp_path / "var/run/cdi", host_prefix=str(tmp_path))
    assert State.FAILED not in states(findings)
    assert (tmp_path / "var/run/cdi").stat().st_mode & 0o777 == 0o755


def test_b126_a_runtime_that_reads_other_directories_fails_the_check(tmp_path: Path) -> None:
    put(tmp_path, "/etc/containerd/config.toml", CONTAINERD_2 + 'cdi_spec_dirs = ["/run/cdi"]\n')
    (tmp_path / "run/cdi").mkdir(parents=True)
    findings = check(tmp_path / "var/run/cdi", host_prefix=str(tmp_path))
    assert findings[-1].state is State.FAILED
    assert "the runtime reads /run/cdi: give one of these as CDI directory" in findings[-1].text


def test_b126_two_spellings_of_one_directory_are_one(tmp_path: Path) -> None:
    """/var/run is a link to /run on most hosts, an absolute one on some: it means the host's /run, not ours."""
    put(tmp_path, "/etc/containerd/config.toml", CONTAINERD_2 + 'cdi_spec_dirs = ["/run/cdi"]\n')
    (tmp_path / "run/cdi").mkdir(parents=True)
    (tmp_path / "var").mkdir()
    (tmp_path / "var/run").symlink_to(tmp_path / "run")
    assert check(tmp_path / "var/run/cdi", host_prefix=str(tmp_path))[-1].state is State.OK
    (tmp_path / "var/run").unlink()
    (tmp_path / "var/run").symlink_to("/run")
    put(tmp_path, "/etc/containerd/config.toml", CONTAINERD_2 + 'cdi_spec_dirs = ["/var/run/cdi"]\n')
    assert check(tmp_path / "run/cdi", host_prefix=str(tmp_path))[-1].state is State.OK


def test_a_custom_directory_can_be_named(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    findings = check(mine, runtime_directories=(str(mine),))
    assert states(findings) == {State.OK}


def test_a_runtime_with_cdi_switched_off_fails_the_check(tmp_path: Path) -> None:
    put(tmp_path, "/etc/containerd/config.toml", CONTAINERD_1 + "enable_cdi = false\n")
    findings = check(tmp_path / "var/run/cdi", host_prefix=str(tmp_path))
    assert findings[-1].state is State.FAILED
    assert "enable_cdi = true" in findings[-1].text


def test_an_old_containerd_that_does_not_say_is_a_warning(tmp_path: Path) -> None:
    put(tmp_path, "/etc/containerd/config.toml", CONTAINERD_1)
    findings = check(tmp_path / "var/run/cdi", host_prefix=str(tmp_path))
    assert "warning containerd (/etc/containerd/config.toml): reads" in text(findings)
    assert "in containerd 1.7 set enable_cdi = true" in text(findings)


def test_broken_files_of_others_are_shown_and_do_no_harm(tmp_path: Path) -> None:
    directory = tmp_path / "cdi"
    directory.mkdir()
    (directory / "broken.json").write_text("{")
    findings = check(directory, runtime_directories=(str(directory),))
    assert any(finding.state is State.WARNING and "broken.json" in finding.text for finding in findings)
    assert State.FAILED not in states(findings)
    assert [path.name for path in directory.iterdir()] == ["broken.json"]


def test_a_directory_that_cannot_be_used_is_the_only_finding(tmp_path: Path) -> None:
    (tmp_path / "cdi").touch()
    (finding,) = check(tmp_path / "cdi")
    assert finding.state is State.FAILED
    assert f"CDI directory {tmp_path / 'cdi'}" in finding.text


def test_a_probe_that_a_killed_check_left_is_taken_away(tmp_path: Path) -> None:
    directory = tmp_path / "cdi"
    directory.mkdir()
    left = SpecStore(directory, class_="probe").path("00aa11bb22cc33dd")
    left.write_text(
        '{"cdiVersion": "0.3.0", "kind": "gpu.aliquot.dev/probe", "devices": [{"name": "c-00aa11bb22cc33dd-probe", '
        '"containerEdits": {"env": ["A=b"]}}]}'
    )
    check(directory, runtime_directories=(str(directory),))
    assert list(directory.iterdir()) == []
