# SPDX-License-Identifier: Apache-2.0
"""What we write, in real containers: podman's CDI library reads the file, runc builds the container.

Each test has a mount namespace of its own with an empty /run, so nothing of the machine is seen or changed. The
images are folders with a loader, a C library and one program. The one of Red Hat's kind has Debian's loader with
the table of default directories rewritten to Red Hat's two, as there is no other loader here.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest

from aliquot.api.grant import Grant
from aliquot.cdi.driver_files import CardAddress
from aliquot.cdi.edits import Limiter, spec_for
from aliquot.cdi.store import SpecStore

pytestmark = [
    pytest.mark.node,
    pytest.mark.skipif(os.geteuid() != 0, reason="containers need root"),
    pytest.mark.skipif(not (shutil.which("podman") and shutil.which("runc")), reason="podman and runc are not here"),
    pytest.mark.skipif(os.uname().machine != "x86_64", reason="the folders of the images are those of x86-64"),
]

HERE = Path(__file__).parent
UID = "0b1c2d3e-0000-4000-8000-00000000000a"
GA, GB = "GPU-aaaaaaaa", "GPU-bbbbbbbb"
DEBIAN = (b"/lib/x86_64-linux-gnu/", b"/usr/lib/x86_64-linux-gnu/", b"/lib/", b"/usr/lib/")
RED_HAT = (b"/lib64/", b"/usr/lib64/", b"/no/", b"/no/")
LIBRARIES = ("libcuda.so.1", "libnvidia-ml.so.1", "libcuda.so", "libnvidia-nvvm.so.4")


def gcc(*arguments: str | Path) -> None:
    if shutil.which("gcc") is None:
        pytest.skip("there is no C compiler")
    subprocess.run(["gcc", "-O1", *arguments], check=True, timeout=60)


def shared(path: Path, soname: str, code: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run(
        ["gcc", "-shared", "-fPIC", f"-Wl,-soname,{soname}", "-o", path, "-xc", "-"], input=code, text=True, check=True
    )


def red_hats_loader(loader: bytes) -> bytes:
    """The loader with other default directories; each text keeps its length, so slashes fill it up."""
    text = b"".join(name + b"\0" for name in DEBIAN)
    assert text in loader
    return loader.replace(
        text, b"".join(new.ljust(len(old), b"/") + b"\0" for old, new in zip(DEBIAN, RED_HAT, strict=True))
    )


class NotStartedError(Exception):
    """The container did not run; the text is what podman said."""


@dataclasses.dataclass
class Node:
    """A driver, a CDI directory and images; `run` starts a container with devices."""

    top: Path
    driver: Any
    store: SpecStore

    def install(self, version: str) -> None:
        """Replace the driver by another version, all of it real libraries that tell their version."""
        folder = self.driver.root / "usr/lib/x86_64-linux-gnu"
        for path in folder.glob("*"):
            path.unlink()
        for stem, soname in (
            ("libcuda", "libcuda.so.1"),
            ("libnvidia-ml", "libnvidia-ml.so.1"),
            ("libnvidia-nvvm", "libnvidia-nvvm.so.4"),
        ):
            code = f'const char *version(void) {{ return "{stem} {version}"; }}\n'
            shared(folder / f"{stem}.so.{version}", soname, code)
        (folder / "libcuda.so").symlink_to(f"libcuda.so.{version}")

    def image(self, kind: str) -> Path:
        """A root file system of one kind: `debian` or `redhat`."""
        root = self.top / kind
        folder = {"debian": "lib/x86_64-linux-gnu", "redhat": "usr/lib64"}[kind]
        (root / folder).mkdir(parents=True)
        if kind == "redhat":
            (root / "lib64").symlink_to("usr/lib64")
        (root / "lib64").mkdir(exist_ok=True)
        loader = Path("/lib64/ld-linux-x86-64.so.2").resolve().read_bytes()
        (root / "lib64/ld-linux-x86-64.so.2").write_bytes(red_hats_loader(loader) if kind == "redhat" else loader)
        (root / "lib64/ld-linux-x86-64.so.2").chmod(0o755)
        shutil.copy("/lib/x86_64-linux-gnu/libc.so.6", root / folder)
        gcc("-Wall", "-Wextra", "-Werror", "-o", root / "inside", HERE / "inside.c", "-ldl")
        for name in ("dev", "proc", "sys", "etc", "tmp", "run", "usr/bin"):
            (root / name).mkdir(parents=True, exist_ok=True)
        return root

    def grant(self, name: str, card: str = GA, **fields: Any) -> Grant:
        """A grant with its file and folder under the run directory."""
        (self.top / "run/grants").mkdir(parents=True, exist_ok=True)
        (self.top / "run/grants" / name).write_text(f"grant of {name}")
        (self.top / "run/usage" / name).mkdir(parents=True, exist_ok=True)
        return Grant(name=name, card_uuid=card, **{"memory_bytes": 1 << 30, **fields})

    def prepare(self, *grants: Grant, limiter: Limiter = "hook") -> list[str]:
        """Write the claim's spec; the names of its devices."""
        files = self.driver.discover(CardAddress(uuid=GA, minor=0), CardAddress(uuid=GB, minor=1))
        files = msgspec.structs.replace(files, run_dir=str(self.top / "run"))
        spec = spec_for([(grant, limiter) for grant in grants], files)
        self.store.write(spec, UID)
        return list(spec.qualified_names())

    def run(self, image: Path, devices: list[str], *arguments: str, env: tuple[str, ...] = ()) -> dict[str, str]:
        """What `inside` prints, by key; standard error under "stderr"."""
        command = [
            *("podman", "--runtime", "runc", "--cgroup-manager", "cgroupfs", "--events-backend", "none"),
            *("--root", self.top / "podman/root", "--runroot", "/run/podman", "--storage-driver", "vfs"),
            *("run", "--rm", "--network", "none"),
            *("--ulimit", "nofile=1024:1024", "--ulimit", "nproc=1024:1024"),
            *(word for name in devices for word in ("--device", name)),
            *(word for item in env for word in ("--env", item)),
            *("--rootfs", image, "/inside", *arguments),
        ]
        apart = 'mount -t tmpfs tmpfs /run && mkdir /run/cdi && mount --bind "$0" /run/cdi && exec "$@"'
        done = subprocess.run(
            ["unshare", "--mount", "--propagation", "private", "sh", "-c", apart, self.store.directory, *command],
            capture_output=True,
            text=True,
            timeout=90,
            check=False,
        )
        if done.returncode:
            raise NotStartedError(done.stderr)
        return {**dict(line.split("=", 1) for line in done.stdout.splitlines()), "stderr": done.stderr}


@pytest.fixture
def node(driver: Any, tmp_path: Path) -> Node:
    store = SpecStore(tmp_path / "cdi", also_read=())
    store.prepare()
    made = Node(tmp_path, driver, store)
    made.install("550.163.01")
    shared(
        driver.hook / "libvgpu.so",
        "libvgpu.so",
        "#include <unistd.h>\n__attribute__((constructor)) static void loaded(void)\n"
        '{ if (write(2, "the hook is loaded\\n", 19) < 0) _exit(9); }\n',
    )
    smi = driver.root / "usr/bin/nvidia-smi"
    smi.unlink()
    subprocess.run(
        ["gcc", "-o", smi, "-xc", "-"],
        input='int puts(const char *);\nint main(void) { return puts("smi=here") < 0; }\n',
        text=True,
        check=True,
    )
    return made


@pytest.mark.parametrize("kind", ["debian", "redhat"])
def test_b127_driver_and_tool_are_found_without_ldconfig_or_library_path(node: Node, kind: str) -> None:
    devices = node.prepare(node.grant(f"c-{UID}-gpu-a"))
    image = node.image(kind)
    found = node.run(image, devices, *LIBRARIES, "run:nvidia-smi", "env:LD_LIBRARY_PATH", "env:NVIDIA_VISIBLE_DEVICES")
    assert found["libcuda.so.1"] == found["libcuda.so"] == "libcuda 550.163.01"
    assert found["libnvidia-ml.so.1"] == "libnvidia-ml 550.163.01"
    assert found["libnvidia-nvvm.so.4"] == "libnvidia-nvvm 550.163.01"
    assert found["smi"] == "here"
    assert found["env:LD_LIBRARY_PATH"] == "unset"
    assert found["env:NVIDIA_VISIBLE_DEVICES"] == "void"


@pytest.mark.parametrize("kind", ["debian", "redhat"])
def test_without_our_devices_nothing_is_there(node: Node, kind: str) -> None:
    found = node.run(node.image(kind), [], *LIBRARIES, "node:/dev/nvidia0")
    assert all(found[name].startswith("missing") for name in LIBRARIES)
    assert found["node:/dev/nvidia0"] == "No such file or directory"
    assert "the hook is loaded" not in found["stderr"]


def test_red_hats_loader_looks_where_red_hats_does(node: Node) -> None:
    """The proof for the other tests: a library in Debian's directory is not found by it, one in /usr/lib64 is."""
    image = node.image("redhat")
    shared(image / "usr/lib/x86_64-linux-gnu/libelsewhere.so.1", "libelsewhere.so.1", "int x;\n")
    shared(image / "usr/lib64/libthere.so.1", "libthere.so.1", "int x;\n")
    found = node.run(image, [], "libelsewhere.so.1", "libthere.so.1")
    assert found["libelsewhere.so.1"].startswith("missing")
    assert found["libthere.so.1"] == "another library"


def test_b120_the_oldest_podman_at_hand_resolves_what_we_write(node: Node) -> None:
    name = f"c-{UID}-gpu-a"
    devices = node.prepare(node.grant(name))
    found = node.run(
        node.image("debian"),
        devices,
        *("node:/dev/nvidia0", "node:/dev/nvidiactl", "node:/dev/nvidia-uvm", "node:/dev/nvidia1"),
        *(f"read:/usr/local/vgpu/grants/{name}", f"write:/usr/local/vgpu/grants/{name}"),
        f"write:/usr/local/vgpu/usage/{name}/region",
    )
    for path in ("nvidia0", "nvidiactl", "nvidia-uvm"):
        assert found[f"node:/dev/{path}"] == "ok"
    assert found["node:/dev/nvidia1"] == "No such file or directory"
    assert found[f"read:/usr/local/vgpu/grants/{name}"] == f"grant of {name}"
    assert found[f"write:/usr/local/vgpu/grants/{name}"] == "Read-only file system"
    assert found[f"write:/usr/local/vgpu/usage/{name}/region"] == "ok"
    assert (node.top / "run/usage" / name / "region").exists()


def test_b128_the_preload_file_names_the_library_that_is_mounted(node: Node) -> None:
    devices = node.prepare(node.grant(f"c-{UID}-gpu-a"))
    found = node.run(
        node.image("debian"),
        devices,
        *("read:/etc/ld.so.preload", "read:/usr/local/vgpu/libvgpu.so", "write:/etc/ld.so.preload", "bare"),
        env=("LD_PRELOAD=",),
    )
    assert found["read:/etc/ld.so.preload"] == "/usr/local/vgpu/libvgpu.so|"
    assert found["read:/usr/local/vgpu/libvgpu.so"].startswith("\x7fELF")
    assert found["write:/etc/ld.so.preload"] == "Read-only file system"
    assert found["stderr"].count("the hook is loaded") == 2, (
        "in the program, and in the one started with no environment"
    )


def test_b128_a_hook_that_is_gone_stops_the_container_instead_of_running_it_without_a_limit(node: Node) -> None:
    devices = node.prepare(node.grant(f"c-{UID}-gpu-a"))
    (node.driver.hook / "libvgpu.so").unlink()
    image = node.image("debian")
    with pytest.raises(NotStartedError, match=r"libvgpu\.so.*no such file"):
        node.run(image, devices, "bare")


def test_several_grants_in_one_container_keep_what_is_theirs(node: Node) -> None:
    names = [f"c-{UID}-gpu-a-s1", f"c-{UID}-gpu-a-s2", f"c-{UID}-gpu-b"]
    grants = [node.grant(name, card) for name, card in zip(names, (GA, GA, GB), strict=True)]
    devices = node.prepare(*grants)
    reads = [f"read:/usr/local/vgpu/grants/{name}" for name in names]
    writes = [f"write:/usr/local/vgpu/usage/{name}/region" for name in names]
    found = node.run(node.image("debian"), devices, *reads, *writes, "node:/dev/nvidia0", "node:/dev/nvidia1", "bare")
    assert [found[key] for key in reads] == [f"grant of {name}" for name in names]
    assert {found[key] for key in writes} == {"ok"}
    assert found["node:/dev/nvidia0"] == found["node:/dev/nvidia1"] == "ok"
    one = node.run(node.image("redhat"), devices[1:2], *reads)
    assert [one[key] for key in reads] == [
        "No such file or directory",
        f"grant of {names[1]}",
        "No such file or directory",
    ]


def test_b149_a_whole_card_by_explicit_wish_has_no_hook_but_its_grant(node: Node) -> None:
    name = f"c-{UID}-gpu-a"
    devices = node.prepare(node.grant(name, memory_bytes=0), limiter="none")
    found = node.run(
        node.image("debian"), devices, "libcuda.so.1", "read:/etc/ld.so.preload", f"read:/usr/local/vgpu/grants/{name}"
    )
    assert found["libcuda.so.1"] == "libcuda 550.163.01"
    assert found["read:/etc/ld.so.preload"] == "No such file or directory"
    assert found[f"read:/usr/local/vgpu/grants/{name}"] == f"grant of {name}"
    assert "the hook is loaded" not in found["stderr"]


def test_b130_after_a_driver_update_a_new_container_has_the_new_libraries(node: Node) -> None:
    grant = node.grant(f"c-{UID}-gpu-a")
    image = node.image("debian")
    assert node.run(image, node.prepare(grant), "libcuda.so.1")["libcuda.so.1"] == "libcuda 550.163.01"
    node.install("580.2")
    assert node.run(image, node.prepare(grant), "libcuda.so.1")["libcuda.so.1"] == "libcuda 580.2"


def test_b234_an_image_that_lays_traps_reaches_nothing_of_the_host(node: Node) -> None:
    """Links where our mounts go, and a preload of its own: all resolve inside the image, nothing runs outside."""
    victim = node.top / "victim"
    victim.mkdir()
    (victim / "libcuda.so.1").write_text("precious")
    image = node.image("debian")
    (image / "usr/lib/x86_64-linux-gnu").mkdir(parents=True)
    (image / "usr/lib/x86_64-linux-gnu/libcuda.so.1").symlink_to(f"{'../' * 30}{str(victim)[1:]}/libcuda.so.1")
    (image / "usr/lib64").symlink_to(victim)
    (image / "usr/local").mkdir()
    (image / "usr/local/vgpu").symlink_to(victim)
    (image / "etc/ld.so.preload").symlink_to(victim / "preload")
    (image / "etc/ld.so.conf").write_text("/tmp\n")
    shared(
        image / "tmp/evil.so",
        "evil.so",
        '#include <stdio.h>\n__attribute__((constructor)) static void x(void) { puts("evil=1"); }\n',
    )
    devices = node.prepare(node.grant(f"c-{UID}-gpu-a"))
    before = {path.name: path.read_bytes() for path in victim.iterdir()}
    found = node.run(image, devices, "libcuda.so.1", "read:/etc/ld.so.preload", env=("LD_PRELOAD=/tmp/evil.so",))
    assert {path.name: path.read_bytes() for path in victim.iterdir()} == before
    assert found["evil"] == "1", "the tenant's own preload is the tenant's own business"
    assert found["libcuda.so.1"] == "libcuda 550.163.01"
    assert "the hook is loaded" in found["stderr"]


def test_b121_podman_would_not_find_a_device_without_edits(node: Node) -> None:
    """Why we never write one: the whole file is refused, and the user is told nothing but a name."""
    (node.store.directory / "gpu.aliquot.dev-claim.json").write_text(
        '{"cdiVersion": "0.3.0", "kind": "gpu.aliquot.dev/claim", "devices": [{"name": "x", "containerEdits": {}}]}'
    )
    image = node.image("debian")
    with pytest.raises(NotStartedError, match=r"unresolvable CDI devices gpu\.aliquot\.dev/claim=x"):
        node.run(image, ["gpu.aliquot.dev/claim=x"], "bare")
