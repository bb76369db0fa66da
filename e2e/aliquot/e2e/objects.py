# SPDX-License-Identifier: Apache-2.0
"""Claims, templates and pods as a user would write them, as dictionaries. Pure.

Invariant: a share is always asked for twice, as `capacity.requests` and as a CEL minimum, so that it means the same
on clusters that drop the first (control-plane.md 5).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from aliquot.api import names
from aliquot.e2e.api import RESOURCE_API, Object
from aliquot.e2e.images.recipes import WORKLOAD


def at_least(memory: str) -> str:
    """CEL: the device has at least that much memory (of a shared one: in all)."""
    return f'device.capacity["{names.DRIVER}"].{names.CAPACITY_MEMORY}.compareTo(quantity("{memory}")) >= 0'


def is_card(uuid: str) -> str:
    """CEL: the device is that card or a slot of it."""
    attributes = f'device.attributes["{names.DRIVER}"]'
    card = f'("uuid" in {attributes} && {attributes}.uuid == "{uuid}")'
    slot = f'("parentUUID" in {attributes} && {attributes}.parentUUID == "{uuid}")'
    return f"{card} || {slot}"


def share(memory: str, *, cores: int = 0, name: str = "gpu", selectors: Sequence[str] = ()) -> Object:
    """A request for a share of a card; `selectors` are further CEL expressions."""
    requests = {names.CAPACITY_MEMORY: memory}
    if cores:
        requests[names.CAPACITY_CORES] = str(cores)
    exactly = {
        "deviceClassName": names.CLASS_SHARE,
        "capacity": {"requests": requests},
        "selectors": [{"cel": {"expression": e}} for e in (at_least(memory), *selectors)],
    }
    return {"name": name, "exactly": exactly}


def opaque(parameters: Mapping[str, Any], requests: Sequence[str] = ()) -> Object:
    """An entry of a claim's `config` for our driver."""
    entry: Object = {"opaque": {"driver": names.DRIVER, "parameters": dict(parameters)}}
    if requests:
        entry["requests"] = list(requests)
    return entry


def _devices(requests: Sequence[Object], config: Sequence[Object]) -> Object:
    devices: Object = {"requests": list(requests)}
    if config:
        devices["config"] = list(config)
    return devices


def claim(name: str, *requests: Object, config: Sequence[Object] = ()) -> Object:
    """A named claim."""
    spec = {"devices": _devices(requests, config)}
    return {"apiVersion": RESOURCE_API, "kind": "ResourceClaim", "metadata": {"name": name}, "spec": spec}


def claim_template(name: str, *requests: Object, config: Sequence[Object] = ()) -> Object:
    """A template: each pod that names it gets a claim of its own."""
    spec = {"spec": {"devices": _devices(requests, config)}}
    return {"apiVersion": RESOURCE_API, "kind": "ResourceClaimTemplate", "metadata": {"name": name}, "spec": spec}


def from_template(template: str) -> Object:
    """How a pod refers to a template."""
    return {"resourceClaimTemplateName": template}


def named(name: str) -> Object:
    """How a pod refers to a named claim."""
    return {"resourceClaimName": name}


def container(name: str, command: Sequence[str], *, claims: Sequence[str] = (), image: str = WORKLOAD) -> Object:
    """A container that uses these of its pod's claims."""
    return {
        "name": name,
        "image": image,
        "imagePullPolicy": "IfNotPresent",
        "command": list(command),
        "resources": {"claims": [{"name": c} for c in claims]} if claims else {},
    }


def pod(
    name: str,
    *,
    claims: Mapping[str, Object] | None = None,
    command: Sequence[str] = ("workload", "idle"),
    containers: Sequence[Object] = (),
    node: str = "",
    host_folder: str = "",
    restart: str = "Never",
) -> Object:
    """A pod whose one container, unless others are given, runs `command` and uses all its claims.

    `host_folder` is mounted at /shared in that container. `node` binds it by node affinity, through the scheduler.
    """
    claims = claims or {}
    main = list(containers) or [container("main", command, claims=list(claims))]
    spec: Object = {
        "restartPolicy": restart,
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": 1,
        "dnsPolicy": "Default",
        "enableServiceLinks": False,
        "containers": main,
    }
    if claims:
        spec["resourceClaims"] = [{"name": k, **v} for k, v in claims.items()]
    if node:
        spec["nodeSelector"] = {"kubernetes.io/hostname": node}
    if host_folder:
        spec["volumes"] = [{"name": "shared", "hostPath": {"path": host_folder, "type": "DirectoryOrCreate"}}]
        for each in main:
            each["volumeMounts"] = [{"name": "shared", "mountPath": "/shared"}]
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}
