"""The FP8 GEMM on sm_120, sm_121 and sm_89, on mma.sync, with SwiGLU or the gated residual in its epilogue.

The problem: a_q . w_q^T, [M, K] x [K, N]. The tokens are mma.sync's M, the weight rows its N: n8 atoms of gates and of
ups of the same outputs are then accumulators of the same thread.

What shaped it:

- These GPUs have 99 KB of shared memory a block and neither wgmma nor, on sm_89, TMA. At the published 918 to 1005
  TFLOPS a QMMA keeps its quarter of an SM busy for 16 cycles, in which all else has to be issued and read: so a warp's
  tile is as large as registers allow, 64 x 64 (128 accumulators; 64 registers of operands, half of them being loaded
  while the other half is multiplied), and for each 64 QMMA there are about 100 other instructions.
- A CTA is persistent. Its loads run up to ``stages`` - 1 stages ahead, across tiles, so that the next tile is on its
  way while this one is dequantized and stored.
- Each accumulator adds all of K in order, in FP32. So every tile and way of loading gives the same bits.

It also runs on sm_90, for tests: ptxas emulates the plain form there, with two HMMA and four FADD each.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32, const_expr, pipeline

from . import epilogue, forms, mma_sync, operands, prologue, ptx, schedule, stages
from .product import SWIGLU, Product
from .stages import BLOCK, CHUNK, LANES
from .vectors import address_of, vector_at

ATOMS = BLOCK // mma_sync.N
"""n8 atoms of a warp, of which a thread has 16 neighbouring weight rows: 8 gates and their ups, or 16 outputs."""

WAYS = 2
"""Operand fragments of a warp: it loads one set while it multiplies the other."""


@dataclass(frozen=True)
class Tile:
    """The shape of a CTA's work. A warp has ``warp_tokens`` tokens by 64 packed weight rows."""

    warp_tokens: int
    warps: tuple[int, int]
    """Along the tokens and along the weight rows."""
    stage_k: int
    """K of a stage: 64 or 128, the width of the swizzle in bytes."""
    stages: int
    ctas: int = 1
    """CTAs of an SM."""

    @property
    def tokens(self) -> int:
        return self.warp_tokens * self.warps[0]

    @property
    def blocks(self) -> int:
        return self.warps[1]

    @property
    def rows(self) -> int:
        return BLOCK * self.blocks

    @property
    def threads(self) -> int:
        return LANES * self.warps[0] * self.warps[1]

    @property
    def name(self) -> str:
        return f"{self.tokens}x{self.rows}"

    @property
    def w_box(self) -> tuple:
        """What TMA brings at once."""
        return (*stages.BLOCK_ORDER, self.blocks), self.stage_k

    @property
    def a_box(self) -> tuple:
        return self.tokens, self.stage_k


@dataclass(frozen=True)
class GemmSm120(operands.Launches):
    """One compiled variant; the fields are everything it depends on."""

    product: Product
    tile: Tile
    form: str
    """Of ``forms``."""
    tma: bool
    group: int
    """Token tiles that pass by all weights together: their activations are to stay in the L2."""
    ptxas_options: str = ""

    def __post_init__(self):
        tile, at_once = self.tile, self.tile.threads * CHUNK // self.tile.stage_k
        if not self.tma and (at_once % 8 or tile.tokens % at_once or tile.rows % at_once):
            wanted = f"of rows that are copied {at_once} at once, a multiple of 8"
            raise ValueError(f"tile must be {wanted}, without remainder; it is {tile.name}")
        if self.product.k % tile.stage_k:
            raise ValueError(f"product.k must be a multiple of {tile.stage_k}, the tile's; it is {self.product.k}")

    @property
    def name(self) -> str:
        form = self.form.partition("_")[0]
        return f"gemm_sm120_{self.product.end}_{self.tile.name}_{form}{'' if self.tma else '_async'}"

    @property
    def multiplies_with(self) -> str:
        return {forms.PLAIN: "QMMA", forms.UNIT_SCALE: "QMMA.SF"}[self.form]

    @property
    def row_tiles(self) -> int:
        return -(-self.product.n // self.tile.rows)

    @cute.jit
    def enqueue(
        self,
        a_q: cute.Tensor,
        s_row: cute.Tensor,
        w_q: cute.Tensor,
        w_scale: cute.Tensor,
        target: tuple,
        multiprocessors: Int32,
        stream,
    ):
        tile = self.tile
        w_smem, a_smem = (operands.smem_layout(n, tile.stage_k, tile.stages) for n in (tile.rows, tile.tokens))
        sources = w_q, a_q
        if const_expr(self.tma):
            sources = stages.TmaLoads.sources(self, w_q, a_q, w_smem, a_smem)
        token_tiles = (cute.size(a_q, mode=[0]) + self.tile.tokens - 1) // self.tile.tokens
        ctas = cutlass.min(multiprocessors * self.tile.ctas, self.row_tiles * token_tiles)
        self.kernel(sources, s_row, w_scale, target, w_smem, a_smem, token_tiles).launch(
            grid=(ctas, 1, 1),
            block=(self.tile.threads, 1, 1),
            min_blocks_per_mp=self.tile.ctas,
            preferred_smem_carveout=100,  # given, because the compiler would ask a device for its limit otherwise
            stream=stream,
            use_pdl=ptx.hopper_or_later(),
        )

    @cute.kernel
    def kernel(
        self,
        sources: tuple,
        s_row: cute.Tensor,
        w_scale: cute.Tensor,
        target: tuple,
        w_smem: cute.ComposedLayout,
        a_smem: cute.ComposedLayout,
        token_tiles: Int32,
    ):
        thread = ptx.thread_index()
        ring = stages.Ring(self, w_smem, a_smem)
        ring.init_barriers(thread)
        loads = (stages.TmaLoads if self.tma else stages.AsyncLoads)(self, ring, *sources, thread)
        tiles = schedule.Tiles(self.row_tiles, token_tiles, self.group)
        Warp(self, tiles, ring, loads, s_row, w_scale, target, thread).run()


class Warp:
    """``warp_tokens`` tokens by one block of weight rows of every tile."""

    def __init__(
        self, gemm: GemmSm120, tiles: schedule.Tiles, ring: stages.Ring, loads, s_row, w_scale, target, thread
    ):
        self.gemm, self.tile, self.tiles, self.ring, self.loads = gemm, gemm.tile, tiles, ring, loads
        self.s_row, self.w_scale, self.target = s_row, w_scale, target
        self.lane, warp = thread % LANES, cute.arch.make_warp_uniform(thread // LANES)
        self.token, self.block = warp % gemm.tile.warps[0] * gemm.tile.warp_tokens, warp // gemm.tile.warps[0]
        self.m_atoms, self.steps = gemm.tile.warp_tokens // mma_sync.M, gemm.tile.stage_k // mma_sync.K
        # ldmatrix: the row of 16 bytes of which this lane gives the address. Of a, 16 tokens by two chunks; of w, two
        # atoms, of each its first chunk and then its second.
        a_row, a_chunk = self.lane % 16, self.lane // 16
        w_row, w_chunk = self.lane // 16 * 8 + self.lane % 8, self.lane // 8 % 2
        self.a_address = ring.a.iterator.toint() + stages.place(self.token + a_row, a_chunk, gemm.tile.stage_k)
        self.w_address = ring.w.iterator.toint() + stages.place(self.block * BLOCK + w_row, w_chunk, gemm.tile.stage_k)
        self.a = cute.make_rmem_tensor((4, self.m_atoms, WAYS), Uint32)
        self.w = cute.make_rmem_tensor((2, ATOMS, WAYS), Uint32)
        self.acc = cute.make_rmem_tensor((4, ATOMS, self.m_atoms), Float32)

    @cute.jit
    def run(self):
        tiles, full = self.tiles, self.ring.full
        depth = const_expr(self.gemm.product.k // self.tile.stage_k)
        ahead = const_expr(min(self.tile.stages - 1, depth))
        filled = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.tile.stages)
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.tile.stages)
        row, token = self.tiles.coordinates(tiles.first)
        filled = self.start(filled, row, token, ahead)
        ptx.wait(full + state.index, state.phase)
        self.load(state.index, 0)
        for tile in cutlass.range(tiles.first, tiles.end, tiles.step, unroll=1):
            more = tile + tiles.step < tiles.end
            next_row, next_token = self.tiles.coordinates(tile + tiles.step)
            self.acc.fill(0.0)
            for k in cutlass.range(depth, unroll=1):
                if k == depth - ahead:
                    self.loads.aim(next_row, next_token)
                if (k < depth - ahead) | more:
                    to_load = cutlass.select_(k < depth - ahead, k + ahead, k + ahead - depth)
                    self.loads.weights(filled, to_load)
                    self.loads.activations(filled, to_load)
                    filled.advance()
                for step in cutlass.range_constexpr(self.steps - 1):
                    self.load(state.index, step + 1)
                    self.multiply(step)
                ptx.arrive(self.ring.empty + state.index)  # the stage's last operands are in registers
                state.advance()
                if (k < depth - 1) | more:
                    ptx.wait(full + state.index, state.phase)
                self.load(state.index, 0)  # behind the last stage something, for nobody to use
                self.multiply(self.steps - 1)
            self.store(row, token)
            row, token = next_row, next_token

    @cute.jit
    def start(self, filled, row, token, count: cutlass.Constexpr):
        """The first loads. Those of the weights do not wait for stage 1."""
        self.loads.aim(row, token)
        behind = filled.clone()
        for k in cutlass.range_constexpr(count):
            self.loads.weights(filled, k)
            filled.advance()
        ptx.wait_for_previous_kernel()
        for k in cutlass.range_constexpr(count):
            self.loads.activations(behind, k)
            behind.advance()
        return filled

    @cute.jit
    def load(self, stage, step: cutlass.Constexpr):
        """The operands of one step of 32 of K, into registers."""
        stage_k, way = self.tile.stage_k, step % WAYS
        a = (self.a_address + stage * self.ring.a_bytes) ^ (step * 2 * CHUNK)
        w = (self.w_address + stage * self.ring.w_bytes) ^ (step * 2 * CHUNK)
        for m in cutlass.range_constexpr(self.m_atoms):
            mma_sync.load_matrices(self.a[None, m, way], a, m * mma_sync.M * stage_k)
        for n in cutlass.range_constexpr(0, ATOMS, 2):
            two = cute.group_modes(self.w[None, None, way], 0, 2)
            mma_sync.load_matrices(cute.local_tile(two, (4,), (n // 2,)), w, n * mma_sync.N * stage_k)

    @cute.jit
    def multiply(self, step: cutlass.Constexpr):
        way = step % WAYS
        for n in cutlass.range_constexpr(ATOMS):
            for m in cutlass.range_constexpr(self.m_atoms):
                b = [self.w[0, n, way], self.w[1, n, way]]
                mma_sync.multiply(self.gemm.form, self.acc[None, n, m], self.a[None, m, way], b)

    @cute.jit
    def store(self, row, token):
        """Dequantize, and end as the product does: a thread has 16 weight rows, two rows of each m16 atom."""
        block, s_row, w_scale = row * self.tile.blocks + self.block, self.s_row, self.w_scale
        first = token * self.tile.tokens + self.token + self.lane // 4
        column = block * BLOCK + self.lane % 4 * 16
        if block * BLOCK < self.gemm.product.n:
            s = cute.make_rmem_tensor((2, self.m_atoms), Float32)
            for m in cutlass.range_constexpr(self.m_atoms):
                for half in cutlass.range_constexpr(2):
                    s[half, m] = Float32(0.0)
                    if first + 16 * m + 8 * half < cute.size(s_row):
                        s[half, m] = s_row[first + 16 * m + 8 * half]
            scales = cute.make_rmem_tensor((2, ATOMS), Float32)
            for i in cutlass.range_constexpr(2 * ATOMS):
                scales[i] = w_scale[column + i]
            for m in cutlass.range_constexpr(self.m_atoms):
                for half in cutlass.range_constexpr(2):
                    index = first + 16 * m + 8 * half
                    if index < cute.size(s_row):
                        if const_expr(self.gemm.product.end == SWIGLU):
                            self.swiglu(m, half, index, column, s[half, m], scales)
                        else:
                            self.gated_residual(m, half, index, column, s[half, m], scales)

    @cute.jit
    def swiglu(self, m: cutlass.Constexpr, half: cutlass.Constexpr, index, column, s_row, scales: cute.Tensor):
        """8 gates, then their 8 ups."""
        (out,) = self.target
        y = cute.make_rmem_tensor(4, Uint32)
        for j in cutlass.range_constexpr(4):
            y[j] = epilogue.swiglu(self.h(m, half, j, s_row, scales), self.h(m, half, j + 4, s_row, scales))
        cute.autovec_copy(y, vector_at(address_of(out, index, column // 16), 16))

    @cute.jit
    def gated_residual(self, m: cutlass.Constexpr, half: cutlass.Constexpr, index, column, s_row, scales: cute.Tensor):
        out, gate, table_index, residual = self.target
        gate_rows = cute.size(gate, mode=[0])
        gate_row = epilogue.gate_row(table_index, index, cute.size(self.s_row), gate_rows)
        for vector in cutlass.range_constexpr(2):
            gates, words = (cute.make_rmem_tensor(4, Uint32) for _ in range(2))
            at = column // 8 + vector
            cute.autovec_copy(vector_at(address_of(gate, cutlass.max(gate_row, 0), at), 16), gates)
            cute.autovec_copy(vector_at(address_of(residual, index, at), 16), words)
            for j in cutlass.range_constexpr(4):
                o = self.h(m, half, 4 * vector + j, s_row, scales)
                whole = epilogue.gated_residual(o, gates[j], words[j])
                words[j] = cutlass.select_(gate_row == prologue.OUTSIDE, words[j], whole)
            cute.autovec_copy(words, vector_at(address_of(out, index, at), 16))

    def h(self, m: int, half: int, n: int, s_row, scales: cute.Tensor):
        """Two neighbouring outputs of an n8 atom, or two gates or ups."""
        acc0, acc1 = self.acc[2 * half, n, m], self.acc[2 * half + 1, n, m]
        return epilogue.dequantize(acc0, acc1, s_row, s_row, scales[0, n], scales[1, n])
