"""Stage 1 on every architecture: RMSNorm + indexed AdaLN + row-wise E4M3 quantization, bit for bit ``h3mlp.contract``.

x BF16 [M, H] -> a_q E4M3 [M, H] and s_row FP32 [M]. H is a compile-time constant, M and R are not.

The problem is one of bytes first and of instructions close behind. At H = 5376 a row reads 10.75 KB and writes 5.4 KB
of DRAM; an H200 (4.24 TB/s, 132 SMs) moves 33472 rows in 0.127 ms, and in that time one of its SMs can issue about 21
instructions for every 32 elements, if it never waits. The arithmetic alone takes 12. Hence:

- A worker thread owns the same vector of 8 elements in every row of its CTA (21 warps at H = 5376) and keeps its part
  of norm weight, 1 + scale and shift in registers, as FP32, until the index changes: it is constant over long runs.
- What is computed once a row (tree, root, divisions: 300 instructions, 900 cycles) is the job of two more warps, one a
  reduction. A row is squared two steps before it is modulated, and modulated two steps before it is quantized; so
  a reduction has two steps' time, and the workers need not be in step: they meet at barriers in shared memory, each of
  which says that one kind of number of one row is there.
- x comes through a ring of rows in shared memory, filled by cp.async past the L1. Every thread reads back only what it
  copied itself, so the ring needs no barrier. A row is read twice, for its squares and two steps later: registers are
  scarcer than the bandwidth of shared memory. The loop is unrolled over the ring.
- a / s_row takes two instructions (``prologue.quotient``).

x, the weight and the tables may start at any element and have any row stride: ``vectors=True`` needs 16-byte alignment
of both, ``vectors=False`` loads element by element and computes the same bits. Row offsets are of 64 bits.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float8E4M3FN, Float32, Int32, Int64, Uint8, Uint32, const_expr
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from ... import contract
from . import prologue, ptx, sass
from .prologue import VECTOR, WORDS
from .vectors import CODE_BYTES, VECTOR_BYTES, address_of, load_vector, row_bytes, vector_at

LANES = 32
NOTHING = -2
"""Held where no table row is, not even ``prologue.OUTSIDE``."""

AHEAD = 2
"""Steps from the squares of a row to its modulation, and from there to its quantization."""

BUFFERS = 2
"""Of sums, norms, peaks and inverses. Row k has those of k mod 2."""

PERIOD = 2 * BUFFERS
"""Steps after which buffers and barrier phases recur: a wait names a phase by its parity."""

REDUCERS = 2
"""Warps that turn sums into norms, and peaks into inverses."""

SMEM_OF_RESULTS = BUFFERS * (2 * 8 + 4 * 8)
"""Norms, inverses and four barriers, 8 bytes each."""


@dataclass(frozen=True)
class NormQuant:
    """One specialization of the kernel.

    ``trace`` gives what ``cute.compile(function, *arguments, options="--enable-tvm-ffi")`` needs. The compiled function
    takes (x, x_norm_weight, adaln_scale, adaln_shift, adaln_index, a_q, s_row, eps), without the three of AdaLN where
    there is none, and launches on torch's current stream. a_q (E4M3) and s_row may have more than M rows. M = 0
    launches one CTA that does nothing.
    """

    hidden: int
    index_bits: int = 32
    vectors: bool = True
    modulation: str | None = "fused"
    """One of ``contract.MODULATION``, or None: no AdaLN, a = n, and no index, of 0 bits."""
    warps: int = 30
    """The most worker warps of a CTA. A row has a chunk for each 256 elements, dealt evenly: 1 a warp at best."""
    stages: int = 8
    """The most rows in the ring, a multiple of ``PERIOD``, or 0: straight to registers. The copies of ``stages`` - 3
    rows may be on their way: 5 rows of H = 5376 are 54 KB an SM."""
    sms: int = 132
    """CTAs at most: one fills an SM."""

    def __post_init__(self):
        if self.hidden < 1 or self.hidden % contract.HIDDEN_MULTIPLE:
            raise ValueError(f"hidden must be a positive multiple of {contract.HIDDEN_MULTIPLE}; it is {self.hidden}")
        if self.modulation not in (*contract.MODULATION, None):
            raise ValueError(f"modulation must be one of {contract.MODULATION} or None; it is {self.modulation!r}")
        widths = (32, 64) if self.modulation else (0,)
        if self.index_bits not in widths:
            raise ValueError(f"index_bits must be one of {widths}; it is {self.index_bits}")
        if not 1 <= self.warps <= LANES - REDUCERS:
            raise ValueError(f"warps must be 1 to {LANES - REDUCERS}; it is {self.warps}")
        if self.stages < 0 or self.stages % PERIOD:
            raise ValueError(f"stages must be a multiple of {PERIOD}, or 0; it is {self.stages}")

    @property
    def name(self) -> str:
        mode = {"fused": f"i{self.index_bits}", "eager": f"eager_i{self.index_bits}", None: "plain"}[self.modulation]
        return f"norm_quant_{mode}{'' if self.vectors else '_scalar'}"

    # The shape of a row, in vectors and chunks of one vector a lane.

    @property
    def row_vectors(self) -> int:
        return self.hidden // VECTOR

    @property
    def chunks(self) -> int:
        return -(-self.row_vectors // LANES)

    @property
    def own(self) -> int:
        """Chunks of a warp, which are vectors of a thread."""
        return -(-self.chunks // self.warps)

    @property
    def workers(self) -> int:
        """Warps."""
        return -(-self.chunks // self.own)

    @property
    def threads(self) -> int:
        """Of the workers alone."""
        return self.workers * LANES

    def ragged(self, j: int) -> bool:
        """Whether some threads lack their j-th vector."""
        return (j + 1) * self.threads > self.row_vectors

    def owns(self, thread, j: int):
        """Whether the thread has its j-th vector: known to the compiler unless it is ragged."""
        return thread + j * self.threads < self.row_vectors if self.ragged(j) else True

    # Shared memory: the ring, sums and peaks (together as much as one row of the ring), and the results.

    @property
    def slot_bytes(self) -> int:
        return self.own * self.threads * VECTOR_BYTES

    @property
    def ring(self) -> int:
        """Rows in the ring, as many as fit: 8 at H = 5376."""
        fit = (sass.SHARED_LIMIT - SMEM_OF_RESULTS) // self.slot_bytes - 1
        return max(min(self.stages, fit // PERIOD * PERIOD), 0) if self.vectors else 0

    @property
    def unroll(self) -> int:
        """Steps in a turn of the loop: the compiler then knows the slot, buffer and barrier phase of each."""
        return self.ring or PERIOD

    @property
    def shared_bytes(self) -> int:
        return (self.ring + 1) * self.slot_bytes + SMEM_OF_RESULTS

    def trace(self) -> tuple[object, tuple]:
        """The function to compile and its fake arguments."""
        rows, table_rows = cute.sym_int32(), cute.sym_int32()
        align = VECTOR_BYTES if self.vectors else BFloat16.width // 8

        def matrix(dtype, count, align):
            # No divisibility of the stride is declared: DLPack may give a dimension of size 1 the stride 1.
            # ``vector_at`` asserts the alignment instead.
            shape, stride = (count, self.hidden), (cute.sym_int64(), 1)
            return cute.runtime.make_fake_tensor(dtype, shape, stride, assumed_align=align)

        def vector(dtype, count, align):
            return cute.runtime.make_fake_tensor(dtype, (count,), (1,), assumed_align=align)

        index = Int32 if self.index_bits == 32 else Int64
        adaln = (
            matrix(BFloat16, table_rows, align),
            matrix(BFloat16, table_rows, align),
            vector(index, rows, index.width // 8),
        )
        arguments = (
            matrix(BFloat16, rows, align),
            vector(BFloat16, self.hidden, align),
            *(adaln if self.modulation else ()),
            matrix(Float8E4M3FN, cute.sym_int32(), CODE_BYTES if self.vectors else 1),
            vector(Float32, cute.sym_int32(), 4),
            Float32(contract.EPS),
            cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
        )
        return self.launch if self.modulation else self.launch_without_adaln, arguments

    @cute.jit
    def launch_without_adaln(
        self, x: cute.Tensor, weight: cute.Tensor, a_q: cute.Tensor, s_row: cute.Tensor, eps: Float32, stream
    ):
        self.launch(x, weight, None, None, None, a_q, s_row, eps, stream)

    @cute.jit
    def launch(
        self,
        x: cute.Tensor,
        weight: cute.Tensor,
        scale: cute.Tensor | None,
        shift: cute.Tensor | None,
        index: cute.Tensor | None,
        a_q: cute.Tensor,
        s_row: cute.Tensor,
        eps: Float32,
        stream,
    ):
        limit = sass.shared_limit(ptx.architecture().name)  # or the compiler would ask a device for it
        self.kernel(x, weight, scale, shift, index, a_q, s_row, eps).launch(
            grid=[cutlass.max(cutlass.min(x.shape[0], self.sms), 1), 1, 1],
            block=[self.threads + REDUCERS * LANES, 1, 1],
            min_blocks_per_mp=1,
            preferred_smem_carveout=min(100, -(-100 * (self.shared_bytes + 1024) // limit)),
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        x: cute.Tensor,
        weight: cute.Tensor,
        scale: cute.Tensor | None,
        shift: cute.Tensor | None,
        index: cute.Tensor | None,
        a_q: cute.Tensor,
        s_row: cute.Tensor,
        eps: Float32,
    ):
        ptx.launch_dependents()
        thread = cute.arch.thread_idx()[0]
        warp = cute.arch.make_warp_uniform(thread // LANES)
        rows, shared = Rows(self, x.shape[0]), Shared(self)
        shared.init_barriers(thread)
        if rows.count > 0:
            if warp < self.workers:
                Worker(self, rows, shared, thread, x, weight, scale, shift, index, a_q).run()
            elif warp == self.workers:
                Reducer(self, rows, shared, thread % LANES).sums(index, scale, eps)
            else:
                Reducer(self, rows, shared, thread % LANES).peaks(s_row)


class Rows:
    """The rows of this CTA: its row k is row ``first + k * stride`` of x. In step k of the workers, from -AHEAD on, row
    k + AHEAD is squared, row k modulated and row k - AHEAD quantized."""

    def __init__(self, op: NormQuant, rows: Int32):
        self.first, self.stride = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
        self.count = cute.ceil_div(rows - self.first, self.stride)
        self.turns = cute.ceil_div(self.count + 2 * AHEAD, op.unroll)

    def number(self, k):
        return self.first + k * self.stride

    def has(self, k):
        """0 <= k < count.

        Not as Uint32(k) < Uint32(count): what ``cute.ceil_div`` and ``shape`` give compares as signed even as Uint32
        (DSL 4.8.1), which lets row -2 pass, and its table row, never written, is an address anywhere.
        """
        return (k >= 0) & (k < self.count)


class Shared:
    """Shared memory. A barrier says that the numbers that it is called after are there, and that those which they were
    made of have been read. All threads arrive, not one for its warp: no slower, and the race checker understands it."""

    def __init__(self, op: NormQuant):
        self.op, smem = op, SmemAllocator()
        self.ring = None
        if op.ring:
            ring = cute.make_layout((WORDS, op.threads, op.own, op.ring))
            self.ring = smem.allocate_tensor(Uint32, ring, byte_alignment=VECTOR_BYTES)
        partial, result = cute.make_layout((op.threads, op.own, BUFFERS)), cute.make_layout((2, BUFFERS))
        self.sums = smem.allocate_tensor(Float32, partial, byte_alignment=16)
        self.peaks = smem.allocate_tensor(Uint32, partial, byte_alignment=16)
        self.norms = smem.allocate_tensor(Uint32, result, byte_alignment=16)  # rstd, table row
        self.inverses = smem.allocate_tensor(Float32, result, byte_alignment=16)  # 1 / s_row in two parts
        self.sums_done, self.norms_done, self.peaks_done, self.inverses_done = (
            smem.allocate_array(Int64, BUFFERS) for _ in range(4)
        )

    @cute.jit
    def init_barriers(self, thread):
        if thread == 0:
            for buffer in cutlass.range_constexpr(BUFFERS):
                for barrier in (self.sums_done, self.peaks_done):
                    cute.arch.mbarrier_init(barrier + buffer, self.op.threads)
                for barrier in (self.norms_done, self.inverses_done):
                    cute.arch.mbarrier_init(barrier + buffer, LANES)
        cute.arch.barrier()


class Worker:
    """One warp of those that touch every element."""

    def __init__(self, op: NormQuant, rows: Rows, shared: Shared, thread, x, weight, scale, shift, index, a_q):
        self.op, self.rows, self.shared, self.thread = op, rows, shared, thread
        self.x, self.weight, self.scale, self.shift, self.index, self.a_q = x, weight, scale, shift, index, a_q
        self.a = cute.make_rmem_tensor((WORDS, op.own, BUFFERS), Uint32)
        self.tables = cute.make_rmem_tensor((VECTOR, 3, op.own), Float32)  # weight, 1 + scale, shift
        self.held = cute.make_rmem_tensor(1, Int32)  # the table row in ``tables``
        self.next_x = cute.make_rmem_tensor(1, Int64)  # address of what to copy next
        self.next_a_q = cute.make_rmem_tensor(1, Int64)  # address where to store next

    @cute.jit
    def run(self):
        op, rows = self.op, self.rows
        self.a.fill(0)
        self.tables.fill(0.0)
        self.held[0] = Int32(NOTHING)
        # Step k copies row k - 1 + ring, from k = -AHEAD on.
        self.next_x[0] = address_of(self.x, rows.first, self.thread)
        self.next_a_q[0] = address_of(self.a_q, rows.number(-2 * AHEAD), self.thread)
        for k in cutlass.range_constexpr(op.ring - 1 - AHEAD):
            self.copy(k < rows.count, k)
        row = Int32(0)
        if const_expr(op.modulation is not None):
            row = prologue.table_row_of(self.index[rows.first], self.scale.shape[0])
        if row != prologue.OUTSIDE:
            self.load_tables(row)
        for turn in cutlass.range(rows.turns, unroll=1):
            k = turn * op.unroll - AHEAD
            # Where every row exists, nothing asks whether it does: 12 instructions of 150 a step.
            if (k >= AHEAD) & (k + op.unroll - 2 + max(op.ring, AHEAD + 1) < self.rows.count):
                for at in cutlass.range_constexpr(op.unroll):
                    self.step(at, at % BUFFERS, k + at, True)
            else:
                for at in cutlass.range(0, op.unroll, BUFFERS, unroll=1):  # not unrolled: compiles a second faster
                    for buffer in cutlass.range_constexpr(BUFFERS):
                        self.step(at + buffer, buffer, k + at + buffer, False)

    @cute.jit
    def step(self, at, buffer: cutlass.Constexpr, k, steady: cutlass.Constexpr):
        """Step k, the ``at``-th of a turn. ``steady``: rows k - AHEAD to k - 1 + ring, or k + AHEAD, exist."""
        op, shared = self.op, self.shared
        phase, slot = at // BUFFERS % 2, at - AHEAD + op.ring
        if const_expr(op.ring > 0):
            # Into the slot of row k - 1, which this thread has read for the last time.
            self.copy(steady or k - 1 + op.ring < self.rows.count, slot - 1)
            cute.arch.cp_async_wait_group(op.ring - 1 - AHEAD)

        ptx.wait(shared.norms_done + buffer, 1 - phase)  # of row k, whose sums nobody needs any more
        norm = cute.make_rmem_tensor(2, Uint32)
        cute.autovec_copy(shared.norms[None, buffer], norm)
        if op.ring > 0 or steady or k + AHEAD < self.rows.count:  # what the ring has past the last row does no harm
            self.square(k + AHEAD, slot + AHEAD, buffer)
        ptx.arrive(shared.sums_done + buffer)

        a = cute.make_rmem_tensor((WORDS, op.own), Uint32)
        a.fill(0)
        if steady or self.rows.has(k):
            self.take(k, slot, a)
            self.modulate(norm, a)
        ptx.wait(shared.inverses_done + buffer, 1 - phase)  # of row k - AHEAD, whose peaks nobody needs any more
        inverse = cute.make_rmem_tensor(2, Float32)
        cute.autovec_copy(shared.inverses[None, buffer], inverse)
        for j in cutlass.range_constexpr(op.own):
            shared.peaks[self.thread, j, buffer] = prologue.peak_of(a[None, j])
        ptx.arrive(shared.peaks_done + buffer)

        before = self.a[None, None, buffer]
        self.quantize(before, inverse, steady or self.rows.has(k - AHEAD))
        before.store(a.load())

    @cute.jit
    def copy(self, wanted, slot):
        """Start this thread's copies of the next row into the ring, if there is such a row."""
        op, atom = self.op, cpasync.CopyG2SOp(cache_mode=cute.nvgpu.LoadCacheMode.GLOBAL)
        atom = cute.make_copy_atom(atom, Uint32, num_bits_per_copy=VECTOR_BYTES * 8)
        if wanted:
            for j in cutlass.range_constexpr(op.own):
                if op.owns(self.thread, j):
                    source = vector_at(self.next_x[0] + j * op.threads * VECTOR_BYTES, VECTOR_BYTES)
                    cute.copy(atom, source, self.shared.ring[None, self.thread, j, slot % op.ring])
        cute.arch.cp_async_commit_group()
        self.next_x[0] += self.rows.stride * row_bytes(self.x)

    @cute.jit
    def take(self, k, slot, words: cute.Tensor):
        """This thread's vectors of row k, from the ring or straight from global memory; zeros where it has none."""
        op = self.op
        for j in cutlass.range_constexpr(op.own):
            if const_expr(op.ragged(j)):
                words[None, j].fill(0)
            if op.owns(self.thread, j):
                if const_expr(op.ring > 0):
                    cute.autovec_copy(self.shared.ring[None, self.thread, j, slot % op.ring], words[None, j])
                else:
                    self.load(self.x, self.rows.number(k), j, words[None, j])

    def load(self, tensor: cute.Tensor, row, j: int, words: cute.Tensor):
        """The thread's j-th vector of a row."""
        address = address_of(tensor, row, self.thread) + j * self.op.threads * VECTOR_BYTES
        load_vector(self.op.vectors, address, words)

    @cute.jit
    def square(self, k, slot, buffer: cutlass.Constexpr):
        x = cute.make_rmem_tensor((WORDS, self.op.own), Uint32)
        self.take(k, slot, x)
        for j in cutlass.range_constexpr(self.op.own):
            self.shared.sums[self.thread, j, buffer] = prologue.sum_of_squares(x[None, j])

    @cute.jit
    def modulate(self, norm: cute.Tensor, words: cute.Tensor):
        """``norm``: rstd and the table row."""
        row, tables, held = Int32(norm[1]), self.tables, self.held
        if row != held[0]:
            if row == prologue.OUTSIDE:  # everything becomes 0, and therefore a
                tables.fill(0.0)
                words.fill(0)
                norm[0] = Uint32(0)
                held[0] = Int32(NOTHING)
            else:
                self.load_tables(row)
        for j in cutlass.range_constexpr(self.op.own):
            prologue.modulate(norm[0].bitcast(Float32), tables[None, None, j], words[None, j], self.op.modulation)

    @cute.jit
    def load_tables(self, row):
        """The weight, 1 + scale and shift of a thread's vectors, as FP32. Past the row they stay 0, and a no peak."""
        op, thread, tables = self.op, self.thread, self.tables
        pairs = cute.make_rmem_tensor((WORDS, 3), Uint32)
        for j in cutlass.range_constexpr(op.own):
            if op.owns(thread, j):
                self.load(self.weight, 0, j, pairs[None, 0])
                if const_expr(op.modulation is not None):
                    self.load(self.scale, row, j, pairs[None, 1])
                    self.load(self.shift, row, j, pairs[None, 2])
                for k in cutlass.range_constexpr(WORDS):
                    if const_expr(op.modulation is not None):
                        pairs[k, 1] = prologue.scale_plus_one(pairs[k, 1])
                    for t in cutlass.range_constexpr(3 if op.modulation else 1):
                        tables[2 * k, t, j], tables[2 * k + 1, t, j] = ptx.halves(pairs[k, t])
        self.held[0] = row

    @cute.jit
    def quantize(self, words: cute.Tensor, inverse: cute.Tensor, exists):
        """Only the stores are conditional: the compiler predicates rather than branches, and spilled what it did."""
        op = self.op
        for j in cutlass.range_constexpr(op.own):
            codes = cute.make_rmem_tensor(2, Uint32)
            codes[0], codes[1] = prologue.codes(words[None, j], inverse[0], inverse[1])
            if exists & op.owns(self.thread, j):
                address = self.next_a_q[0] + j * op.threads * CODE_BYTES
                target = vector_at(address, CODE_BYTES, None if op.vectors else Uint8)
                cute.autovec_copy(cute.recast_tensor(codes, target.element_type), target)
        self.next_a_q[0] += self.rows.stride * row_bytes(self.a_q)


class Reducer:
    """One warp, for what is computed once a row."""

    def __init__(self, op: NormQuant, rows: Rows, shared: Shared, lane: Int32):
        self.op, self.rows, self.shared, self.lane = op, rows, shared, lane

    @cute.jit
    def sums(self, index: cute.Tensor | None, scale: cute.Tensor | None, eps):
        """rstd and the table row of every row; without AdaLN all rows have row 0, of the norm weight alone.

        The indices of 32 rows are read at once, up to 32 rows ahead: behind all the copies of x a load takes 3 us.
        """
        op, lane, last, norms = self.op, self.lane, self.rows.count - 1, self.shared.norms
        here = Int32(0)
        if const_expr(op.modulation is not None):
            ahead = index[self.rows.number(cutlass.min(lane, last))]
        for turn in cutlass.range(0, self.rows.turns * op.unroll, PERIOD, unroll=1):
            if const_expr(op.modulation is not None):
                if turn % LANES == 0:
                    here = prologue.table_row_of(ahead, scale.shape[0])
                    ahead = index[self.rows.number(cutlass.min(turn + LANES + lane, last))]
            for at in cutlass.range_constexpr(PERIOD):
                k, buffer = turn + at, at % BUFFERS
                ptx.wait(self.shared.sums_done + buffer, at // BUFFERS)
                if k <= last:
                    total = prologue.tree(self.over_chunks(self.shared.sums, buffer), lambda a, b: a + b)
                    rstd = prologue.reciprocal_rms(prologue.sum_over_lanes(total), op.hidden, eps)
                    table_row = cute.arch.shuffle_sync(here, k % LANES)
                    if lane == 0:
                        norms[0, buffer] = rstd.bitcast(Uint32)
                        norms[1, buffer] = Uint32(table_row)
                ptx.arrive(self.shared.norms_done + buffer)

    @cute.jit
    def peaks(self, s_row: cute.Tensor):
        """s_row and its inverse of every row."""
        lane, inverses = self.lane, self.shared.inverses
        for turn in cutlass.range(0, self.rows.turns * self.op.unroll, PERIOD, unroll=1):
            for at in cutlass.range_constexpr(PERIOD):
                k, buffer = turn + at - AHEAD, at % BUFFERS
                ptx.wait(self.shared.peaks_done + buffer, at // BUFFERS)
                if self.rows.has(k):
                    peak = prologue.tree(self.over_chunks(self.shared.peaks, buffer), prologue.larger)
                    s = prologue.row_scale(prologue.largest(peak))
                    inverse = prologue.inverse(s)
                    if lane == 0:
                        inverses[0, buffer], inverses[1, buffer] = inverse
                        s_row[self.rows.number(k)] = s
                ptx.arrive(self.shared.inverses_done + buffer)

    def over_chunks(self, partial: cute.Tensor, buffer: int) -> list:
        """This lane's numbers of each chunk of a row."""
        lane, op = self.lane, self.op
        return [partial[lane + c % op.workers * LANES, c // op.workers, buffer] for c in range(op.chunks)]
