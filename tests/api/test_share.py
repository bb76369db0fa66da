# SPDX-License-Identifier: Apache-2.0
"""Claim parameters: strict towards users, lenient towards what we stored, blind to other drivers'."""

from __future__ import annotations

import contextlib
import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aliquot.api.errors import RequestError
from aliquot.api.grant import CorePolicy
from aliquot.api.names import DRIVER
from aliquot.api.share import (
    ALLOWED_ENV,
    FIELDS,
    ConfigEntry,
    Limiter,
    OpaqueConfig,
    Share,
    decode_share,
    decode_stored_share,
    encode_share,
    share_for,
)

WHERE = "claim team-a/train (uid 1)"


def parameters(**fields) -> bytes:
    return json.dumps({"apiVersion": "gpu.aliquot.dev/v1", "kind": "Share"} | fields).encode()


def entry(source="FromClaim", requests=(), driver=DRIVER, **fields) -> ConfigEntry:
    return ConfigEntry(source, tuple(requests), OpaqueConfig(driver, msgspec.Raw(parameters(**fields))))


shares = st.builds(
    Share,
    limiter=st.sampled_from(Limiter),
    core_policy=st.sampled_from(CorePolicy),
    priority=st.integers(0, 1),
    memory_oversubscribe=st.booleans(),
    env=st.dictionaries(st.sampled_from(sorted(ALLOWED_ENV)), st.from_regex(r"[ -~]{0,20}", fullmatch=True)),
)


class TestDecode:
    def test_all_fields_as_a_user_writes_them(self):
        written = parameters(
            limiter="none", corePolicy="force", priority=1, memoryOversubscribe=True, env={"LIBCUDA_LOG_LEVEL": "3"}
        )
        assert decode_share(written, where=WHERE) == Share(
            limiter=Limiter.NONE,
            core_policy=CorePolicy.FORCE,
            priority=1,
            memory_oversubscribe=True,
            env={"LIBCUDA_LOG_LEVEL": "3"},
        )

    def test_nothing_given_means_the_defaults(self):
        share = decode_share(parameters(), where=WHERE)
        assert share == Share()
        assert (share.limiter, share.core_policy, share.priority) == (Limiter.HOOK, CorePolicy.DEFAULT, 0)

    @given(shares)
    def test_there_and_back(self, share):
        assert decode_share(json.dumps(encode_share(share)).encode(), where=WHERE) == share
        assert decode_share(encode_share(share), where=WHERE) == share
        assert decode_stored_share(encode_share(share)) == share

    def test_b099_a_misspelt_field_is_named(self):
        with pytest.raises(RequestError) as refused:
            decode_share(parameters(memroyLimit="4Gi"), where=WHERE)
        text = str(refused.value)
        assert '"memroyLimit"' in text
        assert "capacity.requests" in text
        assert WHERE in text

    def test_b099_the_field_that_was_meant_is_suggested(self):
        with pytest.raises(RequestError, match='"corePolcy": did you mean "corePolicy"'):
            decode_share(parameters(corePolcy="force"), where=WHERE)

    def test_b099_every_unknown_field_is_named_and_known_ones_listed(self):
        with pytest.raises(RequestError, match='unknown fields "bar", "foo"') as refused:
            decode_share(parameters(foo=1, bar=2), where=WHERE)
        assert all(field in str(refused.value) for field in FIELDS)

    @pytest.mark.parametrize(
        ("fields", "named"),
        [
            ({"priority": 2}, "priority"),
            ({"priority": -1}, "priority"),
            ({"priority": "high"}, "priority"),
            ({"priority": True}, "priority"),
            ({"limiter": "magic"}, "limiter"),
            ({"corePolicy": "Force"}, "corePolicy"),
            ({"memoryOversubscribe": "yes"}, "memoryOversubscribe"),
            ({"memoryOversubscribe": 1}, "memoryOversubscribe"),
            ({"env": ["A=B"]}, "env"),
            ({"env": {"LIBCUDA_LOG_LEVEL": 3}}, "env"),
            ({"env": {"LD_PRELOAD": "/x.so"}}, "LD_PRELOAD"),
            ({"env": {"LIBCUDA_LOG_LEVEL": "3\nX=1"}}, "LIBCUDA_LOG_LEVEL"),
            ({"env": {"LIBCUDA_LOG_LEVEL": "3" * 257}}, "LIBCUDA_LOG_LEVEL"),
            ({"limiter": None}, "limiter"),
        ],
    )
    def test_a_wrong_value_names_its_field_and_the_claim(self, fields, named):
        with pytest.raises(RequestError, match=named) as refused:
            decode_share(parameters(**fields), where=WHERE)
        assert WHERE in str(refused.value)

    @pytest.mark.parametrize(
        "raw",
        [
            b"",
            b"{",
            b"null",
            b"[]",
            b'"x"',
            b"\xff",
            b"{}",
            b'{"apiVersion":"gpu.aliquot.dev/v2","kind":"Share"}',
            b'{"apiVersion":"gpu.aliquot.dev/v1","kind":"Shares"}',
            b'{"apiVersion":["gpu.aliquot.dev/v1"],"kind":"Share"}',
        ],
    )
    def test_what_is_not_a_share_is_refused_with_what_is(self, raw):
        with pytest.raises(RequestError, match=r"parameters are") as refused:
            decode_share(raw, where=WHERE)
        assert WHERE in str(refused.value)

    @given(st.binary(max_size=100))
    def test_any_bytes_give_a_refusal(self, raw):
        with pytest.raises(RequestError):
            decode_share(raw, where=WHERE)

    @given(
        st.dictionaries(
            st.sampled_from(FIELDS) | st.text(max_size=8),
            st.none() | st.booleans() | st.integers() | st.text(max_size=8),
        )
    )
    def test_any_fields_give_a_share_or_a_refusal(self, fields):
        with contextlib.suppress(RequestError):
            assert isinstance(decode_share(parameters(**fields), where=WHERE), Share)


class TestStored:
    def test_b099_a_misspelt_field_in_a_stored_entry_is_skipped(self):
        assert decode_stored_share(parameters(memroyLimit="4Gi", priority=1)) == Share(priority=1)

    def test_an_unreadable_value_takes_its_default_and_leaves_the_others(self):
        assert decode_stored_share(parameters(priority="low", corePolicy="force")) == Share(
            core_policy=CorePolicy.FORCE
        )

    @given(st.binary(max_size=100) | st.dictionaries(st.sampled_from(FIELDS), st.integers() | st.text(max_size=5)))
    def test_nothing_stored_is_ever_refused(self, stored):
        assert isinstance(decode_stored_share(stored), Share)


class TestShareFor:
    def test_no_configuration_means_the_defaults(self):
        assert share_for([], "gpu", where=WHERE) == Share()

    def test_a_claim_overrides_its_class_field_by_field(self):
        entries = [
            entry("FromClaim", priority=1, limiter="hook"),
            entry("FromClass", corePolicy="force", limiter="none"),
        ]
        assert share_for(entries, "gpu", where=WHERE) == Share(
            priority=1, limiter=Limiter.HOOK, core_policy=CorePolicy.FORCE
        )

    def test_the_later_of_two_entries_wins(self):
        entries = [entry(priority=1), entry(priority=0)]
        assert share_for(entries, "gpu", where=WHERE).priority == 0

    @pytest.mark.parametrize(
        ("requests", "request_name", "holds"),
        [
            ((), "gpu", True),
            (("gpu",), "gpu", True),
            (("gpu",), "gpu/small", True),
            (("gpu/small",), "gpu/small", True),
            (("gpu/small",), "gpu/large", False),
            (("gpu/small",), "gpu", False),
            (("other",), "gpu", False),
            (("other", "gpu"), "gpu", True),
        ],
    )
    def test_an_entry_holds_for_its_requests_only(self, requests, request_name, holds):
        share = share_for([entry(requests=requests, priority=1)], request_name, where=WHERE)
        assert share.priority == (1 if holds else 0)

    def test_another_drivers_parameters_are_not_looked_into(self):
        foreign = ConfigEntry("FromClaim", (), OpaqueConfig("gpu.example.com", msgspec.Raw(b"not json at all")))
        assert share_for([foreign, entry(priority=1)], "gpu", where=WHERE).priority == 1

    def test_configuration_that_is_not_opaque_is_an_error(self):
        with pytest.raises(RequestError, match=r"config\[0\] \(FromClaim\) is not opaque"):
            share_for([ConfigEntry("FromClaim", (), None)], "gpu", where=WHERE)

    def test_b099_the_entry_at_fault_is_named(self):
        with pytest.raises(
            RequestError, match=r'claim team-a/train .*config\[1\] \(FromClaim\): unknown field "memroyLimit"'
        ):
            share_for([entry("FromClass"), entry(memroyLimit="4Gi")], "gpu", where=WHERE)

    def test_a_bad_entry_for_another_request_harms_nobody(self):
        assert share_for([entry(requests=["other"], memroyLimit="4Gi")], "gpu", where=WHERE) == Share()

    def test_entries_decode_from_a_claims_status(self):
        text = (
            b'[{"source":"FromClaim","requests":["gpu"],"opaque":{"driver":"gpu.aliquot.dev","parameters":'
            + parameters(priority=1)
            + b'}},{"source":"FromClass","requests":[],"opaque":{"driver":"x","parameters":[1]}}]'
        )
        entries = msgspec.json.decode(text, type=list[ConfigEntry])
        assert share_for(entries, "gpu", where=WHERE).priority == 1
