#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# clang-format and clang-tidy over our C. The analyser reads the generated tables too, so build first.
set -euo pipefail
bin=$1
mapfile -t files < <(git ls-files 'hook/*.c' 'hook/*.h' 'fakegpu/*.c' 'fakegpu/*.h' 'images/*.c' 'tests/*.c' 'e2e/*.c')
((${#files[@]})) || exit 0
"$bin/clang-format" --dry-run --Werror "${files[@]}"
