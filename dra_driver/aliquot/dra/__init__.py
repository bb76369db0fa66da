# SPDX-License-Identifier: Apache-2.0
"""The DRA door: ResourceSlices out, prepared claims in."""
