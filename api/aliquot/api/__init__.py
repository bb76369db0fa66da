# SPDX-License-Identifier: Apache-2.0
"""What all parts of Aliquot agree on: names, quantities, grants, layouts, errors, log. Imports nothing else of ours."""
