#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Installs the Debian packages listed in FILE that are not there yet. Says what to do where it cannot.
set -euo pipefail
missing=()
while read -r package _; do
	[[ -z $package || $package == '#'* ]] && continue
	dpkg-query -W -f='${Status}' "$package" 2>/dev/null | grep -q 'ok installed' || missing+=("$package")
done <"$1"
((${#missing[@]})) || exit 0
if ! command -v apt-get >/dev/null; then
	echo "This system has no apt; please install what Debian calls: ${missing[*]}" >&2
	exit 0 # the step that needs one of them will name it
fi
if ((EUID != 0)); then
	echo "Missing packages, and only root may install them. Please run: sudo apt-get install ${missing[*]}" >&2
	exit 1
fi
echo "apt: installing ${missing[*]}"
export DEBIAN_FRONTEND=noninteractive
log=$(mktemp)
trap 'rm -f "$log"' EXIT
for attempt in 1 2 3; do
	if { apt-get update -qq && apt-get install -y -qq --no-install-recommends "${missing[@]}"; } >"$log" 2>&1; then
		exit 0
	fi
	echo "apt: attempt $attempt failed" >&2
done
grep -m 8 -E '^[EW]:' "$log" >&2 || tail -8 "$log" >&2
echo "apt-get could not install ${missing[*]}; the lines above say why." >&2
exit 1
