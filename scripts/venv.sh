#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Makes VENV with the interpreter PYTHON from the hash-pinned lock. Does nothing when the lock has not changed.
set -euo pipefail
python=$1 venv=$2
stamp=$venv/.ready
want=$(cat requirements/dev.txt pyproject.toml | sha256sum)
if [[ -f $stamp && $(<"$stamp") == "$want" ]]; then
	touch "$stamp"
	exit 0
fi
command -v "$python" >/dev/null || {
	echo "there is no $python; Aliquot needs Python 3.11 to 3.14. Try: make PYTHON=python3.12 …" >&2
	exit 1
}
"$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))' || {
	echo "$python is $("$python" --version 2>&1); Aliquot needs 3.11 to 3.14. Try: make PYTHON=python3.12 …" >&2
	exit 1
}
need_mb=900 # the environment, and wheels on their way into it
free_mb=$(($(df -Pk . | awk 'NR == 2 {print $4}') / 1024))
((free_mb >= need_mb)) || {
	echo "the Python environment needs about $need_mb MB on the disk of $PWD and $free_mb MB are free; free some first" >&2
	exit 1
}
echo "venv: installing $(grep -c '==' requirements/dev.txt) pinned packages into $venv (about a minute)"
# One whose making was cut, or whose Python is gone from the system, is made anew.
"$venv/bin/python" -m pip --version >/dev/null 2>&1 || "$python" -m venv --clear "$venv"
# pip first: `--group` and the resolver of the distribution's own pip may be too old.
"$venv/bin/python" -m pip install -q --require-hashes -r <(sed -n '/^pip==/,/^[a-z].*==/{/^pip==/p;/^    --hash/p}' requirements/dev.txt)
"$venv/bin/python" -m pip install -q --require-hashes -r requirements/dev.txt
"$venv/bin/python" -m pip install -q --no-deps --no-build-isolation -e .
echo "$want" >"$stamp"
