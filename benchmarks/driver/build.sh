#!/usr/bin/env bash
# Builds the driver against the kernels of a source tree, this one or another:
#
#   benchmarks/driver/build.sh TREE LIBRARY OUTPUT
#
# LIBRARY has the kernels of TREE. It is libjgg_kernels.a, which an editable install (docs/develop.md)
# leaves in its build directory, or a quoted list of the object files in that library.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
tree="$1" library="$2" output="$3"
"${CUDACXX:-nvcc}" -std=c++20 -O3 -arch=sm_90a -I"$tree/csrc" -o "$output" "$here/driver.cu" $library
