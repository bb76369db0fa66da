# SPDX-License-Identifier: Apache-2.0
"""Paths of the Kubernetes API, built and read.

Pure. Invariant: a name from outside is quoted before it becomes part of a path, so no name can reach another object;
and every path can be named in words ("list resourceslices.resource.k8s.io"), which is how errors and RBAC speak.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Final
from urllib.parse import quote, unquote

Query = Iterable[tuple[str, str]]

RESOURCE_GROUP: Final = "resource.k8s.io"
RESOURCE_API: Final = f"/apis/{RESOURCE_GROUP}/v1"
SLICES: Final = f"{RESOURCE_API}/resourceslices"
CLASSES: Final = f"{RESOURCE_API}/deviceclasses"
CLAIMS: Final = f"{RESOURCE_API}/resourceclaims"
"""Claims of all namespaces; one namespace's are at `namespaced(RESOURCE_API, namespace, "resourceclaims")`."""
NODES: Final = "/api/v1/nodes"
PODS: Final = "/api/v1/pods"
EVENTS_API: Final = "/apis/events.k8s.io/v1"
VERSION: Final = "/version"


def named(collection: str, name: str) -> str:
    """Path of one object of a collection."""
    return f"{collection}/{quote(name, safe='')}"


def namespaced(api: str, namespace: str, resource: str, name: str | None = None) -> str:
    """Path of a namespace's collection, or of one object in it; `api` is such as `/api/v1`."""
    collection = f"{api}/namespaces/{quote(namespace, safe='')}/{resource}"
    return collection if name is None else named(collection, name)


def claim(namespace: str, name: str) -> str:
    """Path of a ResourceClaim."""
    return namespaced(RESOURCE_API, namespace, "resourceclaims", name)


def slice_(name: str) -> str:
    """Path of a ResourceSlice."""
    return named(SLICES, name)


def node(name: str) -> str:
    """Path of a Node."""
    return named(NODES, name)


@dataclasses.dataclass(frozen=True)
class Target:
    """What a request is about, in the words of RBAC."""

    verb: str
    group: str = ""
    resource: str = ""
    """Empty: not an API object (`/version`); then `path` speaks."""
    subresource: str = ""
    namespace: str = ""
    name: str = ""
    path: str = ""

    @property
    def qualified(self) -> str:
        """`resourceclaims.resource.k8s.io`, `nodes`, `pods/status`."""
        resource = f"{self.resource}/{self.subresource}" if self.subresource else self.resource
        return f"{resource}.{self.group}" if self.group else resource

    def __str__(self) -> str:
        if not self.resource:
            return f"{self.verb} {self.path}"
        where = "/".join(part for part in (self.namespace, self.name) if part)
        return f"{self.verb} {self.qualified} {where}".rstrip()


def target(method: str, path: str, query: Query = ()) -> Target:
    """The target of a request, for messages; never fails, whatever the path."""
    parts = [unquote(part) for part in path.strip("/").split("/")]
    if parts[:1] == ["api"] and len(parts) > 2:
        group, rest = "", parts[2:]
    elif parts[:1] == ["apis"] and len(parts) > 3:
        group, rest = parts[1], parts[3:]
    else:
        return Target(verb=method.lower(), path=path)
    namespace = ""
    if rest[0] == "namespaces" and len(rest) > 2:
        namespace, rest = rest[1], rest[2:]
    resource, name, subresource = [*rest[:3], "", ""][:3]
    return Target(_verb(method, name, dict(query)), group, resource, subresource, namespace, name, path)


def _verb(method: str, name: str, query: dict[str, str]) -> str:
    if method == "GET" and not name:
        return "watch" if query.get("watch") in {"1", "true"} else "list"
    if method == "DELETE" and not name:
        return "deletecollection"
    known = {"GET": "get", "POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}
    return known.get(method, method.lower())
