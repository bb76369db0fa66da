#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Entry point of `aliquot.e2e.build` for a Python without our virtual environment."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from aliquot.e2e.build import main

sys.exit(main())
