"""The parts of `tests.gpu.sanitizer_smoke`. Each returns how many kernels it launched."""

M, K, N, G = 392, 136, 264, 5
SIZES = [
    [129, 0, 64, 1, 150],  # a tail, an empty group, boundaries off the tile
    [-3, 392, 0, 2**31 - 1, 7],  # out of range: clamped, never an access out of bounds
    [0, 0, 0, 0, 0],
]
OFFSETS = [None, 2, -4]
