# SPDX-License-Identifier: Apache-2.0
"""Real clusters behind one interface, the images they run, the faults between us and the server, and the stories."""
