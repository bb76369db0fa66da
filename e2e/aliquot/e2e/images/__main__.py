# SPDX-License-Identifier: Apache-2.0
"""`python -m aliquot.e2e.images [FILE]`: our own image as an OCI archive, to be loaded on nodes or pushed.

Never contacts a registry. Exit status 2 with one sentence where a part is missing.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from aliquot.e2e.images.recipes import ROOT, images_dir, ours
from aliquot.e2e.once import alone
from aliquot.e2e.toolchain import MissingPartError


def main() -> int:
    """The command."""
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "build" / "aliquot-dev.tar"
    try:
        images_dir().mkdir(parents=True, exist_ok=True)
        with alone("images", "another run is building images; waiting for it"):
            image = ours(ROOT / "build" / "hook")
            half = target.with_name(f".{target.name}.half")
            shutil.copyfile(image.archive, half)
            half.rename(target)
    except (MissingPartError, OSError) as error:
        print(f"image: {error}", file=sys.stderr)
        return 2
    print(f"{image.name}: {target}, {target.stat().st_size // 1_000_000} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
