"""The ends of the GEMM on Hopper: what a consuming warpgroup does with the finished sums of its 64 weight rows.

``load`` brings what a tile needs to shared memory beside its last products; ``begin`` follows beside the first ones of
the next tile, and ``store`` sends the finished one off in so many ``turns``, by a batch of tokens each.
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
FIRST_BARRIER = 1  # named barriers 1 and 2: one for each consuming warpgroup


def of(product: Product) -> type["Epilogue"]:
    """How a GEMM of this ends."""
    return SwiGLU if product.end == SWIGLU else GatedResidual


class Epilogue:
    """Of one warpgroup, whose sums are in ``final``."""

    def __init__(self, gemm, shared: tuple, s_row, w_scale, target: tuple, final, index, thread):
        self.gemm, self.final, self.index, self.thread = gemm, final, index, thread
        self.s_row, self.w_scale, (self.s_token_scales, self.s_row_scales) = s_row, w_scale, shared[:2]
        self.prepare(shared[2:], target)

    @staticmethod
    def shared(gemm, smem) -> tuple:
        """The scales of each warpgroup's tokens and rows."""
        layouts = (cute.make_layout((count, CONSUMERS)) for count in (gemm.tile_tokens, ROWS))
        return tuple(smem.allocate_tensor(Float32, layout, byte_alignment=16) for layout in layouts)

    @cute.jit
    def load(self, row, token):
        """What ``begin`` and ``store`` want of a tile's rows and tokens, to shared memory."""
        gemm, s_token_scales, s_row_scales = self.gemm, self.s_token_scales, self.s_row_scales
        thread, rows = ptx.thread_index() % WARPGROUP, cute.size(self.s_row)
        self.sync()  # all have read what is there of the tile before
        if thread < ROWS:
            index = cutlass.min(row * TILE_ROWS + self.index * ROWS + thread, gemm.product.n - 1)
            s_row_scales[(thread, self.index)] = self.w_scale[index]
        for i in cutlass.range_constexpr(-(-gemm.tile_tokens // WARPGROUP)):
            within = thread + i * WARPGROUP
            if within < gemm.tile_tokens:
                index = cutlass.min(token * gemm.tile_tokens + within, rows - 1)
                s_token_scales[(within, self.index)] = self.s_row[index]
                self.load_token(within, index, row)

    @cute.jit
    def dequantize(self, atom: cutlass.Constexpr, thread) -> tuple:
        """Of two neighbouring tokens of 8, in two rows: step 10 or 15."""
        token = 8 * atom + 2 * (thread % 4)
        s0, s1 = (self.s_token_scales[(token + i, self.index)] for i in range(2))
        row, final = thread // 32 * 16 + thread % 32 // 4, self.final
        pairs = []
        for half in cutlass.range_constexpr(2):
            w_scale = self.s_row_scales[(row + 8 * half, self.index)]
            sums = final[4 * atom + 2 * half], final[4 * atom + 2 * half + 1]
            pairs.append(epilogue.dequantize(*sums, s0, s1, w_scale, w_scale))
        return tuple(pairs)

    @cute.jit
    def put(self, matrices: cute.Tensor, token, column, staged: cute.Tensor):
        """Four 8 x 8 matrices to shared memory, [token, output column]. A lane says where 8 columns of a token go."""
        stmatrix = cute.make_copy_atom(warp.StMatrix8x8x16bOp(transpose=True, num_matrices=4), BFloat16)
        line = cute.local_tile(staged, (1, 8), (token, column))
        line = cute.append_ones(cute.group_modes(line, 0, 2), up_to_rank=2)
        cute.copy(stmatrix, cute.append_ones(matrices, up_to_rank=2), line)

    @cute.jit
    def sync(self):
        cute.arch.barrier(barrier_id=self.index + FIRST_BARRIER, number_of_threads=WARPGROUP)


class SwiGLU(Epilogue):
    """Of the 64 rows, 32 are outputs' gates and 32 their ups. y goes out by TMA, which drops what is past the last row.

    Two batches are staged at a time.
    """

    BATCH, COLUMNS = 32, ROWS // 2
    FIRST = 256
    """K of a tile's first interval. Of 768, all-positive data would be low by 0.32%: K is 5376 here."""

    @staticmethod
    def turns(tile_tokens: int) -> int:
        return tile_tokens // SwiGLU.BATCH

    @staticmethod
    def target(out: cute.Tensor) -> tuple:
        """On the host: TMA's view of y."""
        slot = cute.slice_(_staging(SwiGLU.BATCH, SwiGLU.COLUMNS, 2 * CONSUMERS), (None, None, 0))
        store = cpasync.CopyBulkTensorTileS2GOp()
        return tuple(cpasync.make_tiled_tma_atom(store, out, slot, (SwiGLU.BATCH, SwiGLU.COLUMNS)))

    @staticmethod
    def prefetch(target: tuple):
        cpasync.prefetch_descriptor(target[0])

    @staticmethod
    def shared(gemm, smem) -> tuple:
        return *Epilogue.shared(gemm, smem), _staged(smem, SwiGLU.BATCH, SwiGLU.COLUMNS, 2 * CONSUMERS)

    def prepare(self, shared: tuple, target: tuple):
        (self.staged,), (self.tma, y_tiles) = shared, target
        self.h = cute.make_rmem_tensor((self.gemm.tile_tokens // 4,), Uint32)
        y_tiles = cute.local_tile(y_tiles, (self.BATCH, self.COLUMNS), (None, None))
        self.from_staged, self.to_y = operands.tma_pair(self.tma, self.staged, y_tiles)

    @cute.jit
    def load_token(self, within, index, row):
        pass

    @cute.jit
    def begin(self, _row, _token):
        """The sums to ``h``, in half the registers, so that the next tile may have theirs; and both slots are free."""
        if self.thread < 32:
            cute.arch.cp_async_bulk_wait_group(0, read=True)
        self.sync()  # the scales are there
        for atom in cutlass.range_constexpr(self.gemm.tile_tokens // 8):
            self.h[2 * atom], self.h[2 * atom + 1] = self.dequantize(atom, self.thread)

    @cute.jit
    def store(self, batch: cutlass.Constexpr, row, token):
        slot = 2 * self.index + batch % 2
        y = cute.make_rmem_tensor((2 * self.BATCH // 8,), BFloat16)
        y_pairs = cute.recast_tensor(y, Uint32)
        for i in cutlass.range_constexpr(self.BATCH // 8):
            atom = batch * (self.BATCH // 8) + i
            y_pairs[i] = epilogue.swiglu(self.h[2 * atom], self.h[2 * atom + 1])
        self.put(y, self.thread % 32, self.thread // 32, self.staged[(None, None, slot)])
        cute.arch.fence_proxy("async.shared", space="cta")
        if self.thread < 32:
            cute.arch.cp_async_bulk_wait_group(0, read=True)  # frees the other slot, for the next batch
        self.sync()
        if self.thread < 32:
            place = (None, token * (self.gemm.tile_tokens // self.BATCH) + batch, row * CONSUMERS + self.index)
            cute.copy(self.tma, self.from_staged[(None, slot)], self.to_y[place])
            cute.arch.cp_async_bulk_commit_group()

    @cute.jit
    def finish(self):
        if self.thread < 32:
            cute.arch.cp_async_bulk_wait_group(0, read=False)


class GatedResidual(Epilogue):
    """The 64 rows are columns of out. By way of shared memory a thread gets 8 neighbouring ones of a token, of
    every 16th in a batch, so that residual, gate and out are read and written 128 bytes a token at a time.
    """

    COLUMNS = ROWS
    FIRST = 768
    """K of a tile's first interval: the sums of the tile before stay where they are as long, so that registers suffice
    for 192 tokens. Of the 14336 that is little enough."""

    @staticmethod
    def batch(tile_tokens: int) -> int:
        """Tokens."""
        return 48 if tile_tokens % 48 == 0 else 32

    @staticmethod
    def turns(tile_tokens: int) -> int:
        return tile_tokens // GatedResidual.batch(tile_tokens)

    @staticmethod
    def target(out: cute.Tensor, gate: cute.Tensor, index: cute.Tensor, residual: cute.Tensor) -> tuple:
        return out, gate, index, residual

    @staticmethod
    def prefetch(_target: tuple):
        pass

    @staticmethod
    def shared(gemm, smem) -> tuple:
        rows = smem.allocate_tensor(Int32, cute.make_layout((gemm.tile_tokens, CONSUMERS)), byte_alignment=16)
        return (
            *Epilogue.shared(gemm, smem),
            rows,
            _staged(smem, GatedResidual.batch(gemm.tile_tokens), GatedResidual.COLUMNS, CONSUMERS),
        )

    def prepare(self, shared: tuple, target: tuple):
        (self.s_gate_rows, self.staged), (self.out, self.gate, self.table_index, self.residual) = shared, target
        self.size = self.batch(self.gemm.tile_tokens)
        self.parts = self.size // 16
        self.residuals = cute.make_rmem_tensor((4, self.parts), Uint32)

    @cute.jit
    def load_token(self, within, index, row):
        """The gate's row of a token; and its residual, 128 bytes, from DRAM to the L2."""
        s_gate_rows, rows = self.s_gate_rows, cute.size(self.s_row)
        gate_row = epilogue.gate_row(self.table_index, index, rows, cute.size(self.gate, mode=[0]))
        s_gate_rows[(within, self.index)] = gate_row
        column = cutlass.min(row * TILE_ROWS + self.index * ROWS, self.gemm.product.n - ROWS)
        ptx.prefetch_l2(address_of(self.residual, index, column // 8))

    @cute.jit
    def begin(self, row, token):
        self.sync()  # the scales are there, and what was staged has been read
        self.stage(0, row, token)

    @cute.jit
    def store(self, batch: cutlass.Constexpr, row, token):
        """Send off a batch, and stage the next, whose residual has until the next turn to come."""
        self.sync()  # it is staged
        self.send(batch, row, token)
        if const_expr(batch + 1 < self.gemm.turns):
            self.stage(batch + 1, row, token)

    @cute.jit
    def stage(self, batch: cutlass.Constexpr, row, token):
        """Ask for a batch's residual, and put o where threads find their vectors of it.

        What is past the last row or column is read as the last one, and not written.
        """
        thread = ptx.thread_index() % WARPGROUP  # anew, or what follows from it takes registers all along
        last, vector = cute.size(self.s_row) - 1, self.vector_of(self.column(row, thread))
        for part in cutlass.range_constexpr(self.parts):
            index = cutlass.min(self.token_of(batch, part, thread, token), last)
            source = vector_at(address_of(self.residual, index, vector), 16)
            cute.autovec_copy(source, self.residuals[None, part])
        if const_expr(batch > 0):
            self.sync()  # all have read the batch before
        staged = self.staged[(None, None, self.index)]
        for part in cutlass.range_constexpr(self.parts):
            o = cute.make_rmem_tensor((8,), BFloat16)
            pairs = cute.recast_tensor(o, Uint32)
            for i in cutlass.range_constexpr(2):
                pairs[i], pairs[2 + i] = self.dequantize(batch * (self.size // 8) + 2 * part + i, thread)
            self.put(o, 16 * part + thread % 16, thread // 32 * 2 + thread // 16 % 2, staged)

    @cute.jit
    def send(self, batch: cutlass.Constexpr, row, token):
        thread = ptx.thread_index() % WARPGROUP
        column = self.column(row, thread)
        staged, vector, last = self.staged[(None, None, self.index)], self.vector_of(column), cute.size(self.s_row) - 1
        for part in cutlass.range_constexpr(self.parts):
            index = self.token_of(batch, part, thread, token)
            within = part * 16 + thread // 8
            gate_row = self.s_gate_rows[(batch * self.size + within, self.index)]
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

    def column(self, row, thread):
        """The first of a thread's columns."""
        return row * TILE_ROWS + self.index * ROWS + thread % 8 * 8

    def vector_of(self, column):
        return cutlass.min(column, self.gemm.product.n - 8) // 8

    def token_of(self, batch: int, part: int, thread, token):
        """The number of a thread's token."""
        return token * self.gemm.tile_tokens + batch * self.size + part * 16 + thread // 8

    @cute.jit
    def finish(self):
        pass


def _staging(tokens: int, columns: int, slots: int) -> cute.ComposedLayout:
    """[token, output column, slot] BF16 of batches."""
    atom = hopper.get_smem_layout_atom(LayoutEnum.ROW_MAJOR, BFloat16, columns)
    atom = warpgroup.make_smem_layout_atom(atom, BFloat16)
    return cute.tile_to_shape(atom, (tokens, columns, slots), order=(0, 1, 2))


def _staged(smem, tokens: int, columns: int, slots: int) -> cute.Tensor:
    layout = _staging(tokens, columns, slots)
    return smem.allocate_tensor(BFloat16, layout.outer, byte_alignment=1024, swizzle=layout.inner)
