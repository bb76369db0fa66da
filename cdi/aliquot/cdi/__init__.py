# SPDX-License-Identifier: Apache-2.0
"""CDI: the model, what makes a spec valid, what a grant changes in a container, and the store on disk."""
