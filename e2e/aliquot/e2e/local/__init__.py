# SPDX-License-Identifier: Apache-2.0
"""A whole cluster on one machine: namespaces, nodes, container runtime, without registry, Docker or network."""
