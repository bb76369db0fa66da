#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Resolves pyproject.toml into requirements/*.txt for Python 3.11 to 3.14; with --check only says whether they differ.
set -euo pipefail
uv=.venv/bin/uv
target=requirements
if [[ ${1-} == --check ]]; then
	target=$(mktemp -d)
	trap 'rm -rf "$target"' EXIT
	cp requirements/*.txt "$target"
fi
options=(--universal --generate-hashes --no-emit-index-url --no-emit-find-links --python-version 3.11
	--custom-compile-command 'make lock' --quiet)
"$uv" pip compile "${options[@]}" pyproject.toml --extra cli --group test --group lint --group generate --group build \
	--output-file "$target/dev.txt"
"$uv" pip compile "${options[@]}" pyproject.toml --constraints "$target/dev.txt" --output-file "$target/runtime.txt"
# The comments name the files that asked for a package, by path: keep them the same wherever this runs.
sed -i -E 's#-c .*/?dev\.txt#-c dev.txt#' "$target/runtime.txt"
if [[ ${1-} == --check ]]; then
	diff -ru requirements "$target" && exit
	echo "requirements/ is not what pyproject.toml resolves to; run: make lock" >&2
	exit 1
fi
