# SPDX-License-Identifier: Apache-2.0
"""What every node daemon needs: inventory, checkpoint, regions, reaper, metrics. Knows nothing of claims."""
