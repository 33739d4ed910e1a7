"""The benchmarks are no installed package: their checkout is put on the path."""

import sys
from pathlib import Path

# Last on the path: the checkout's own package must not hide an installed one with kernels.
sys.path.append(str(Path(__file__).parents[2]))
