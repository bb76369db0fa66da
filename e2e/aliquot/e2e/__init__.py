# SPDX-License-Identifier: Apache-2.0
"""Real clusters behind one interface, the images they run, the faults we put in between, and the stories told on them."""
