# SPDX-License-Identifier: Apache-2.0
"""Container images made without a registry and without a container engine: layers, archives, recipes."""
