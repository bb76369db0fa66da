# SPDX-License-Identifier: Apache-2.0
"""The three images of a local cluster: pause, workload, and our own, each built once per content.

Never asks a registry for an image. Invariant: an archive in the cache is named after a hash of everything that went
into it, so one that is there is the right one.
"""

from __future__ import annotations

import hashlib
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from aliquot.e2e.images.archive import Layer, pack_layer, read_layer, write_archive
from aliquot.e2e.once import alone, say
from aliquot.e2e.toolchain import MissingPartError, cache_root

ROOT: Final = Path(__file__).resolve().parents[4]
"""The checkout."""
SOURCES: Final = ROOT / "e2e" / "workload"
PAUSE: Final = "aliquot-pause:dev"
WORKLOAD: Final = "aliquot-workload:dev"
OURS: Final = "aliquot:dev"
"""The name that the manifests use."""

_C_FLAGS: Final = ("-std=c11", "-D_GNU_SOURCE", "-O2", "-Wall", "-Wextra", "-Werror")
_SUITE: Final = "bookworm"
_PYTHON: Final = "3.11"
"""The Python of that suite; wheels are chosen for it, whatever runs here."""
_PACKAGES: Final = (
    "python3-minimal",
    "libpython3.11-stdlib",
    "libstdc++6",
    "busybox-static",
)
_PACKAGES_OURS: Final = ("api/aliquot", "cdi/aliquot", "node/aliquot", "dra_driver/aliquot", "hook/aliquot")
_LIBRARIES: Final = ("libc.so.6", "libm.so.6", "libdl.so.2", "libpthread.so.0", "librt.so.1", "libgcc_s.so.1")
_PATH: Final = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_KEEP_S: Final = 600.0
_UNNEEDED: Final = ("usr/share/doc", "usr/share/man", "usr/share/locale", "usr/share/info", "usr/share/lintian", "dev")


@dataclass(frozen=True)
class Image:
    """A finished archive and the name of the image in it."""

    name: str
    archive: Path


def images_dir() -> Path:
    return cache_root() / "images"


def build_images(hook_dir: Path | None = None, tell: Callable[[str], None] = say) -> list[Image]:
    """All three, built where they are not in the cache; `hook_dir` holds the built hook (default: build/hook).

    Raises `MissingPartError` in one sentence where a compiler, a Debian tool or the hook is missing.
    """
    images_dir().mkdir(parents=True, exist_ok=True)
    with alone("images", "another run is building images; waiting for it", tell):
        return [pause(tell), workload(tell), ours(hook_dir or ROOT / "build" / "hook", tell)]


def pause(tell: Callable[[str], None] = say) -> Image:
    """One static program that does nothing, as a pod's first process."""
    source = SOURCES / "pause.c"

    def fill(folder: Path) -> None:
        _compile(source, folder / "pause", "-static", "-s")

    layer = _layer("pause", _hash([source], _C_FLAGS), fill, tell)
    return _image(PAUSE, [layer], {"Entrypoint": ["/pause"], "Env": [_PATH], "User": "65535:65535"})


def workload(tell: Callable[[str], None] = say) -> Image:
    """busybox, this machine's C library and loader, and the test program."""
    source = SOURCES / "workload.c"
    loader, libraries = _c_library()
    busybox = _program("busybox", "busybox-static")

    def fill(folder: Path) -> None:
        for path in (loader, *libraries):
            target = folder / str(path).lstrip("/")
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path.resolve(), target)
            target.chmod(0o755)
        for name in ("bin", "etc", "tmp", "usr/bin", "usr/local/bin", "var/run", "root"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / "tmp").chmod(0o1777)
        (folder / "etc" / "passwd").write_text("root:x:0:0:root:/root:/bin/sh\nuser:x:1000:1000::/tmp:/bin/sh\n")
        _install_busybox(busybox, folder)
        _compile(source, folder / "usr" / "local" / "bin" / "workload")

    key = _hash([source, loader, *libraries, busybox], _C_FLAGS)
    layer = _layer("workload", key, fill, tell)
    return _image(WORKLOAD, [layer], {"Cmd": ["workload", "idle"], "Env": [_PATH], "WorkingDir": "/"})


def ours(hook_dir: Path, tell: Callable[[str], None] = say) -> Image:
    """Debian's Python, the locked wheels, and Aliquot from this checkout with its built hook."""
    libraries = [hook_dir / name for name in ("libvgpu.so", "libvgpu-strict.so", "libaliquot-region.so")]
    for library in libraries:
        if not library.is_file():
            raise MissingPartError(f"{library} is not built: run `make hook`")
    lock = ROOT / "requirements" / "runtime.txt"
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    code = [p for top in _PACKAGES_OURS for p in (ROOT / top).rglob("*") if _is_code(p)]
    site = f"usr/lib/python{_PYTHON}/dist-packages"

    def fill_code(folder: Path) -> None:
        for path in code:
            inside = path.relative_to(next(ROOT / t for t in _PACKAGES_OURS if path.is_relative_to(ROOT / t)))
            target = folder / site / "aliquot" / inside
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
        for library in libraries:
            target = folder / site / "aliquot" / "hook" / "lib" / library.name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(library, target)
            target.chmod(0o755)
        about = folder / site / f"aliquot-{version}.dist-info" / "METADATA"
        about.parent.mkdir(parents=True)
        about.write_text(f"Metadata-Version: 2.1\nName: aliquot\nVersion: {version}\n")
        _compile_python(folder, debian)
        program = folder / "usr" / "bin" / "aliquot-dra-driver"
        program.parent.mkdir(parents=True, exist_ok=True)
        program.write_text("#!/usr/bin/python3\nimport sys\nfrom aliquot.dra.__main__ import main\nsys.exit(main())\n")
        program.chmod(0o755)

    def fill_wheels(folder: Path) -> None:
        _fetch_wheels(folder / site, lock)
        _compile_python(folder, debian)

    debian = _layer("debian", _hash([], (_SUITE, *_PACKAGES, *_UNNEEDED)), _fill_debian, tell)
    wheels = _layer("wheels", _hash([lock], (_PYTHON, platform.machine(), debian.digest)), fill_wheels, tell)
    key = _hash([*code, *libraries], [*(str(p.relative_to(ROOT)) for p in code), version, debian.digest])
    mine = _layer("aliquot", key, fill_code, tell)
    environment = [_PATH, "PYTHONUNBUFFERED=1", "PYTHONDONTWRITEBYTECODE=1"]
    return _image(
        OURS, [debian, wheels, mine], {"Entrypoint": ["aliquot-dra-driver"], "Env": environment, "WorkingDir": "/"}
    )


def _is_code(path: Path) -> bool:
    return path.is_file() and "__pycache__" not in path.parts and path.suffix not in {".pyc", ".so"}


def _fill_debian(folder: Path) -> None:
    tool = _program("mmdebstrap", "mmdebstrap")
    argv = [str(tool), "--variant=extract", f"--include={','.join(_PACKAGES)}", _SUITE, str(folder)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise MissingPartError(f"mmdebstrap could not make the root file system: {done.stderr.strip()[-400:]}")
    for name in _UNNEEDED:
        shutil.rmtree(folder / name, ignore_errors=True)
    for name in ("dev", "proc", "sys", "run"):
        (folder / name).mkdir(exist_ok=True)
    (folder / "etc" / "passwd").write_text("root:x:0:0:root:/root:/bin/sh\n")
    _install_busybox(folder / "bin" / "busybox", folder)
    _run_compiler(folder, f"/usr/lib/python{_PYTHON}")


def _compile_python(folder: Path, debian: Layer) -> None:
    """Byte code for the modules below `folder`, by the Python that will run them; without it each start compiles."""
    packages = f"usr/lib/python{_PYTHON}/dist-packages"
    with tempfile.TemporaryDirectory(prefix=".root-", dir=images_dir()) as scratch:
        with tarfile.open(debian.path) as tar:
            # As an attribute: the argument `filter` is younger than Debian 12's Python.
            tar.extraction_filter = getattr(tarfile, "fully_trusted_filter", None)
            tar.extractall(scratch)
        shutil.rmtree(Path(scratch) / packages, ignore_errors=True)
        shutil.move(folder / packages, Path(scratch) / packages)
        _run_compiler(Path(scratch), f"/{packages}")
        shutil.move(Path(scratch) / packages, folder / packages)


def _run_compiler(root: Path, packages: str) -> None:
    # Not the generated thousands of client modules, which we never import.
    flags = ["-q", "-x", "kubernetes/client/(models|api)/|/test/", "--invalidation-mode", "unchecked-hash", packages]
    argv = ["chroot", str(root), "/usr/bin/python3", "-m", "compileall", *flags]
    # A file that does not compile (templates of other versions) is simply left as it is.
    subprocess.run(argv, capture_output=True, check=False, env={"PATH": _PATH.partition("=")[2]})


def _fetch_wheels(folder: Path, lock: Path) -> None:
    folder.mkdir(parents=True)
    machine = platform.machine()
    platforms = [f"--platform={tag}_{machine}" for tag in ("manylinux_2_28", "manylinux_2_17", "manylinux2014")]
    argv = [sys.executable, "-m", "pip", "install", "-q", "--no-compile", "--no-deps", "--require-hashes"]
    argv += ["--only-binary", ":all:", "--python-version", _PYTHON, *platforms, "--platform=any"]
    argv += ["--target", str(folder), "-r", str(lock)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise MissingPartError(f"pip could not fetch the wheels of {lock.name}: {done.stderr.strip()[-400:]}")
    shutil.rmtree(folder / "kubernetes" / "aio", ignore_errors=True)  # 41 MB that nothing of ours imports


def _install_busybox(busybox: Path, folder: Path) -> None:
    target = folder / "bin" / "busybox"
    if busybox != target:
        shutil.copyfile(busybox, target)
    target.chmod(0o755)
    listed = subprocess.run([busybox, "--list"], capture_output=True, text=True, check=True).stdout.split()
    for name in listed:
        link = folder / "bin" / name
        if not link.exists() and not link.is_symlink() and not (folder / "usr" / "bin" / name).exists():
            link.symlink_to("busybox")


def _compile(source: Path, target: Path, *flags: str) -> None:
    compiler = _program("gcc", "gcc")
    target.parent.mkdir(parents=True, exist_ok=True)
    argv = [str(compiler), *_C_FLAGS, *flags, "-o", str(target), str(source)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise MissingPartError(f"gcc could not build {source.name} (is libc6-dev there?): {done.stderr.strip()[-400:]}")


def _c_library() -> tuple[Path, list[Path]]:
    """The loader and the libraries that a program compiled here needs, at the paths they have here."""
    compiler = _program("gcc", "gcc")

    def where(name: str) -> Path | None:
        told = subprocess.run([compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=True)
        path = Path(told.stdout.strip())
        return Path("/") / path.resolve().parent.relative_to("/") / name if path.is_absolute() else None

    loader = {"x86_64": "/lib64/ld-linux-x86-64.so.2", "aarch64": "/lib/ld-linux-aarch64.so.1"}[platform.machine()]
    found = [p for p in map(where, _LIBRARIES) if p is not None and p.exists()]
    if not any(p.name == "libc.so.6" for p in found):
        raise MissingPartError("gcc does not know where libc.so.6 lies; please install libc6-dev")
    return Path(loader), found


def _program(name: str, package: str) -> Path:
    found = shutil.which(name)
    if found is None:
        raise MissingPartError(f"{name} is missing: run `make apt`, or install what Debian calls {package}")
    return Path(found)


def _hash(files: Iterable[Path], texts: Sequence[str]) -> str:
    digest = hashlib.sha256()
    for path in sorted(files):
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    digest.update("\0".join(texts).encode())
    digest.update(Path(__file__).read_bytes())
    return digest.hexdigest()[:24]


def _layer(name: str, key: str, fill: Callable[[Path], None], tell: Callable[[str], None]) -> Layer:
    target = images_dir() / f"{name}-{key}.layer"
    if target.is_file():
        target.touch()
        return read_layer(target)
    tell(f"image layer {name}: building")
    _forget(f"{name}-*.layer")
    with tempfile.TemporaryDirectory(prefix=".layer-", dir=images_dir()) as scratch:
        folder = Path(scratch) / "root"
        folder.mkdir()
        fill(folder)
        return pack_layer(folder, target)


def _image(name: str, layers: Sequence[Layer], config: Mapping[str, Any]) -> Image:
    digest = hashlib.sha256(repr((name, [layer.digest for layer in layers], sorted(config.items()))).encode())
    short = name.partition(":")[0]
    archive = images_dir() / f"{short}-{digest.hexdigest()[:24]}.tar"
    if not archive.is_file():
        _forget(f"{short}-{'?' * 24}.tar")
        write_archive(archive, name, layers, config)
    archive.touch()
    return Image(name, archive)


def _forget(pattern: str) -> None:
    """Removes what nobody used for ten minutes; another run may be reading younger ones."""
    for old in images_dir().glob(pattern):
        if time.time() - old.stat().st_mtime > _KEEP_S:
            old.unlink(missing_ok=True)
