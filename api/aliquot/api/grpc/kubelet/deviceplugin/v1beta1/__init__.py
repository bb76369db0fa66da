# SPDX-License-Identifier: Apache-2.0
"""Generated from api/proto/kubelet/deviceplugin/v1beta1; never edited."""
