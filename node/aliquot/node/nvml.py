# SPDX-License-Identifier: Apache-2.0
"""The only user of pynvml: one open NVML library, its errors as ours, and a way to open it anew.

It never decides anything about cards (see `inventory`, `health`) and never replaces anything inside pynvml.

Which library. pynvml opens `libnvidia-ml.so.1` by that name. When the operator names a file (`library`), we
open that file first: the loader then answers pynvml's request with the object already loaded, since it compares
the asked name with the SONAME of what is there. So a library in a driver root works without LD_LIBRARY_PATH,
and a file that is not NVML (another SONAME) is refused before anything of it runs. A process can use one NVML
library in its life: it stays mapped after shutdown.

Opening anew. After the driver was unloaded and loaded again every handle is dead and NVML has to be shut down
and initialised. `reopen` waits until no call is in flight, because shutting down under a running call is not
safe, and handles carry the number of the opening they belong to, so that an old one is refused by us and never
reaches the library.

Guarded invariant: no call runs while NVML is being shut down, and no handle of an earlier opening is used.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

import pynvml

from aliquot.api.errors import HardwareError, foreign

SONAME: Final = "libnvidia-ml.so.1"

UNINITIALIZED: Final = 1
INVALID_ARGUMENT: Final = 2
NOT_SUPPORTED: Final = 3
NO_PERMISSION: Final = 4
NOT_FOUND: Final = 6
DRIVER_NOT_LOADED: Final = 9
TIMEOUT: Final = 10
LIBRARY_NOT_FOUND: Final = 12
FUNCTION_NOT_FOUND: Final = 13
GPU_IS_LOST: Final = 15
RESET_REQUIRED: Final = 16
VERSION_MISMATCH: Final = 18
ARGUMENT_VERSION_MISMATCH: Final = 25

_ABSENT: Final = frozenset({NOT_SUPPORTED, FUNCTION_NOT_FOUND, ARGUMENT_VERSION_MISMATCH})
"""What a driver answers that is too old, or a card that has not got the thing."""

_NEXT_STEP: Final = {
    NO_PERMISSION: "run as root or give the process access to /dev/nvidia*",
    DRIVER_NOT_LOADED: "load the NVIDIA kernel driver on this node (modprobe nvidia)",
    FUNCTION_NOT_FOUND: "the driver is older than this function; what needs it waits until the driver is upgraded",
    LIBRARY_NOT_FOUND: f"install the NVIDIA driver, or name the file of {SONAME} with the option for the NVML library",
    GPU_IS_LOST: "the card has fallen off the bus; look at the kernel log and reset the card or reboot the node",
    RESET_REQUIRED: "reset the card (nvidia-smi --gpu-reset) or reboot the node",
    VERSION_MISMATCH: "the driver was upgraded under a running library; restart this daemon, or reboot the node",
}


class NvmlError(HardwareError):
    """NVML answered something else than success; `code` is its number, `function` what was asked."""

    def __init__(self, function: str, code: int, text: str) -> None:
        step = _NEXT_STEP.get(code, "look at the kernel log (dmesg) for NVRM lines")
        super().__init__(f"{function}: NVML error {code} ({foreign(text)}); {step}")
        self.function = function
        self.code = code

    @property
    def absent(self) -> bool:
        """Whether the driver or card simply has not got what was asked for."""
        return self.code in _ABSENT

    @property
    def driver_gone(self) -> bool:
        """Whether the whole driver, not one card, is away, so that only `Nvml.reopen` can help."""
        return self.code in (UNINITIALIZED, DRIVER_NOT_LOADED, LIBRARY_NOT_FOUND)


@dataclass(frozen=True, slots=True)
class Handle:
    """A device, MIG device or event set of one opening of NVML."""

    value: Any
    opening: int


class Nvml:
    """NVML; one for the whole process, safe to call from many threads.

    NVML counts its users, so with two of these `reopen` of the one would not get past the other.

    `library` names the file to use; None leaves the search to the loader. Used as a context manager it opens
    and closes. Every call raises `NvmlError` when NVML refuses.
    """

    def __init__(self, library: Path | None = None) -> None:
        self._library = library
        self._preloaded: ctypes.CDLL | None = None
        self._opening = 0
        self._open = False
        self._in_flight = 0
        self._gate = threading.Condition()

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def opening(self) -> int:
        """How often NVML was opened; changes whenever all handles became invalid."""
        return self._opening

    @property
    def is_open(self) -> bool:
        """Whether calls can succeed at all."""
        return self._open

    def open(self) -> None:
        """Load and initialise NVML; nothing happens when it is open. Raises `NvmlError`, `HardwareError`."""
        with self._gate:
            self._open_locked()

    def close(self) -> None:
        """Shut NVML down after the calls in flight; never raises: a driver that is gone cannot be shut down."""
        with self._gate:
            self._gate.wait_for(lambda: self._in_flight == 0)
            self._close_locked()

    def reopen(self, *, after: int | None = None) -> None:
        """Shut down and initialise again, so that cards that came back are seen.

        `after` is the opening the caller saw failing: when somebody else has already opened anew since, nothing
        happens. Raises like `open`; NVML then stays closed and the next `reopen` tries again.
        """
        with self._gate:
            if after is not None and self._open and self._opening != after:
                return
            self._gate.wait_for(lambda: self._in_flight == 0)
            if after is not None and self._open and self._opening != after:
                return
            self._close_locked()
            self._open_locked()

    def call(self, function: str, *args: Any) -> Any:
        """`pynvml.<function>(*args)`; a `Handle` among the arguments is unwrapped and checked first.

        String arguments go positionally, since pynvml encodes only those. Raises `NvmlError`.
        """
        with self._entered(function):
            plain = [self._unwrap(function, a) if isinstance(a, Handle) else a for a in args]
            entry = getattr(pynvml, function, None)
            if entry is None:
                raise NvmlError(function, FUNCTION_NOT_FOUND, "this version of nvidia-ml-py does not know it")
            try:
                return entry(*plain)
            except pynvml.NVMLError as e:
                raise NvmlError(function, int(e.value), str(e)) from None
            except pynvml.NVMLLibraryMismatchError:
                # Not an NVMLError, and raised exactly where a function that picks its own version is not found.
                raise NvmlError(function, FUNCTION_NOT_FOUND, "the driver has no version of it that we know") from None

    def optional(self, function: str, *args: Any, default: Any = None) -> Any:
        """Like `call`, but `default` where driver or card has not got it; every other failure still raises."""
        try:
            return self.call(function, *args)
        except NvmlError as e:
            if e.absent:
                return default
            raise

    def handle(self, function: str, *args: Any) -> Handle:
        """Like `call` for functions that return a handle, wrapped together with the current opening."""
        with self._entered(function):
            return Handle(self.call(function, *args), self._opening)

    def wrap(self, value: Any) -> Handle:
        """A handle that NVML returned inside a structure (the device of an event), for use in this opening."""
        return Handle(value, self._opening)

    @contextmanager
    def _entered(self, function: str) -> Iterator[None]:
        with self._gate:
            if not self._open:
                raise NvmlError(function, UNINITIALIZED, "NVML is not open")
            self._in_flight += 1
        try:
            yield
        finally:
            with self._gate:
                self._in_flight -= 1
                if self._in_flight == 0:
                    self._gate.notify_all()

    def _unwrap(self, function: str, handle: Handle) -> Any:
        if handle.opening != self._opening:
            raise NvmlError(function, INVALID_ARGUMENT, "the handle is from before NVML was opened anew")
        return handle.value

    def _open_locked(self) -> None:
        if self._open:
            return
        if self._library is not None and self._preloaded is None:
            self._preloaded = _preload(self._library)
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as e:
            raise NvmlError("nvmlInit", int(e.value), str(e)) from None
        self._open = True
        self._opening += 1

    def _close_locked(self) -> None:
        if not self._open:
            return
        self._open = False
        try:
            pynvml.nvmlShutdown()
        except pynvml.NVMLError:
            # The driver went away first; NVML's own count is what it is, and nvmlInit copes with either.
            return


def _preload(library: Path) -> ctypes.CDLL:
    """Load `library` so that the loader answers `libnvidia-ml.so.1` with it. Raises `HardwareError`, `NvmlError`."""
    if not library.is_file():
        raise NvmlError("load", LIBRARY_NOT_FOUND, f"{library} is not a file")
    try:
        ours = ctypes.CDLL(str(library.absolute()))
    except OSError as e:
        raise HardwareError(
            f"{library} cannot be loaded: {foreign(e)}; name the {SONAME} of the installed driver"
        ) from None
    try:
        found = ctypes.CDLL(SONAME, mode=os.RTLD_NOLOAD)
    except OSError:
        raise HardwareError(
            f"{library} is not an NVML library: its SONAME is not {SONAME}; name the {SONAME} of the installed driver"
        ) from None
    # Equal handles mean one loaded object: the loader keeps one per file.
    if found._handle != ours._handle:  # noqa: SLF001 - the only name ctypes gives the loader's handle
        raise HardwareError(
            f"{library} cannot be used: another {SONAME} is already loaded in this process; start a new process for it"
        )
    return ours
