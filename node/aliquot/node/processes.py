# SPDX-License-Identifier: Apache-2.0
"""Owners of usage slots and the processes of this node: who is alive, and under which PID.

A slot's owner is named as its own PID namespace sees it: (namespace, pid, start time). Here that is matched
against /proc, which shows the whole node when the daemon shares its PID namespace (hostPID); a process that is
found is watched through a pidfd, so its death is an event and costs no look-up.

Never calls a process dead because it cannot be seen. An owner is dead when no process of the node answers its
description AND processes of its namespace would be visible to us: a namespace we have seen before, our own, or
any once it is proven that we look into nested namespaces. Otherwise it is `uncertain`, and nobody acts on it.

The caller reads the slots first and asks second; then whoever claims a slot in between is simply not asked about.
"""

# ruff: noqa: PTH116, PTH123, PTH208 - a look goes through every process of the node; Path costs more than the calls do

from __future__ import annotations

import contextlib
import errno
import os
import resource
import select
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

_INITIAL_PID_NAMESPACE: Final = 0xEFFFFFFC
"""Inode of the machine's own PID namespace (include/linux/proc_ns.h)."""

_START_MASK: Final = 0xFFFFFFFF
_GONE: Final = 0
_HIDDEN: Final = -1
"""Instead of a namespace: the process is not there any more; it is not ours to see."""

_MAPS_A_ROUND: Final = 64
"""Processes whose mappings are read in one look; each can take a millisecond."""

_DEAD_STATES: Final = frozenset(b"ZXx")


class Owner(NamedTuple):
    """Who holds a slot."""

    pidns: int
    """Inode of its PID namespace; 0 = it could not find out (no /proc in its container)."""
    pid: int
    """As that namespace sees it."""
    start_time: int
    """Low 32 bits of field 22 of /proc/<pid>/stat, in clock ticks; 0 = it could not find out."""
    file: int = 0
    """Inode of the usage file, for an owner that knows neither of the two: it is whoever has that file mapped."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """What became of the owners that were asked about."""

    alive: dict[Owner, int] = field(default_factory=dict)
    """With the PID on the node."""
    dead: frozenset[Owner] = frozenset()
    uncertain: frozenset[Owner] = frozenset()
    """Not found, but they might live where we cannot look."""


class _Stat(NamedTuple):
    dead: bool
    start_time: int


class Processes:
    """The node's processes as `proc` (a procfs of the node's PID namespace) shows them. For one thread."""

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = os.fspath(proc)
        # The other half stays for sockets and files of the daemon; whoever is not watched is asked about.
        self._most_watched = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2
        self._watched: dict[Owner, tuple[int, int]] = {}
        """Host PID and pidfd; -1 where there is none, then /proc is asked each time."""
        self._by_fd: dict[int, Owner] = {}
        self._epoll = select.epoll()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._epoll.register(self._wake, select.EPOLLIN)
        self._seen: set[int] = set()
        self._own = self._namespace("self")
        # A procfs of an outer namespace shows PIDs that mean somebody else to our own system calls.
        self._pids_are_ours = len(self._pids_of("self")) == 1
        self._seen.add(self._own)
        self._sees_nested = self._own == _INITIAL_PID_NAMESPACE

    def close(self) -> None:
        """Let go of every descriptor."""
        for _, pidfd in self._watched.values():
            if pidfd >= 0:
                os.close(pidfd)
        self._watched.clear()
        self._by_fd.clear()
        self._epoll.close()
        os.close(self._wake)

    def wait(self, timeout_s: float) -> bool:
        """Until a watched process dies (True), `wake` is called, or the time is over."""
        died = False
        for fd, _ in self._epoll.poll(max(0.0, timeout_s)):
            if fd == self._wake:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._wake)
            else:
                died = True
        return died

    def wake(self) -> None:
        """End a `wait`; may be called from any thread."""
        os.eventfd_write(self._wake, 1)

    @property
    def watched(self) -> int:
        """How many processes are known."""
        return len(self._watched)

    def judge(self, owners: Collection[Owner]) -> Judgement:
        """Who of `owners` lives. Whoever is not among them is no longer watched. Raises `OSError` without /proc."""
        asked = owners if isinstance(owners, (set, frozenset)) else frozenset(owners)
        dead = self._deaths() & asked
        for gone in self._watched.keys() - asked:
            self._forget(gone)
        unknown = asked - self._watched.keys() - dead
        found, uncertain = self._find(unknown) if unknown else ({}, frozenset())
        for owner, host_pid in found.items():
            if not self._watch(owner, host_pid):
                dead |= {owner}
        dead |= unknown - found.keys() - uncertain
        alive = {owner: self._watched[owner][0] for owner in asked if owner in self._watched}
        return Judgement(alive, frozenset(dead), frozenset(uncertain))

    # ---- those we know

    def _deaths(self) -> set[Owner]:
        dead = set()
        for fd, _ in self._epoll.poll(0, max(1, len(self._by_fd) + 1)):
            owner = self._by_fd.get(fd)
            if owner is not None:
                dead.add(owner)
        for owner, (host_pid, pidfd) in self._watched.items():
            if pidfd < 0 and not self._is(owner, host_pid):
                dead.add(owner)
        for owner in dead:
            self._forget(owner)
        return dead

    def _watch(self, owner: Owner, host_pid: int) -> bool:
        """Watch a process that was found; False: it died before we could."""
        pidfd = -1
        if self._pids_are_ours and len(self._by_fd) < self._most_watched:
            try:
                pidfd = os.pidfd_open(host_pid)
            except ProcessLookupError:
                return False
            except OSError as e:
                # An old kernel, or no descriptors left: asking /proc each round works too.
                if e.errno not in (errno.ENOSYS, errno.EMFILE, errno.ENFILE, errno.EPERM):
                    raise
        if not self._is(owner, host_pid):
            # The PID went to somebody else between the look and the pidfd.
            if pidfd >= 0:
                os.close(pidfd)
            return False
        self._watched[owner] = (host_pid, pidfd)
        if pidfd >= 0:
            self._by_fd[pidfd] = owner
            self._epoll.register(pidfd, select.EPOLLIN)
        return True

    def _forget(self, owner: Owner) -> None:
        _, pidfd = self._watched.pop(owner)
        if pidfd >= 0:
            del self._by_fd[pidfd]
            self._epoll.unregister(pidfd)
            os.close(pidfd)

    def _is(self, owner: Owner, host_pid: int) -> bool:
        stat = self._stat(host_pid)
        if stat is None or stat.dead:
            return False
        if owner.pidns == 0:
            return self._maps(host_pid, owner.file)
        return stat.start_time == owner.start_time or self._in_other_time_namespace(host_pid)

    # ---- those we do not know

    def _find(self, owners: frozenset[Owner] | set[Owner]) -> tuple[dict[Owner, int], frozenset[Owner]]:
        """Host PIDs of those who are found, and those who are neither found nor certainly gone."""
        found: dict[Owner, int] = {}
        maybe: set[Owner] = set()
        starts = {owner.start_time for owner in owners}
        others = []
        for host_pid in self._pids():
            stat = self._stat(host_pid)
            if stat is None or stat.dead:
                continue
            if stat.start_time not in starts:
                others.append(host_pid)
                continue
            namespace, pid = self._namespace(host_pid), self._own_pid(host_pid)
            if namespace == _HIDDEN:
                # Any owner with this start time and PID may be it.
                maybe.update(o for o in owners if (o.pid, o.start_time) == (pid, stat.start_time))
                continue
            if (owner := Owner(namespace, pid, stat.start_time)) in owners:
                found[owner] = host_pid
            else:
                others.append(host_pid)
        missing = owners - found.keys()
        if missing:
            maybe |= self._look_closer(missing, others, found)
            missing = owners - found.keys()
        hidden = {o for o in missing if not self._sees_nested and o.pidns not in self._seen}
        return found, frozenset((maybe & missing) | hidden)

    def _look_closer(
        self, missing: set[Owner] | frozenset[Owner], pids: list[int], found: dict[Owner, int]
    ) -> set[Owner]:
        """Look at the processes that are none of `missing` at first sight; return owners that stay undecided.

        That tells which namespaces we see; owners without a name are found by what they have mapped, those of
        another time namespace by PID alone, since start times are shifted there. A tenant can invent owners, so what
        is expensive is done a limited number of times.
        """
        named = {(owner.pidns, owner.pid): owner for owner in missing if owner.pidns}
        namespaces = {owner.pidns for owner in missing}
        nameless: dict[int, list[Owner]] = {}
        for owner in missing:
            if not owner.pidns:
                nameless.setdefault(owner.pid, []).append(owner)
        undecided: set[Owner] = set()
        budget = _MAPS_A_ROUND
        for host_pid in pids:
            namespace = self._namespace(host_pid)
            if namespace in (_GONE, _HIDDEN):
                continue
            if not self._sees_nested:
                self._seen.add(namespace)
                self._sees_nested = namespace != self._own
            if not nameless and namespace not in namespaces:
                continue
            pid = self._own_pid(host_pid)
            shifted = named.get((namespace, pid))
            if shifted is not None and self._in_other_time_namespace(host_pid):
                found[shifted] = host_pid
            for owner in nameless.get(pid, ()):
                budget -= 1
                if budget < 0:
                    undecided.add(owner)
                elif self._maps(host_pid, owner.file):
                    found[owner] = host_pid
        return undecided

    def _pids(self) -> list[int]:
        return [int(name) for name in os.listdir(self._proc) if name.isdigit()]

    def _read(self, host_pid: int | str, file: str) -> bytes | None:
        try:
            handle = os.open(f"{self._proc}/{host_pid}/{file}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            return os.read(handle, 8192)
        except OSError:  # ESRCH: died between open and read
            return None
        finally:
            os.close(handle)

    def _stat(self, host_pid: int) -> _Stat | None:
        text = self._read(host_pid, "stat")
        if text is None:
            return None
        # The command may contain spaces and brackets; fields begin after its last one. Field 3 is the first.
        fields = text[text.rfind(b")") + 2 :].split()
        if len(fields) < 20:
            return None
        # A leader that ended while other threads go on is a zombie too, and its process is alive.
        dead = fields[0][0] in _DEAD_STATES and int(fields[17]) <= 1
        return _Stat(dead, int(fields[19]) & _START_MASK)

    def _namespace(self, host_pid: int | str) -> int:
        """Inode of its PID namespace, or `_GONE`, `_HIDDEN`."""
        try:
            return os.stat(f"{self._proc}/{host_pid}/ns/pid").st_ino
        except PermissionError:
            return _HIDDEN
        except OSError:
            return _GONE

    def _own_pid(self, host_pid: int) -> int:
        """PID in the process's own namespace; 0: gone."""
        pids = self._pids_of(host_pid)
        return int(pids[-1]) if pids else 0

    def _pids_of(self, host_pid: int | str) -> list[bytes]:
        """Its PIDs from this procfs's namespace inwards (NSpid)."""
        for line in (self._read(host_pid, "status") or b"").split(b"\n"):
            if line.startswith(b"NSpid:"):
                return line.split()[1:]
        return []

    def _maps(self, host_pid: int, inode: int) -> bool:
        """Whether the process has the file with that inode mapped for writing, shared."""
        try:
            with open(f"{self._proc}/{host_pid}/maps", "rb") as file:
                return any(b" rw-s " in line and line.split()[4] == b"%d" % inode for line in file)
        except OSError:
            return False

    def _in_other_time_namespace(self, host_pid: int) -> bool:
        try:
            theirs = os.stat(f"{self._proc}/{host_pid}/ns/time").st_ino
            return theirs != os.stat(f"{self._proc}/self/ns/time").st_ino
        except OSError:
            return False
