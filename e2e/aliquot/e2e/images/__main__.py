# SPDX-License-Identifier: Apache-2.0
"""`python -m aliquot.e2e.images [FOLDER]`: the driver's image and that of the examples, as OCI archives.

To be loaded on nodes or pushed to a registry; never contacts one. Exit status 2 with one sentence where a part is
missing.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from aliquot.e2e.images.recipes import ROOT, images_dir, ours, workload
from aliquot.e2e.once import alone
from aliquot.e2e.toolchain import MissingPartError


def main() -> int:
    """The command."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "build"
    try:
        images_dir().mkdir(parents=True, exist_ok=True)
        with alone("images", "another run is building images; waiting for it"):
            for image in (ours(ROOT / "build" / "hook"), workload()):
                target = folder / f"{image.name.replace(':', '-')}.tar"
                half = target.with_name(f".{target.name}.half")
                shutil.copyfile(image.archive, half)
                half.rename(target)
                print(f"{image.name}: {target}, {target.stat().st_size // 1_000_000} MB")
    except (MissingPartError, OSError) as error:
        print(f"image: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
