"""The operator over several processes, through torch.distributed.

Rows split (sequence parallel): nothing is needed, no row depends on another. FFN columns split (tensor parallel): each
process has the packed rows of its columns, from ``shard``, and with them computes its columns of y, which FC2 takes as
its slice of the inner dimension.

Importing this module, or calling ``h3mlp.fc1_swiglu_fp8`` on a DTensor, tells DTensor how the operator may be split,
so that both ways, and both at once on a mesh of two dimensions, work on distributed tensors too.
"""

from . import check, contract
from .operators import dtensor  # noqa: F401
from .weights import PackedFC1


def shard(packed: PackedFC1, rank: int, world: int) -> PackedFC1:
    """The part of a prepared weight for the FFN columns of one of ``world`` processes: columns
    [rank * F / world, (rank + 1) * F / world), whole groups of eight gate and eight up rows. A copy.

    Args:
        packed: the whole weight, on any device.
        rank: which part, 0 <= rank < world.
        world: how many parts; F / world must be a multiple of 64.

    Raises:
        ValueError: an argument of wrong type or value.
    """
    if not isinstance(packed, PackedFC1):
        check.refuse("packed", "an h3mlp.PackedFC1", packed)
    check.positive_int("world", world)
    ffn = packed.weight.shape[0] // 2
    if ffn % (world * contract.FFN_MULTIPLE):
        check.refuse("world", f"such that {ffn} / world is a multiple of {contract.FFN_MULTIPLE}", world)
    if not isinstance(rank, int) or isinstance(rank, bool) or not 0 <= rank < world:
        check.refuse("rank", f"an int in [0, {world})", rank)
    return PackedFC1(*(part.chunk(world)[rank].clone() for part in packed))
