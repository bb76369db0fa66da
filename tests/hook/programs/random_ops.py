# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: F403, F405
"""Random operations on memory of every kind; after each one a line with what the hook says is in use.

`random_ops.py SEED COUNT`: waits for a line between two operations, so that somebody else can look at the card.
"""

from __future__ import annotations

import random

from memory import *

chance = random.Random(int(sys.argv[1]))
start()
pools = [default_pool(), pool()]
plain: list[int] = []
managed_live: dict[int, int] = {}
ordered: list[int] = []
arrays: list = []
mipmaps: list = []
handles: list[tuple[int, int]] = []
maps: list[tuple[int, int]] = []
graphs: list = []
SIZES = [1, 511, 512, 513, 4096, MIB, 2 * MIB, 3 * MIB + 7, 40 * MIB]


def take(things: list):
    return things.pop(chance.randrange(len(things))) if things else None


def op_alloc() -> int:
    rc, p = alloc(chance.choice(SIZES))
    if rc == 0:
        plain.append(p)
    return rc


def op_pitch() -> int:
    rc, p, _ = pitch(chance.choice([1, 513, 5000]), chance.randrange(1, 3000))
    if rc == 0:
        plain.append(p)
    return rc


def op_managed() -> int:
    size = chance.choice(SIZES)
    rc, p = managed(size)
    if rc == 0:
        managed_live[p] = (size + 511) // 512 * 512
    return rc


def op_free() -> int:
    if managed_live and chance.random() < 0.5:
        p = chance.choice(list(managed_live))
        del managed_live[p]
        return free(p)
    p = take(plain)
    return 0 if p is None else free(p) if chance.random() < 0.7 else free_async(p)


def op_async() -> int:
    if chance.random() < 0.5:
        rc, p = alloc_async(chance.choice(SIZES))
    else:
        rc, p = alloc_pool(chance.choice(SIZES), chance.choice(pools))
    if rc == 0:
        ordered.append(p)
    return rc


def op_free_async() -> int:
    p = take(ordered)
    return 0 if p is None else free_async(p) if chance.random() < 0.7 else free(p)


def op_sync() -> int:
    return sync()


def op_trim() -> int:
    return trim(chance.choice(pools), chance.choice([0, 0, 64 * MIB]))


def op_threshold() -> int:
    return threshold(chance.choice(pools), chance.choice([0, 2**40]))


def op_array() -> int:
    if chance.random() < 0.5:
        rc, a = array(
            chance.randrange(1, 700), chance.randrange(1, 700), chance.randrange(20), chance.choice([1, 2, 0x20])
        )
        if rc == 0:
            arrays.append(a)
    else:
        rc, a = mipmap(chance.randrange(1, 900), chance.randrange(1, 900), chance.randrange(1, 9))
        if rc == 0:
            mipmaps.append(a)
    return 0 if rc == 1 else rc  # some of these shapes do not exist


def op_array_end() -> int:
    if chance.random() < 0.5:
        a = take(arrays)
        return 0 if a is None else call("cuArrayDestroy", a)
    a = take(mipmaps)
    return 0 if a is None else call("cuMipmappedArrayDestroy", a)


def op_create() -> int:
    size = chance.choice([2, 4, 30]) * MIB
    rc, h = create(size)
    if rc == 0:
        handles.append((h, size))
    return rc


def op_release() -> int:
    h = take(handles)
    return 0 if h is None else release(h[0])


def op_map() -> int:
    if not handles:
        return 0
    h, size = chance.choice(handles)
    at = reserve(size)
    rc = mapped(at, size, h)
    if rc == 0:
        maps.append((at, size))
    return rc


def op_retain() -> int:
    if not maps:
        return 0
    at, size = chance.choice(maps)
    out = c_uint64()
    rc = call("cuMemRetainAllocationHandle", byref(out), c_void_p(at))
    if rc == 0:
        handles.append((out.value, size))
    return rc


def op_unmap() -> int:
    m = take(maps)
    return 0 if m is None else unmap(*m)


def op_graph() -> int:
    g = graph()
    _, p = alloc_node(g, chance.choice(SIZES))
    e = instantiate(g)
    rc = launch(e)
    if rc == 0:
        ordered.append(p)
    graphs.append(e)
    return rc


def op_trim_graphs() -> int:
    return trim_graphs()


def op_context() -> int:
    here = c_void_p()
    call("cuCtxGetCurrent", byref(here))
    other = context()
    for _ in range(chance.randrange(4)):
        alloc(chance.choice(SIZES))
        array2d(chance.randrange(1, 300), chance.randrange(1, 300))
    rc = call("cuCtxDestroy_v2", other)
    call("cuCtxSetCurrent", here)
    return rc


operations = [v for k, v in sorted(globals().items()) if k.startswith("op_")]
for _ in range(int(sys.argv[2])):
    operation = chance.choice(operations)
    rc = operation()
    say(op=operation.__name__, rc=rc, used=used(), managed=sum(managed_live.values()))
    wait()
for p in [*plain, *managed_live]:
    free(p)
for p in ordered:
    free_async(p)
for a in arrays:
    call("cuArrayDestroy", a)
for a in mipmaps:
    call("cuMipmappedArrayDestroy", a)
for m in maps:
    unmap(*m)
for h, _ in handles:
    release(h)
sync()
for p in pools:
    threshold(p, 0)
    trim(p)
trim_graphs()
say(op="end", rc=0, used=used(), managed=0)
