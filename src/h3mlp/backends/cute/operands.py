"""What the GEMMs share: their arguments, and how operand tiles lie in shared memory and get there by TMA."""

import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import BFloat16, Float8E4M3FN, Float32, Int32
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.tensor_utils import LayoutEnum

from .product import GATED_RESIDUAL, Product


class Launches:
    """The host functions of a GEMM with a ``product``, one for each way that one ends. ``enqueue`` is its own."""

    def trace(self) -> tuple[object, tuple]:
        """The host function and what it is compiled for."""
        gated = self.product.end == GATED_RESIDUAL
        return self.launch_gated if gated else self.launch, stand_ins(self.product)

    @cute.jit
    def launch(
        self,
        a_q: cute.Tensor,
        s_row: cute.Tensor,
        w_q: cute.Tensor,
        w_scale: cute.Tensor,
        out: cute.Tensor,
        multiprocessors: Int32,
        stream,
    ):
        self.enqueue(a_q, s_row, w_q, w_scale, (out,), multiprocessors, stream)

    @cute.jit
    def launch_gated(
        self,
        a_q: cute.Tensor,
        s_row: cute.Tensor,
        w_q: cute.Tensor,
        w_scale: cute.Tensor,
        gate: cute.Tensor,
        index: cute.Tensor,
        residual: cute.Tensor,
        out: cute.Tensor,
        multiprocessors: Int32,
        stream,
    ):
        self.enqueue(a_q, s_row, w_q, w_scale, (out, gate, index, residual), multiprocessors, stream)


def stand_ins(product: Product) -> tuple:
    """To compile for: a_q, s_row, w_q, w_scale, then gate, index and residual where the product has them, out, the
    number of multiprocessors and the stream."""
    rows = cute.sym_int32()
    fake = cute.runtime.make_fake_tensor
    k, n, columns = product.k, product.n, product.columns

    def matrix(count):
        # No divisibility of the stride is declared: DLPack may give a dimension of size 1 the stride 1.
        return fake(BFloat16, (count, columns), (cute.sym_int64(), 1), assumed_align=16)

    gated = ()
    if product.end == GATED_RESIDUAL:
        gated = matrix(cute.sym_int32()), fake(Int32, (cute.sym_int32(),), (1,), assumed_align=4), matrix(rows)
    return (
        fake(Float8E4M3FN, (rows, k), (k, 1), assumed_align=16),
        fake(Float32, (rows,), (1,), assumed_align=4),
        fake(Float8E4M3FN, (n, k), (k, 1), assumed_align=16),
        fake(Float32, (n,), (1,), assumed_align=4),
        *gated,
        fake(BFloat16, (rows, columns), (columns, 1), assumed_align=16),
        Int32(1),
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
    )


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
