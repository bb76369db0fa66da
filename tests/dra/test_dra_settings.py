# SPDX-License-Identifier: Apache-2.0
"""Flags and environment: what they mean, and that every mistake is one sentence and one code."""

from __future__ import annotations

from pathlib import Path

import pytest

from aliquot.api.errors import SettingsError
from aliquot.dra.exits import MEANINGS, Exit
from aliquot.dra.settings import exit_code, is_uid, parser, read_settings

NODE = ["--node-name", "n1"]


def test_defaults_are_a_plain_node():
    settings = read_settings(NODE, {})
    assert settings.registry_dir == Path("/var/lib/kubelet/plugins_registry")
    assert settings.plugin_dir == Path("/var/lib/kubelet/plugins/gpu.aliquot.dev")
    assert settings.pool == "n1/gpu"
    assert (settings.kubeconfig, settings.extra_edits, settings.config_file, settings.hook_dir) == (None,) * 4
    assert (settings.driver_root, settings.host_prefix) == (Path("/"), "")


def test_flag_beats_environment_beats_default(tmp_path):
    config = tmp_path / "c.yaml"
    config.write_text("defaults: {maxShares: 2}")
    environ = {"NODE_NAME": "env", "ALIQUOT_CDI_DIR": "/cdi", "ALIQUOT_CONFIG": str(config), "ALIQUOT_HTTP_PORT": ""}
    settings = read_settings(["--node-name", "flag", "--http-address", "::1"], environ)
    assert (settings.node_name, settings.cdi_dir, settings.http_port) == ("flag", Path("/cdi"), 9410)
    assert settings.config.card("u", "p").max_shares == 2
    assert settings.http_address == "::1"


@pytest.mark.parametrize(
    ("arguments", "environ", "says"),
    [
        ([], {}, "--node-name"),
        (["--node-name", "N_1"], {}, "kubectl get nodes"),
        ([*NODE, "--nod"], {}, "--help"),
        ([*NODE, "--http-port", "70000"], {}, "1 to 65535"),
        ([*NODE, "--http-address", "localhost"], {}, "127.0.0.1"),
        ([*NODE, "--cdi-dir", "cdi"], {}, "--cdi-dir 'cdi' is a relative path"),
        ([*NODE, "--pod-uid", "../x"], {}, "metadata.uid"),
        ([*NODE], {"ALIQUOT_LOG_LEVEL": "loud"}, "debug, info, warning, error"),
        ([*NODE, "--log-format", "xml"], {}, "--help"),
    ],
)
def test_a_wrong_flag_is_one_sentence_and_its_code(arguments, environ, says):
    with pytest.raises(SettingsError) as caught:
        read_settings(arguments, environ)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
    assert exit_code(caught.value) is Exit.USAGE


@pytest.mark.parametrize("flag", ["--config", "--extra-edits", "--kubeconfig"])
def test_an_unreadable_file_is_one_sentence_and_its_code(flag, tmp_path):
    for path in (tmp_path / "missing", tmp_path):
        with pytest.raises(SettingsError) as caught:
            read_settings([*NODE, flag, str(path)], {})
        assert str(path) in str(caught.value)
        assert flag in str(caught.value)
        assert exit_code(caught.value) is Exit.FILE


def test_a_wrong_configuration_file_has_the_code_of_files(tmp_path):
    config = tmp_path / "c.json"
    config.write_text('{"defaults": {"maxShares": 0}}')
    with pytest.raises(SettingsError) as caught:
        read_settings([*NODE, "--config", str(config)], {})
    assert exit_code(caught.value) is Exit.FILE


@pytest.mark.parametrize(
    ("here", "host", "root", "prefix"),
    [
        ("/host/", "/", "/", "/host"),
        ("/host/run/nvidia/driver", "/run/nvidia/driver", "/run/nvidia/driver", "/host"),
        ("/run/nvidia/driver", "", "/run/nvidia/driver", ""),
        ("/", "/", "/", ""),
    ],
)
def test_the_drivers_root_here_and_on_the_host(here, host, root, prefix):
    environ = {"ALIQUOT_DRIVER_ROOT": here, "ALIQUOT_DRIVER_ROOT_HOST": host}
    settings = read_settings(NODE, environ)
    assert (settings.driver_root, settings.host_prefix) == (Path(root), prefix)


def test_roots_that_do_not_fit_together_are_refused():
    with pytest.raises(SettingsError, match="does not end in --driver-root-host /run/nvidia/driver"):
        read_settings([*NODE, "--driver-root", "/driver-root", "--driver-root-host", "/run/nvidia/driver"], {})


def test_help_names_every_variable_and_exit_code():
    text = parser().format_help()
    for word in ("NODE_NAME", "POD_UID", "KUBECONFIG", "ALIQUOT_EXTRA_EDITS", "[50, 25, 25]", "--check"):
        assert word in text
    for code, meaning in MEANINGS.items():
        assert f"  {code.value}  {meaning}" in text
    assert set(MEANINGS) == set(Exit)


@pytest.mark.parametrize(
    "text", ["", "u1", "..", "7b9d1b1e6c0f4b0e8f0a0a0a0a0a0a0a", "{7b9d1b1e-6c0f-4b0e-8f0a-0a0a0a0a0a0a}"]
)
def test_only_the_plain_form_of_a_uid_is_one(text):
    assert not is_uid(text)


def test_a_uid_is_one():
    assert is_uid("7b9d1b1e-6c0f-4b0e-8f0a-0a0a0a0a0a0a")
