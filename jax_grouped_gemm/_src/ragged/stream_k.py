"""Cutting the last wave of tiles along K, so that all thread blocks finish together.

A persistent kernel computes its tiles in waves, one tile on each multiprocessor, and in the last
wave most multiprocessors may have none. Stream-K (Osama et al., 2023) deals out steps of the
contracted dimension instead of tiles; here that is done to the last wave alone, whose sums then
pass through memory. How many tiles there are depends on the group sizes, so the kernel does the
same arithmetic on the device (`csrc/scheduler/assignment.h`); this is for plans.
"""

from __future__ import annotations

# (ranges, units): so many clusters share the work of so many units. The first that fits is taken.
RATIOS = ((4, 1), (3, 1), (2, 1), (3, 2), (4, 3))
WORTHWHILE_STEPS = 16
"""What cutting the last wave must save."""

# What a problem must have for the cut to pay, by measurement: it gives 6 % of 8.2 waves of 224
# steps and nothing of 30 waves, and costs 1 % where groups or steps are few.
LEAST_ROWS = 256
LEAST_STEPS = 64
LEAST_STEPS_FP8 = 96
"""Measured at 112 steps and 8.2 waves alone, where 7 % in steps were 4.5 % in time."""
MOST_WAVES = 16

NUM_CONSUMERS = 2
STEP_BYTES = 128
"""Of the contracted dimension of either operand: 64 elements of 16 bits, or 128 of 8."""


def workspace_bytes(tile_m: int, tile_n: int, num_blocks: int) -> int:
    """Room for one tile in float32 from each thread block, and where its consumers announce it."""
    return num_blocks * (4 * tile_m * tile_n + 4 * NUM_CONSUMERS)


def pays(*, rows_of_group: int, steps: int, waves: float, least_steps: int = LEAST_STEPS) -> bool:
    """Whether to cut the last wave, from the mean size of a group, steps and waves of tiles."""
    return rows_of_group >= LEAST_ROWS and steps >= least_steps and waves <= MOST_WAVES


def waves(units: int, steps: int, clusters: int) -> float:
    """How long `units` units of `steps` steps take on `clusters` clusters, in whole units.

    What it costs to hand sums over is left out.
    """
    full, last = divmod(units, clusters)
    if last == 0:
        return full
    ranges = next((last * p // q for p, q in RATIOS if last * p // q <= clusters), last)
    longest = -(-last * steps // ranges)
    return full + (longest / steps if steps - longest >= WORTHWHILE_STEPS else 1)
