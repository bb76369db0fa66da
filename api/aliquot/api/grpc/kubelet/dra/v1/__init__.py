# SPDX-License-Identifier: Apache-2.0
"""Generated from api/proto/kubelet/dra/v1; never edited."""
