# SPDX-License-Identifier: Apache-2.0
"""Provider `existing`: a cluster that was there before, named by a kubeconfig file.

Never creates or removes a node and stops nothing. Invariant: what a story leaves there is what it made in its own
namespaces, and Aliquot itself where `install` was called.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from aliquot.api.errors import SettingsError
from aliquot.e2e.api import Api
from aliquot.e2e.cluster import Cluster

KUBECONFIG_VARIABLE: Final = "ALIQUOT_E2E_KUBECONFIG"
NODE_LABEL: Final = "aliquot.dev/gpu=true"


class ExistingCluster(Cluster):
    """The cluster that a kubeconfig's current context points to; its GPU nodes carry the label `aliquot.dev/gpu`."""

    provider = "existing"

    def __init__(self, kubeconfig: Path) -> None:
        """Raises `SettingsError` where the file, kubectl or a labelled node is missing."""
        if not kubeconfig.is_file():
            raise SettingsError(f"{kubeconfig} is no file: set {KUBECONFIG_VARIABLE} to a kubeconfig")
        kubectl = shutil.which("kubectl")
        if kubectl is None:
            raise SettingsError("kubectl is not on PATH; provider `existing` uses the one you use")
        self._kubeconfig = kubeconfig.resolve()
        self._kubectl = kubectl
        self._api = Api.from_kubeconfig(kubeconfig)
        version = self._api.request("GET", "/version")
        self.minor = f"{version['major']}.{str(version['minor']).rstrip('+')}"
        found = self._api.list("v1", "Node", labelSelector=NODE_LABEL)
        self._nodes = tuple(sorted(n["metadata"]["name"] for n in found))
        if not self._nodes:
            self._api.close()
            raise SettingsError(f"no node carries the label {NODE_LABEL}; label the nodes whose cards may be used")

    @property
    def api(self) -> Api:
        return self._api

    @property
    def nodes(self) -> tuple[str, ...]:
        return self._nodes

    def kubectl_argv(self, arguments: Sequence[str]) -> list[str]:
        return [self._kubectl, f"--kubeconfig={self._kubeconfig}", *arguments]

    def stop(self) -> None:
        self._api.close()
