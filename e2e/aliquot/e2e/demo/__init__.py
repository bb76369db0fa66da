# SPDX-License-Identifier: Apache-2.0
"""The demo: a minute of story on a real cluster with a fake card, told in plain words and checked as it goes."""
