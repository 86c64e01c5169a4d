"""What the GEMMs share: their arguments, and how operand tiles lie in shared memory and get there by TMA."""

import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import BFloat16, Float8E4M3FN, Float32, Int32
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.tensor_utils import LayoutEnum


def stand_ins(hidden: int, ffn: int) -> tuple:
    """To compile for: a_q, s_row, w_q, w_scale, out, the number of multiprocessors and the stream."""
    rows = cute.sym_int32()
    fake = cute.runtime.make_fake_tensor
    a_q = fake(Float8E4M3FN, (rows, hidden), (hidden, 1), assumed_align=16)
    s_row = fake(Float32, (rows,), (1,), assumed_align=4)
    w_q = fake(Float8E4M3FN, (2 * ffn, hidden), (hidden, 1), assumed_align=16)
    w_scale = fake(Float32, (2 * ffn,), (1,), assumed_align=4)
    out = fake(BFloat16, (rows, ffn), (ffn, 1), assumed_align=16)
    return a_q, s_row, w_q, w_scale, out, Int32(1), cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)


def smem_layout(rows: int, stage_k: int, stages: int) -> cute.ComposedLayout:
    """K-major E4M3, one stage after the other, swizzled: the 16-byte chunks of eight rows are in different banks."""
    atom = hopper.get_smem_layout_atom(LayoutEnum.ROW_MAJOR, Float8E4M3FN, stage_k)
    atom = warpgroup.make_smem_layout_atom(atom, Float8E4M3FN)
    return cute.tile_to_shape(atom, (rows, stage_k, stages), order=(0, 1, 2))


def tma_load(tensor: cute.Tensor, smem: cute.ComposedLayout, box: tuple, peers: int = 1):
    """The load of a stage, and the tensor as it sees it. ``peers``: CTAs that share what arrives."""
    op = cpasync.CopyBulkTensorTileG2SOp() if peers == 1 else cpasync.CopyBulkTensorTileG2SMulticastOp()
    return cpasync.make_tiled_tma_atom(op, tensor, cute.slice_(smem, (None, None, 0)), box, num_multicast=peers)


def tma_pair(tma, smem: cute.Tensor, tiles: cute.Tensor, rank=0, peers: int = 1) -> tuple[cute.Tensor, cute.Tensor]:
    """Shared and global memory as TMA sees them: [element, stage] and [element, tile row, tile column]."""
    return cpasync.tma_partition(
        tma, rank, cute.make_layout(peers), cute.group_modes(smem, 0, 2), cute.group_modes(tiles, 0, 2)
    )
