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


class Tiles:
    """The work of this CTA: every ``step``-th tile from ``first`` on. The CTAs of a cluster, of which this is the
    ``rank``-th, have neighbouring weight rows: ``row_tiles`` counts those of whole clusters."""

    def __init__(self, row_tiles: int, token_tiles: Int32, group: int, cluster_rows: int = 1, rank=0):
        self.row_tiles, self.token_tiles, self.group = row_tiles, token_tiles, group
        self.cluster_rows, self.rank = cluster_rows, rank
        self.first = cute.arch.block_idx()[0] // cluster_rows
        self.step = cute.arch.grid_dim()[0] // cluster_rows
        self.end = token_tiles * row_tiles

    @cute.jit
    def coordinates(self, tile: Int32) -> tuple[Int32, Int32]:
        """(weight row tile, token tile) of this CTA."""
        row, token = tile_coordinates(tile, Int32(self.row_tiles), self.token_tiles, Int32(self.group))
        return row * self.cluster_rows + self.rank, token
