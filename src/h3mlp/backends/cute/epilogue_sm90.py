"""The ends of the GEMM on Hopper: what a consuming warpgroup does with the finished sums of its 64 weight rows.

``round`` brings them to BF16 in half the registers, beside the first products of the next tile; ``store`` then sends
them off by ``BATCH`` tokens at a time, in so many ``turns``, each beside the products of an interval.
"""

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import BFloat16, Float32, Int32, Uint32, const_expr
from cutlass.cute.nvgpu import cpasync, warp, warpgroup
from cutlass.tensor_utils import LayoutEnum

from . import epilogue, operands, prologue, ptx
from .product import SWIGLU, Product
from .vectors import address_of, vector_at

WARPGROUP = 128
CONSUMERS = 2
ROWS = 64
"""Weight rows of a warpgroup, wgmma's M."""

TILE_ROWS = ROWS * CONSUMERS
BATCH = 32
"""Tokens of a batch: the four 8 x 8 matrices of one stmatrix."""

PARTS = BATCH * ROWS // 8 // WARPGROUP
"""Vectors of 8 outputs of a batch that a thread has where the weight's rows are the outputs."""

FIRST_BARRIER = 1  # named barriers 1 and 2: one for each consuming warpgroup


def of(product: Product) -> type["Epilogue"]:
    """How a GEMM of this ends."""
    return SwiGLU if product.end == SWIGLU else GatedResidual


class Epilogue:
    """Of one warpgroup. ``h`` is a finished tile, rounded, on its way out."""

    def __init__(self, gemm, shared: tuple, s_row, w_scale, target: tuple, index, thread):
        self.gemm, self.index, self.thread = gemm, index, thread
        self.s_row, self.w_scale, self.s_scale = s_row, w_scale, shared[0]
        self.h = cute.make_rmem_tensor((gemm.tile_tokens // 4,), Uint32)
        self.token_scales = cute.make_rmem_tensor((-(-gemm.tile_tokens // WARPGROUP),), Float32)
        self.row_scales = cute.make_rmem_tensor((2,), Float32)
        self.prepare(shared[1:], target)

    @staticmethod
    def shared(gemm, smem) -> tuple:
        """The scales of each warpgroup's tokens."""
        return (smem.allocate_tensor(Float32, cute.make_layout((gemm.tile_tokens, CONSUMERS)), byte_alignment=16),)

    @cute.jit
    def load(self, row, token):
        """s_row of a tile's tokens, one or two a thread, and w_scale of this thread's two rows."""
        gemm, token_scales, row_scales = self.gemm, self.token_scales, self.row_scales
        for i in cutlass.range_constexpr(cute.size(token_scales)):
            within = self.thread + i * WARPGROUP
            index = token * gemm.tile_tokens + within
            token_scales[i] = Float32(0.0)
            if within < gemm.tile_tokens and index < cute.size(self.s_row):
                token_scales[i] = self.s_row[index]
        first = row * TILE_ROWS + self.index * ROWS + self.thread // 32 * 16 + self.thread % 32 // 4
        for i in cutlass.range_constexpr(2):
            row_scales[i] = Float32(0.0)
            if first + 8 * i < gemm.product.n:
                row_scales[i] = self.w_scale[first + 8 * i]
        self.load_more(row, token)

    @cute.jit
    def round(self, final: cute.Tensor):
        """The sums to ``h``, so that their registers are free for the next tile."""
        s_scale = self.s_scale
        self.before_rounding()
        for i in cutlass.range_constexpr(cute.size(self.token_scales)):
            within = self.thread + i * WARPGROUP
            if within < self.gemm.tile_tokens:
                s_scale[(within, self.index)] = self.token_scales[i]
        self.sync()
        for atom in cutlass.range_constexpr(self.gemm.tile_tokens // 8):
            token = 8 * atom + 2 * (self.thread % 4)
            s0, s1 = s_scale[(token, self.index)], s_scale[(token + 1, self.index)]
            for half in cutlass.range_constexpr(2):
                acc0, acc1 = final[4 * atom + 2 * half], final[4 * atom + 2 * half + 1]
                w_scale = self.row_scales[half]
                self.h[2 * atom + half] = epilogue.dequantize(acc0, acc1, s0, s1, w_scale, w_scale)

    @cute.jit
    def put(self, matrices: cute.Tensor, thread, column, staged: cute.Tensor):
        """Four 8 x 8 matrices of 8 weight rows by 32 tokens to shared memory, [token, output column]."""
        stmatrix = cute.make_copy_atom(warp.StMatrix8x8x16bOp(transpose=True, num_matrices=4), BFloat16)
        line = cute.local_tile(staged, (1, 8), (thread % 32, column))
        line = cute.append_ones(cute.group_modes(line, 0, 2), up_to_rank=2)
        cute.copy(stmatrix, cute.append_ones(matrices, up_to_rank=2), line)

    @cute.jit
    def sync(self):
        cute.arch.barrier(barrier_id=self.index + FIRST_BARRIER, number_of_threads=WARPGROUP)


class SwiGLU(Epilogue):
    """Of the 64 rows, 32 are outputs' gates and 32 their ups. y goes out by TMA, which drops what is past the last row.

    Two batches are staged at a time.
    """

    COLUMNS = ROWS // 2

    @staticmethod
    def turns(tile_tokens: int) -> int:
        return tile_tokens // BATCH

    @staticmethod
    def target(out: cute.Tensor) -> tuple:
        """On the host: TMA's view of y."""
        slot = cute.slice_(_staging(SwiGLU.COLUMNS, 2 * CONSUMERS), (None, None, 0))
        store = cpasync.CopyBulkTensorTileS2GOp()
        return tuple(cpasync.make_tiled_tma_atom(store, out, slot, (BATCH, SwiGLU.COLUMNS)))

    @staticmethod
    def prefetch(target: tuple):
        cpasync.prefetch_descriptor(target[0])

    @staticmethod
    def shared(gemm, smem) -> tuple:
        return *Epilogue.shared(gemm, smem), _staged(smem, SwiGLU.COLUMNS, 2 * CONSUMERS)

    def prepare(self, shared: tuple, target: tuple):
        (self.staged,), (self.tma, y_tiles) = shared, target
        y_tiles = cute.local_tile(y_tiles, (BATCH, self.COLUMNS), (None, None))
        self.from_staged, self.to_y = operands.tma_pair(self.tma, self.staged, y_tiles)

    @cute.jit
    def load_more(self, row, token):
        pass

    @cute.jit
    def before_rounding(self):
        """Both slots are to be free."""
        if self.thread < 32:
            cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def store(self, batch: cutlass.Constexpr, row, token):
        slot = 2 * self.index + batch % 2
        y = cute.make_rmem_tensor((2 * BATCH // 8,), BFloat16)
        y_pairs = cute.recast_tensor(y, Uint32)
        for i in cutlass.range_constexpr(BATCH // 8):
            atom = batch * (BATCH // 8) + i
            y_pairs[i] = epilogue.swiglu(self.h[2 * atom], self.h[2 * atom + 1])
        self.put(y, self.thread, self.thread // 32, self.staged[(None, None, slot)])
        cute.arch.fence_proxy("async.shared", space="cta")
        if self.thread < 32:
            cute.arch.cp_async_bulk_wait_group(0, read=True)  # frees the other slot, for the next batch
        self.sync()
        if self.thread < 32:
            place = (None, token * (self.gemm.tile_tokens // BATCH) + batch, row * CONSUMERS + self.index)
            cute.copy(self.tma, self.from_staged[(None, slot)], self.to_y[place])
            cute.arch.cp_async_bulk_commit_group()

    @cute.jit
    def finish(self):
        if self.thread < 32:
            cute.arch.cp_async_bulk_wait_group(0, read=False)


class GatedResidual(Epilogue):
    """The 64 rows are columns of out. By way of shared memory a thread gets 8 neighbouring ones of a token, twice a
    batch, so that residual, gate and out are read and written 128 bytes a token at a time.
    """

    COLUMNS = ROWS

    @staticmethod
    def turns(tile_tokens: int) -> int:
        return tile_tokens // BATCH + 1

    @staticmethod
    def target(out: cute.Tensor, gate: cute.Tensor, index: cute.Tensor, residual: cute.Tensor) -> tuple:
        return out, gate, index, residual

    @staticmethod
    def prefetch(_target: tuple):
        pass

    @staticmethod
    def shared(gemm, smem) -> tuple:
        rows = smem.allocate_tensor(Int32, cute.make_layout((gemm.tile_tokens, CONSUMERS)), byte_alignment=16)
        return *Epilogue.shared(gemm, smem), rows, _staged(smem, GatedResidual.COLUMNS, CONSUMERS)

    def prepare(self, shared: tuple, target: tuple):
        (self.s_gate_rows, self.staged), (self.out, self.gate, self.table_index, self.residual) = shared, target
        self.gate_rows = cute.make_rmem_tensor((cute.size(self.token_scales),), Int32)
        self.residuals = cute.make_rmem_tensor((4, PARTS), Uint32)

    @cute.jit
    def load_more(self, row, token):
        """The gate's row of each token; and its residual, 128 bytes, from DRAM to the L2."""
        gemm, gate_rows, rows = self.gemm, self.gate_rows, cute.size(self.s_row)
        column = cutlass.min(row * TILE_ROWS + self.index * ROWS, gemm.product.n - ROWS)
        for i in cutlass.range_constexpr(cute.size(gate_rows)):
            within = self.thread + i * WARPGROUP
            index = token * gemm.tile_tokens + within
            gate_rows[i] = Int32(0)
            if within < gemm.tile_tokens and index < rows:
                gate_rows[i] = epilogue.gate_row(self.table_index, index, rows, cute.size(self.gate, mode=[0]))
                ptx.prefetch_l2(address_of(self.residual, index, column // 8))

    @cute.jit
    def before_rounding(self):
        """Put the gate's rows where all threads find them."""
        s_gate_rows = self.s_gate_rows
        for i in cutlass.range_constexpr(cute.size(self.gate_rows)):
            within = self.thread + i * WARPGROUP
            if within < self.gemm.tile_tokens:
                s_gate_rows[(within, self.index)] = self.gate_rows[i]

    @cute.jit
    def store(self, turn: cutlass.Constexpr, row, token):
        """Send off the batch before this turn's, and stage this one, whose residual has until the next turn to come.

        What is past the last row or column is read as the last one, and not written.
        """
        thread = ptx.thread_index() % WARPGROUP  # anew, or what follows from it takes registers all along
        column = row * TILE_ROWS + self.index * ROWS + thread % 8 * 8
        self.sync()  # the batch before is staged
        if const_expr(turn > 0):
            self.send(turn - 1, thread, column, token)
        if const_expr(turn < self.gemm.tile_tokens // BATCH):
            last, vector = cute.size(self.s_row) - 1, self.vector_of(column)
            for part in cutlass.range_constexpr(PARTS):
                index = cutlass.min(self.token_of(turn, part, thread, token), last)
                source = vector_at(address_of(self.residual, index, vector), 16)
                cute.autovec_copy(source, self.residuals[None, part])
            self.sync()  # all have read it
            for half in cutlass.range_constexpr(2):
                o = cute.make_rmem_tensor((2 * BATCH // 8,), BFloat16)
                pairs = cute.recast_tensor(o, Uint32)
                for i in cutlass.range_constexpr(BATCH // 8):
                    pairs[i] = self.h[2 * (turn * (BATCH // 8) + i) + half]
                self.put(o, thread, thread // 32 * 2 + half, self.staged[(None, None, self.index)])

    @cute.jit
    def send(self, batch: cutlass.Constexpr, thread, column, token):
        staged, vector, last = self.staged[(None, None, self.index)], self.vector_of(column), cute.size(self.s_row) - 1
        for part in cutlass.range_constexpr(PARTS):
            index = self.token_of(batch, part, thread, token)
            within = part * (BATCH // PARTS) + thread // 8
            gate_row = self.s_gate_rows[(batch * BATCH + within, self.index)]
            gates = cute.make_rmem_tensor((4,), Uint32)
            source = vector_at(address_of(self.gate, cutlass.max(gate_row, 0), vector), 16)
            cute.autovec_copy(source, gates)
            o = cute.make_rmem_tensor((8,), BFloat16)
            cute.autovec_copy(cute.local_tile(staged, (1, 8), (within, thread % 8)), o)
            pairs = cute.recast_tensor(o, Uint32)
            for i in cutlass.range_constexpr(4):
                residual = self.residuals[i, part]
                whole = epilogue.gated_residual(pairs[i], gates[i], residual)
                pairs[i] = cutlass.select_(gate_row == prologue.OUTSIDE, residual, whole)
            if (index <= last) & (column < self.gemm.product.n):
                cute.autovec_copy(pairs, vector_at(address_of(self.out, index, vector), 16))

    def vector_of(self, column):
        return cutlass.min(column, self.gemm.product.n - 8) // 8

    def token_of(self, batch: int, part: int, thread, token):
        """The number of a thread's token."""
        return token * self.gemm.tile_tokens + batch * BATCH + part * (BATCH // PARTS) + thread // 8

    @cute.jit
    def finish(self):
        pass


def _staging(columns: int, slots: int) -> cute.ComposedLayout:
    """[token, output column, slot] BF16 of batches."""
    atom = hopper.get_smem_layout_atom(LayoutEnum.ROW_MAJOR, BFloat16, columns)
    atom = warpgroup.make_smem_layout_atom(atom, BFloat16)
    return cute.tile_to_shape(atom, (BATCH, columns, slots), order=(0, 1, 2))


def _staged(smem, columns: int, slots: int) -> cute.Tensor:
    layout = _staging(columns, slots)
    return smem.allocate_tensor(BFloat16, layout.outer, byte_alignment=1024, swizzle=layout.inner)
