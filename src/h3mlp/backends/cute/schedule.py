"""Tile order of a persistent GEMM.

The tokens are cut into groups of ``group`` tiles. A group's activations stay in the L2 while every weight row passes
by once; within a group neighbouring work items differ in their token tile, so that the CTAs that run at the same time
share weight tiles too. DRAM then reads the weights once a group and the activations once in all.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32


@cute.jit
def tile_coordinates(tile: Int32, row_tiles: Int32, token_tiles: Int32, group: Int32) -> tuple[Int32, Int32]:
    """(weight row tile, token tile) of a work item. Past the last item: some pair, for nobody to use."""
    group_tiles = group * row_tiles
    first = tile // group_tiles * group
    width = cutlass.max(cutlass.min(group, token_tiles - first), 1)
    within = tile % group_tiles
    return within // width, first + within % width
