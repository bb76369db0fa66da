# SPDX-License-Identifier: Apache-2.0
"""Every name that crosses a border: driver, class, resource, label, annotation, environment, path.

Never imports anything; never holds logic. Invariant: a string that another program reads (Kubernetes, the
container runtime, the hook, HAMi) is spelt here once and nowhere else.
"""

from __future__ import annotations

from typing import Final

DRIVER: Final = "gpu.aliquot.dev"
ANNOTATION_PREFIX: Final = "aliquot.dev/"

# DeviceClasses that our manifests install (DNS subdomains).
CLASS_WHOLE: Final = "gpu.aliquot.dev"
CLASS_SHARE: Final = "share.gpu.aliquot.dev"

# CDI (cdi.md 1.4): kind of our per-claim devices; device names are "c-<claim uid>-<device>[-<share id>]".
CDI_VENDOR: Final = "gpu.aliquot.dev"
CDI_CLASS: Final = "claim"
CDI_KIND: Final = f"{CDI_VENDOR}/{CDI_CLASS}"
DEFAULT_CDI_DIR: Final = "/var/run/cdi"

# Opaque claim parameters (dra.md 10.7).
PARAMETERS_API_VERSION: Final = "gpu.aliquot.dev/v1"
PARAMETERS_KIND: Final = "Share"

# Node paths (design.md 5); the same on the host and inside our pods, because CDI names host paths.
DEFAULT_STATE_DIR: Final = "/var/lib/aliquot"
DEFAULT_RUN_DIR: Final = "/run/aliquot"
DEFAULT_KUBELET_ROOT: Final = "/var/lib/kubelet"

# Paths inside a container (design.md 5).
CONTAINER_ROOT: Final = "/usr/local/vgpu"
CONTAINER_LIBRARY: Final = f"{CONTAINER_ROOT}/libvgpu.so"
CONTAINER_PRELOAD: Final = "/etc/ld.so.preload"
CONTAINER_GRANTS: Final = f"{CONTAINER_ROOT}/grants"
CONTAINER_USAGE: Final = f"{CONTAINER_ROOT}/usage"
USAGE_FILE: Final = "region"

# Attributes and capacities of published devices (dra.md 10.2), unqualified.
CAPACITY_MEMORY: Final = "memory"
CAPACITY_CORES: Final = "cores"
CAPACITY_SLOTS: Final = "slots"

# Keeps NVIDIA's own runtime hook from adding every card once more (cdi.md 2.6).
ENV_VISIBLE_DEVICES: Final = "NVIDIA_VISIBLE_DEVICES"
