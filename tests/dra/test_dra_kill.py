# SPDX-License-Identifier: Apache-2.0
"""SIGKILL between any two steps of Prepare and Unprepare: the next call continues or undoes."""

from __future__ import annotations

import contextlib

import dra_rig
import grpc
import pytest
from dra_rig import GIB, SHARED

from aliquot.dra.effects import MAKE_STEPS, UNMAKE_STEPS
from aliquot.dra.engine import PREPARE_STEPS, UNPREPARE_STEPS
from aliquot.node.checkpoint import APPEND_STEPS as CHECKPOINT_STEPS

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(300)]

S1 = "11111111-1111-4111-8111-111111111111"
S2 = "22222222-2222-4222-8222-222222222222"


def until(steps, last):
    """The steps of the call itself: an orderly end takes some more."""
    return steps[: steps.index(last) + 1]


def expect_killed(zygote, folders, call):
    """`call` meets a daemon that dies under it."""
    kubelet = dra_rig.Kubelet(folders)
    try:
        with pytest.raises(grpc.RpcError):
            call(kubelet)
    finally:
        kubelet.close()
    assert zygote.end()["signal"] == 9


@contextlib.contextmanager
def serving(zygote, folders):
    zygote.fork()
    kubelet = dra_rig.Kubelet(folders)
    try:
        yield kubelet
    finally:
        kubelet.close()
        assert zygote.end()["signal"] == 0


def two_cards(rig):
    return [
        rig.make.result(SHARED[n], share=share, memory=4 * GIB, cores=0, slots=1) for n, share in ((0, S1), (1, S2))
    ]


def test_b084_a_kill_before_the_spec_is_written_leaves_nothing_once_the_claim_is_deleted(rig):
    folders = rig.folders
    claim = rig.cluster.claim("c1", *two_cards(rig))
    uid = claim["metadata"]["uid"]
    with dra_rig.zygote(folders, rig.inventory) as zygote:
        with serving(zygote, folders) as kubelet:
            kubelet.prepared(claim)
            kubelet.undone(claim)
        zygote.fork()
        kubelet = dra_rig.Kubelet(folders)
        kubelet.prepared(claim)
        kubelet.undone(claim)
        kubelet.close()
        position = zygote.end()["steps"].index("spec") + 1
        zygote.fork(die_at=position)
        expect_killed(zygote, folders, lambda k: k.prepare(claim))
        assert folders.checkpoint()[uid]["state"] == "started"
        assert folders.artefacts(uid)
        rig.cluster.delete(claim)
        with serving(zygote, folders):
            dra_rig.wait_for(lambda: uid not in folders.checkpoint(), "the first clean-up round")
            assert folders.artefacts(uid) == []


def test_kill_between_any_two_steps_of_prepare(rig):
    """After each: the same claim is prepared, or undone, and another claim never gets what it holds."""
    folders = rig.folders
    claim = rig.cluster.claim("c1", *two_cards(rig))
    uid = claim["metadata"]["uid"]
    rival = rig.cluster.claim("rival", rig.make.result(SHARED[0], share=S1, memory=24 * GIB, cores=0, slots=1))
    with dra_rig.zygote(folders, rig.inventory) as zygote:
        with serving(zygote, folders) as kubelet:
            expected = kubelet.prepared(claim)
            artefacts = folders.artefacts(uid)
            kubelet.undone(claim)
        zygote.fork()
        kubelet = dra_rig.Kubelet(folders)
        kubelet.prepared(claim)
        kubelet.close()
        steps = until(zygote.end()["steps"], PREPARE_STEPS[-1])
        with serving(zygote, folders) as kubelet:
            kubelet.undone(claim)
        wanted = {*PREPARE_STEPS, *MAKE_STEPS, *(f"checkpoint: {step}" for step in CHECKPOINT_STEPS)}
        assert wanted <= set(steps)
        for position in range(1, len(steps) + 1):
            zygote.fork(die_at=position)
            expect_killed(zygote, folders, lambda k: k.prepare(claim))
            with serving(zygote, folders) as kubelet:
                if uid in folders.checkpoint():
                    assert "is held" in kubelet.refused(rival) or "belongs to" in kubelet.refused(rival)
                assert kubelet.prepared(claim) == expected, steps[position - 1]
                assert folders.artefacts(uid) == artefacts
                kubelet.undone(claim)
                assert folders.artefacts(uid) == []
                assert folders.checkpoint() == {}
            zygote.fork(die_at=position)
            expect_killed(zygote, folders, lambda k: k.prepare(claim))
            with serving(zygote, folders) as kubelet:
                kubelet.undone(claim)
                assert folders.artefacts(uid) == [], steps[position - 1]
                assert folders.checkpoint() == {}
                kubelet.prepared(rival)
                kubelet.undone(rival)


def test_kill_between_any_two_steps_of_unprepare(rig):
    folders = rig.folders
    claim = rig.cluster.claim("c1", *two_cards(rig))
    uid = claim["metadata"]["uid"]
    with dra_rig.zygote(folders, rig.inventory) as zygote:
        with serving(zygote, folders) as kubelet:
            expected = kubelet.prepared(claim)
            artefacts = folders.artefacts(uid)
        zygote.fork()
        kubelet = dra_rig.Kubelet(folders)
        kubelet.undone(claim)
        kubelet.close()
        steps = until(zygote.end()["steps"], UNPREPARE_STEPS[-1])
        wanted = {*UNPREPARE_STEPS, *UNMAKE_STEPS, *(f"checkpoint: {step}" for step in CHECKPOINT_STEPS)}
        assert wanted <= set(steps)
        for position in range(1, len(steps) + 1):
            with serving(zygote, folders) as kubelet:
                kubelet.prepared(claim)
            zygote.fork(die_at=position)
            expect_killed(zygote, folders, lambda k: k.unprepare(claim))
            with serving(zygote, folders) as kubelet:
                known = uid in folders.checkpoint()
                # What the checkpoint knows is whole again after a start, and nothing else is left.
                assert folders.artefacts(uid) == (artefacts if known else []), steps[position - 1]
                kubelet.undone(claim)
                assert folders.artefacts(uid) == []
                assert folders.checkpoint() == {}
            with serving(zygote, folders) as kubelet:
                assert kubelet.prepared(claim) == expected
                kubelet.undone(claim)
