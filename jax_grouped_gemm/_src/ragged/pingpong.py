"""Weight gradients into float32: consumers that take turns.

The two consumer warpgroups of a thread block usually have half of every tile each, and both wait
while a float32 tile leaves, which is too much to be kept in registers meanwhile. Taking turns, each
has whole tiles, smaller ones, and stores its tile while the other one multiplies
(`csrc/sm90/pingpong/`). Smaller tiles read more from L2, so this pays where tiles are changed
often, but not where there is less to multiply than to store. This is for plans.
"""

from __future__ import annotations

# Mean rows of a group, between which it was measured to pay.
LEAST_ROWS = 384
MOST_ROWS = 2048


def pays(*, rows: int, groups: int) -> bool:
    """Whether consumers should take turns, from the extent of the ragged dimension."""
    return LEAST_ROWS * groups <= rows <= MOST_ROWS * groups
