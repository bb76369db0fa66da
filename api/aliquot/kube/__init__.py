# SPDX-License-Identifier: Apache-2.0
"""The one user of the official Kubernetes client: transport, objects, reflector, back-off, events."""
