#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# What no linter looks at: licence lines, machine paths, modules too long for one head, shell scripts.
set -euo pipefail
status=0
complain() {
	echo "$1" >&2
	status=1
}
mapfile -t sources < <(git ls-files '*.py' '*.c' '*.h' '*.sh' '*.proto' '*.go' Makefile '*.mk' | grep -v '/grpc/kubelet/')
for file in "${sources[@]}"; do
	head -5 "$file" | grep -q 'SPDX-License-Identifier: Apache-2.0' || complain "$file: no SPDX line"
	lines=$(wc -l <"$file")
	limit=500
	[[ $file == tests/* ]] && limit=600
	((lines <= limit)) || complain "$file: $lines lines; find the seam (limit $limit)"
done
leaks=$(git grep -nE '/wor[k]/|/roo[t]/\.|prox[y]\.golang|p[y]pi\.org|npm[j]s\.|deb\.d[e]bian|crate[s]\.io' -- . ':!requirements' || true)
[[ -z $leaks ]] || complain "machine paths or registry hosts: $leaks"
if command -v shellcheck >/dev/null; then
	mapfile -t shells < <(git ls-files '*.sh' .ci/run)
	shellcheck -x "${shells[@]}" || status=1
fi
exit $status
