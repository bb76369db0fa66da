#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# clang-format and clang-tidy over our C. The analyser takes a second a file, so a file that it found clean is not
# looked at again while it, what it includes, its flags and the list of checks are the same.
set -euo pipefail
bin=$1
export bin clean=${XDG_CACHE_HOME:-$HOME/.cache}/aliquot/lint/clang-tidy
status=0
mapfile -t files < <(git ls-files '*.c' '*.h')
mapfile -t unformatted < <("$bin/clang-format" --dry-run "${files[@]}" 2>&1 | grep -oE '^[^: ]+\.[ch]:' | sort -u)
if ((${#unformatted[@]})); then
	echo "not in our format (clang-format -i): ${unformatted[*]%:}" >&2
	status=1
fi

flags_of() { # FOLDER VARIABLE: what its build.mk compiles with, less the warnings, which are gcc's
	make -s --no-print-directory -f "$1/build.mk" PY="$bin/python" --eval "flags: ; @echo \$($2)" flags |
		tr ' ' '\n' | grep -E '^-(D|I|std|isystem$)|^[^-]'
}
# shellcheck disable=SC2317  # xargs calls it
look() { # FILE FLAGS...: whether it is clean
	local file=$1 needs mark
	shift
	read -ra needs < <(gcc "$@" -MM -MG -MT x "$file" | sed 's/^x://' | tr -d '\\\n')
	mark=$clean/$({ echo "$@"; cat .clang-tidy requirements/dev.txt "${needs[@]}"; } | sha256sum | cut -d' ' -f1)
	[[ -e $mark ]] && return
	"$bin/clang-tidy" --quiet "$file" -- "$@" 2>/dev/null || return 1
	touch "$mark"
}
export -f look
mkdir -p "$clean"
for folder in hook:HOOK_FLAGS fakegpu:FAKEGPU_CFLAGS; do
	mapfile -t flags < <(flags_of "${folder%:*}" "${folder#*:}")
	git ls-files "${folder%:*}/src/*.c" |
		xargs -P "$(nproc)" -I FILE bash -c 'set -u; look "$@"' look FILE "${flags[@]}" || status=1
done
find "$clean" -type f -mtime +30 -delete
exit "$status"
