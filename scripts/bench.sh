#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs the benches (all, or those named), one after the other and nothing beside them: each prints its table and ends
# with a status that is not 0 when a budget is missed. Usage: bench.sh PYTHON [bench/NAME.py ...]
set -uo pipefail
python=$1
shift
if (($# == 0)); then
	mapfile -t all < <(git grep -l '^if __name__ == "__main__"' -- 'bench/*.py')
	set -- "${all[@]}"
fi
missed=()
for bench; do
	printf '\n== %s: %s\n' "$bench" "$(sed -n '2s/^"*//p' "$bench")"
	"$python" "$bench" || missed+=("$bench")
done
((${#missed[@]})) || exit 0
echo "a budget is missed by: ${missed[*]}" >&2
exit 1
