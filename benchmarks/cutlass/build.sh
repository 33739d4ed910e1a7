#!/usr/bin/env bash
# Builds the library of CUTLASS's kernels that the benchmarks compare with:
#
#   benchmarks/cutlass/build.sh [OUTPUT]
#
# By default, OUTPUT is where benchmarks/cutlass/__init__.py looks for the library. CUTLASS's headers
# are in CUTLASS_INCLUDE or, by default, in the Python package nvidia-cutlass. JOBS compilers run at a
# time (2 by default). Each takes up to 3 GB of memory.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
output="${1:-$here/libcutlass_peers.so}"
include="${CUTLASS_INCLUDE:-$("${PYTHON:-python3}" -c '
import importlib.util, pathlib
found = importlib.util.find_spec("cutlass_library")
print(pathlib.Path(found.origin).parent / "source/include")')}"
objects="$(mktemp -d)"
trap 'rm -rf "$objects"' EXIT
export include objects
export NVCC="${CUDACXX:-nvcc}"
printf '%s\n' "$here"/*.cu "$here"/*.cc | xargs -P "${JOBS:-2}" -I{} bash -c '
  "$NVCC" -std=c++17 -O3 -DNDEBUG -arch=sm_90a --expt-relaxed-constexpr -Xcompiler=-fPIC \
    -diag-suppress 177 -I"$include" -x cu -c "$1" -o "$objects/$(basename "$1").o"' _ {}
"$NVCC" -arch=sm_90a -shared -cudart static -Xlinker -s -o "$output" "$objects"/*.o
