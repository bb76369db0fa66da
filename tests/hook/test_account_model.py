# SPDX-License-Identifier: Apache-2.0
"""The account protocol of region.h, every interleaving of its steps, kills at every step included.

One step is one atomic instruction of hook/src/account.c. The explorer walks all schedules of two processes that
reserve and release, a process that is killed anywhere, and a settler that may itself be killed anywhere, and checks
in every state that what is held never exceeds what the account says, and that a settle with nobody in mid-step
makes the account exact.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

LIMIT = 2


@dataclass(frozen=True)
class World:
    account: tuple[int, int]  # units, sequence
    epoch: int
    charges: tuple[tuple[int, int], ...]
    dead: tuple[bool, ...]
    held: tuple[int, ...]  # what the driver has given out: the truth
    threads: tuple[tuple, ...]  # program counter and locals of each


def process(world: World, slot: int, state: tuple, script: tuple[str, ...]):
    """One step of a process: yields (state', world'). `state` = (position in script, step, locals)."""
    at, step, local = state
    if at >= len(script):
        return
    units, seq = world.account
    c, cseq = world.charges[slot]

    def charge(value: int) -> tuple:
        return tuple((value, cseq + 1) if i == slot else x for i, x in enumerate(world.charges))

    def holds(value: int) -> tuple:
        return tuple(value if i == slot else x for i, x in enumerate(world.held))

    if script[at] == "reserve":
        if step == 0:
            yield (at, 1, (world.epoch,)), world
        elif step == 1:
            yield (at, 2, (local[0], world.account)), world
        elif step == 2:
            e, seen = local
            if seen[0] + 1 > LIMIT:
                # Refused: the matching release has nothing to give back either.
                yield (at + 2, 0, ()), world
            elif world.account == seen:
                yield (at, 3, (e,)), replace(world, account=(units + 1, seq + 1))
            else:
                yield (at, 2, (e, world.account)), world
        elif step == 3:
            yield (at, 4, local), replace(world, charges=charge(c + 1))
        elif step == 4:
            if world.epoch == local[0]:
                # From here on the driver may give the memory out.
                yield (at + 1, 0, ()), replace(world, held=holds(world.held[slot] + 1))
            else:
                yield (at, 5, ()), world
        elif step == 5:
            yield (at, 0, ()), replace(world, charges=charge(c - 1))
    elif step == 0:
        # The driver has taken it back before the account hears of it.
        yield (at, 1, (world.epoch,)), replace(world, held=holds(world.held[slot] - 1))
    elif step == 1:
        yield (at, 2, local), replace(world, charges=charge(max(0, c - 1)))
    elif step == 2:
        yield (at, 3, (local[0], world.account)), world
    elif step == 3:
        if world.epoch != local[0]:
            yield (at + 1, 0, ()), world
        else:
            yield (at, 4, local), world
    elif step == 4:
        e, seen = local
        if world.account == seen:
            yield (at + 1, 0, ()), replace(world, account=(max(0, units - 1), seq + 1))
        else:
            yield (at, 3, (e, world.account)), world


def reaper(world: World, slot: int, state: tuple):
    """Empties the charge of `slot`, once its owner is dead."""
    step, local = state
    if step == 0 and world.dead[slot]:
        yield (1, world.charges[slot]), world
    elif step == 1:
        charges = world.charges
        if charges[slot] == local and local[0]:
            charges = tuple((0, x[1] + 1) if i == slot else x for i, x in enumerate(charges))
        yield (2, ()), replace(world, charges=charges)


def settler(world: World, state: tuple):
    step, local = state
    slots = len(world.charges)
    if step == 0:
        yield (1, (world.account, 0)), world
    elif step == 1:
        yield (2, local), replace(world, epoch=world.epoch + 1)
    elif step < 2 + slots:
        seen, total = local
        yield (step + 1, (seen, total + world.charges[step - 2][0])), world
    elif step == 2 + slots:
        yield (step + 1, local), replace(world, epoch=world.epoch + 1)
    elif step == 3 + slots:
        seen, total = local
        if world.account == seen:
            yield (99, ()), replace(world, account=(total, seen[1] + 1))
        else:
            yield (98, ()), world


def spoilt(state: tuple, after: World, before: World, broken: str) -> tuple[tuple, World]:
    """A settler's step with one deliberate fault, to see that the explorer finds it."""
    if broken == "one bump" and state[0] == 3 + len(after.charges):
        return state, replace(after, epoch=before.epoch)
    if broken == "late read" and state[0] == 3:
        return (3, (after.account, state[1][1])), after
    return state, after


def explore(scripts: list[tuple[str, ...]], kill: set[int], settles: int, *, broken: str = "") -> int:
    n = len(scripts)
    start = World(
        account=(0, 0),
        epoch=0,
        charges=((0, 0),) * n,
        dead=(False,) * n,
        held=(0,) * n,
        threads=tuple((0, 0, ()) for _ in scripts) + tuple((0, ()) for _ in kill) + ((0, ()),) * settles,
    )
    killed = sorted(kill)
    seen = {start}
    todo = [start]
    while todo:
        world = todo.pop()
        held = sum(world.held)
        assert held <= LIMIT, f"more held than the limit: {world}"
        assert held <= world.account[0], f"account too small: {world}"
        moves = []
        for i in range(n):
            if world.dead[i]:
                continue
            moves += [(i, s, w) for s, w in process(world, i, world.threads[i], scripts[i])]
            if i in kill and world.threads[i][0] < len(scripts[i]):
                held_now = tuple(0 if j == i else x for j, x in enumerate(world.held))
                dead = tuple(j == i or x for j, x in enumerate(world.dead))
                moves.append((i, world.threads[i], replace(world, dead=dead, held=held_now)))
        for k, slot in enumerate(killed):
            moves += [(n + k, s, w) for s, w in reaper(world, slot, world.threads[n + k])]
        for k in range(settles):
            at = n + len(killed) + k
            moves += [(at, *spoilt(s, w, world, broken)) for s, w in settler(world, world.threads[at])]
        for at, state, after in moves:
            threads = tuple(state if j == at else x for j, x in enumerate(after.threads))
            nxt = replace(after, threads=threads)
            if nxt not in seen:
                seen.add(nxt)
                todo.append(nxt)
        quiet = all(world.dead[i] or world.threads[i][1] == 0 for i in range(n))
        reaped = all(not world.dead[i] or world.charges[i][0] == 0 for i in range(n))
        if quiet and reaped:
            total = sum(c for c, _ in world.charges)
            assert total == held, f"a settle now would set {total}, held is {held}: {world}"
    return len(seen)


PAIR = ("reserve", "release")


def test_two_processes_and_a_settler():
    assert explore([PAIR, PAIR], kill=set(), settles=1) > 5000


def test_one_killed_anywhere_reaped_and_settled():
    assert explore([PAIR, PAIR], kill={0}, settles=1) > 20000


def test_two_settlers_at_once():
    assert explore([PAIR], kill={0}, settles=2) > 2000


def test_refusals_race_for_the_last_unit():
    assert explore([PAIR, ("reserve",), ("reserve",)], kill=set(), settles=0) > 100


def test_explorer_finds_a_settle_that_bumps_the_epoch_only_once():
    try:
        explore([PAIR, PAIR], kill=set(), settles=1, broken="one bump")
    except AssertionError:
        return
    raise AssertionError("the explorer is blind")


def test_explorer_finds_a_settle_that_reads_the_account_too_late():
    try:
        explore([PAIR, PAIR], kill=set(), settles=1, broken="late read")
    except AssertionError:
        return
    raise AssertionError("the explorer is blind")
