"""Stage 1 on every architecture: RMSNorm + indexed AdaLN + row-wise E4M3 quantization, bit for bit ``h3mlp.contract``.

x BF16 [M, H] -> a_q E4M3 [M, H] and s_row FP32 [M]. H is a compile-time constant, M and R are not.

The problem is one of bytes first and of instructions close behind. At H = 5376 a row reads 10.75 KB and writes 5.4 KB
of DRAM; an H200 (4.24 TB/s, 132 SMs) moves 33472 rows in 0.127 ms, and in that time one of its SMs can issue about 26
instructions for every 32 elements. Hence:

- One CTA works on ``rows`` rows at a time and stays resident, striding over the rows. Chunk c of a row (32 vectors of 8
  elements, one a lane) belongs to warp c mod ``warps``. With a power of two of warps the contract's summation tree
  splits into three clean parts: additions within a thread, one FP32 a lane through shared memory, one butterfly.
- The scalar work of a row (tree, root, three divisions: about 130 instructions) is done by one warp, and the rows of a
  group by different warps; were every warp of 8 to do it, it would be a third of all instructions.
- The norm weight and the table rows come from the L1, are unpacked once and serve the whole group, as long as its rows
  have the same index (the index is constant over long runs of rows).
- x comes through a ring of ``stages`` groups in shared memory, filled by cp.async past the L1. Every thread reads back
  only what it copied itself, so the ring needs no barrier. From then on a row is in registers as BF16 pairs.
- The indices of the next group are read one group ahead.
- a / s_row costs three instructions of the FMA pipe and no branch (``quotient``).

x, the weight and the tables may start at any element and have any row stride: ``vectors=True`` needs 16-byte alignment
of both, ``vectors=False`` loads element by element and computes the same bits. Row offsets are of 64 bits.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float8E4M3FN, Float32, Int32, Int64, Uint8, Uint16, Uint32, const_expr
from cutlass.cute.nvgpu import cpasync
from cutlass.cutlass_dsl import T
from cutlass.memory import SmemAllocator

from ... import contract
from .ptx import asm, bf16x2, fma_bf16x2, halves

LANES = 32
VECTOR = contract.VECTOR
VECTOR_BYTES = 16
WORDS = 4
CODE_BYTES = 8
"""A vector of 8 elements: 4 pairs of BF16 in, E4M3 out."""

OUTSIDE = -1
"""The table row of an index outside the tables, and of a row past the last."""

SMEM_PER_SM = 227 * 1024


@dataclass(frozen=True)
class NormQuant:
    """One specialization of the kernel.

    ``trace`` gives what ``cute.compile(function, *arguments, options="--enable-tvm-ffi")`` needs. The compiled function
    takes (x, x_norm_weight, adaln_scale, adaln_shift, adaln_index, a_q, s_row, eps) and launches on torch's current
    stream. a_q (E4M3) and s_row may have more than M rows. M = 0 launches one CTA that does nothing.
    """

    hidden: int
    index_bits: int = 32
    vectors: bool = True
    warps: int = 8
    """Warps of a CTA, which share each row: a power of two."""
    rows: int = 4
    """Rows that a CTA works on together, at most ``warps``. 1 has the shortest latency, where M is small."""
    ctas_per_sm: int = 2
    """CTAs that must fit in an SM at once: bounds the registers and, with ``sms``, the grid."""
    stages: int = 2
    """Row groups in the ring in shared memory, or 0: straight to registers. ``vectors=False`` has none. A stage takes
    12 KB a row at H = 5376: 4 rows in 2 stages are more than the 99 KB of a CTA on sm_89 and sm_120."""
    sms: int = 132

    def __post_init__(self):
        if self.hidden < 1 or self.hidden % contract.HIDDEN_MULTIPLE:
            raise ValueError(f"hidden must be a positive multiple of {contract.HIDDEN_MULTIPLE}; it is {self.hidden}")
        if self.index_bits not in (32, 64):
            raise ValueError(f"index_bits must be 32 or 64; it is {self.index_bits}")
        if self.warps not in (1, 2, 4, 8, 16, 32):
            raise ValueError(f"warps must be a power of two up to 32; it is {self.warps}")
        if not 1 <= self.rows <= self.warps:
            raise ValueError(f"rows must be 1 to warps = {self.warps}; it is {self.rows}")
        if self.stages == 1 or self.stages < 0:
            raise ValueError(f"stages must be 0 or at least 2; it is {self.stages}")

    @property
    def name(self) -> str:
        return f"norm_quant_i{self.index_bits}{'' if self.vectors else '_scalar'}"

    # The shape of a row, in vectors and chunks.

    @property
    def ring(self) -> bool:
        return self.vectors and self.stages > 0

    @property
    def row_vectors(self) -> int:
        return self.hidden // VECTOR

    @property
    def threads(self) -> int:
        return self.warps * LANES

    @property
    def chunks(self) -> int:
        """Vectors of a thread in a row, the last of which some threads lack: 3 at 8 warps and H = 5376."""
        return -(-self.row_vectors // self.threads)

    @property
    def tree_chunks(self) -> int:
        """Chunks of the summation tree: the vectors of a row padded to a power of two, and to one warp at least."""
        return max(LANES, 1 << (self.row_vectors - 1).bit_length()) // LANES

    def owns(self, thread, chunk: int):
        """Whether the thread has this chunk: known to the compiler unless it is the ragged last one."""
        if (chunk + 1) * self.threads <= self.row_vectors:
            return True
        return thread + chunk * self.threads < self.row_vectors

    @property
    def shared_bytes(self) -> int:
        ring = self.stages * self.chunks * self.threads * VECTOR_BYTES if self.ring else 0
        return self.rows * (ring + 4 * (self.threads + self.warps + 3))

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
        arguments = (
            matrix(BFloat16, rows, align),
            vector(BFloat16, self.hidden, align),
            matrix(BFloat16, table_rows, align),
            matrix(BFloat16, table_rows, align),
            vector(index, rows, index.width // 8),
            matrix(Float8E4M3FN, cute.sym_int32(), CODE_BYTES if self.vectors else 1),
            vector(Float32, cute.sym_int32(), 4),
            Float32(contract.EPS),
            cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
        )
        return _launch_of(self), arguments


def _launch_of(op: NormQuant):
    """The host function of one specialization."""

    @cute.jit
    def norm_quant(
        x: cute.Tensor,
        weight: cute.Tensor,
        scale: cute.Tensor,
        shift: cute.Tensor,
        index: cute.Tensor,
        a_q: cute.Tensor,
        s_row: cute.Tensor,
        eps: Float32,
        stream,
    ):
        groups = cute.ceil_div(x.shape[0], op.rows)
        ctas = cutlass.max(cutlass.min(groups, op.sms * op.ctas_per_sm), 1)
        shared = op.ctas_per_sm * (op.shared_bytes + 1024)
        _kernel(op, x, weight, scale, shift, index, a_q, s_row, eps).launch(
            grid=[ctas, 1, 1],
            block=[op.threads, 1, 1],
            min_blocks_per_mp=op.ctas_per_sm,
            # Given, because the compiler would ask a device for its limit otherwise.
            preferred_smem_carveout=min(100, -(-100 * shared // SMEM_PER_SM)),
            stream=stream,
        )

    return norm_quant


@cute.kernel
def _kernel(
    op: cutlass.Constexpr,
    x: cute.Tensor,
    weight: cute.Tensor,
    scale: cute.Tensor,
    shift: cute.Tensor,
    index: cute.Tensor,
    a_q: cute.Tensor,
    s_row: cute.Tensor,
    eps: Float32,
):
    thread = cute.arch.thread_idx()[0]
    first, step = cute.arch.block_idx()[0] * op.rows, cute.arch.grid_dim()[0] * op.rows
    rows, table_rows = x.shape[0], scale.shape[0]

    smem = SmemAllocator()
    ring = None
    if const_expr(op.ring):
        ring_layout = cute.make_layout((WORDS, op.threads, op.chunks, op.rows, op.stages))
        ring = smem.allocate_tensor(Uint32, ring_layout, byte_alignment=VECTOR_BYTES)
    sums = smem.allocate_tensor(Float32, cute.make_layout((LANES, op.warps, op.rows)), byte_alignment=16)
    peaks = smem.allocate_tensor(Uint32, cute.make_layout((op.warps, op.rows)), byte_alignment=16)
    shared_rstd = smem.allocate_tensor(Float32, cute.make_layout(op.rows), byte_alignment=16)
    shared_divisor = smem.allocate_tensor(Float32, cute.make_layout((2, op.rows)), byte_alignment=16)

    words = cute.make_rmem_tensor((WORDS, op.chunks, op.rows), Uint32)  # x, then a, as BF16 pairs
    rstd = cute.make_rmem_tensor(op.rows, Float32)
    divisor = cute.make_rmem_tensor((2, op.rows), Float32)
    table_row = cute.make_rmem_tensor(op.rows, Int32)
    next_index = cute.make_rmem_tensor(op.rows, index.element_type)

    if const_expr(op.ring):
        for ahead in cutlass.range_constexpr(op.stages - 1):
            prefetch_rows(op, x, first + ahead * step, rows, thread, ring, ahead)
    load_index(op, index, first, rows, next_index)
    slot = Int32(0)

    for group in cutlass.range(first, rows, step, unroll=1):
        for b in cutlass.range_constexpr(op.rows):
            table_row[b] = Int32(OUTSIDE)
            if (next_index[b] >= 0) & (next_index[b] < table_rows):
                table_row[b] = Int32(next_index[b])
        load_index(op, index, group + step, rows, next_index)

        if const_expr(op.ring):
            behind = slot - 1
            if slot == 0:
                behind = Int32(op.stages - 1)
            prefetch_rows(op, x, group + (op.stages - 1) * step, rows, thread, ring, behind)
            cute.arch.cp_async_wait_group(op.stages - 1)
        for b in cutlass.range_constexpr(op.rows):
            take_row(op, x, group + b, rows, thread, ring, slot, b, words[None, None, b])
        slot += 1
        if slot == op.stages:
            slot = Int32(0)

        sum_and_rstd(op, words, eps, thread, sums, shared_rstd, rstd)
        modulate(op, weight, scale, shift, table_row, thread, rstd, words)
        amax_and_scale(op, words, table_row, group, rows, thread, peaks, shared_divisor, divisor, s_row)
        for b in cutlass.range_constexpr(op.rows):
            if group + b < rows:
                quantize(op, words[None, None, b], divisor[None, b], table_row[b], a_q, group + b, thread)


# Memory.


def address_of(tensor: cute.Tensor, row, thread):
    """The address of a thread's first vector in a row of a matrix, or in a vector of numbers (row 0)."""
    offset = Int64(thread) * VECTOR
    if cute.rank(tensor) == 2:
        offset += Int64(row) * Int64(tensor.stride[0])
    return tensor.iterator.toint() + offset * (tensor.element_type.width // 8)


def vector_at(op: NormQuant, address, j: int, size: int, dtype, single):
    """Vector ``j`` of the thread, ``size`` bytes: numbers of ``dtype``, aligned as a whole, or of type ``single``."""
    dtype = dtype if op.vectors else single
    align = size if op.vectors else dtype.width // 8
    pointer = cute.make_ptr(dtype, address + j * op.threads * size, cute.AddressSpace.gmem, assumed_align=align)
    return cute.make_tensor(pointer, size * 8 // dtype.width)


@cute.jit
def load_vector(op: cutlass.Constexpr, address, j: cutlass.Constexpr, words: cute.Tensor):
    source = vector_at(op, address, j, VECTOR_BYTES, Uint32, Uint16)
    cute.autovec_copy(source, cute.recast_tensor(words, source.element_type))


@cute.jit
def store_codes(op: cutlass.Constexpr, codes: cute.Tensor, address, j: cutlass.Constexpr):
    target = vector_at(op, address, j, CODE_BYTES, Uint32, Uint8)
    cute.autovec_copy(cute.recast_tensor(codes, target.element_type), target)


@cute.jit
def prefetch_rows(op: cutlass.Constexpr, x: cute.Tensor, group, rows, thread, ring: cute.Tensor, slot):
    """Start this thread's copies of a group of rows into the ring; rows past the last are left out."""
    atom = cute.make_copy_atom(
        cpasync.CopyG2SOp(cache_mode=cute.nvgpu.LoadCacheMode.GLOBAL), Uint32, num_bits_per_copy=VECTOR_BYTES * 8
    )
    for b in cutlass.range_constexpr(op.rows):
        if group + b < rows:
            address = address_of(x, group + b, thread)
            for j in cutlass.range_constexpr(op.chunks):
                if op.owns(thread, j):
                    source = vector_at(op, address, j, VECTOR_BYTES, Uint32, Uint16)
                    cute.copy(atom, source, ring[None, thread, j, b, slot])
    cute.arch.cp_async_commit_group()


@cute.jit
def take_row(op: cutlass.Constexpr, x, row, rows, thread, ring, slot, b: cutlass.Constexpr, words: cute.Tensor):
    """This thread's vectors of a row, from the ring or straight from global memory.

    Zeros where it has none: written for each row, or the compiler keeps the last row alive there.
    """
    for j in cutlass.range_constexpr(op.chunks):
        words[None, j].fill(0)
        if op.owns(thread, j):
            if const_expr(op.ring):
                cute.autovec_copy(ring[None, thread, j, b, slot], words[None, j])
            elif row < rows:
                load_vector(op, address_of(x, row, thread), j, words[None, j])


@cute.jit
def load_index(op: cutlass.Constexpr, index: cute.Tensor, group, rows, into: cute.Tensor):
    for b in cutlass.range_constexpr(op.rows):
        into[b] = index.element_type(OUTSIDE)
        if group + b < rows:
            into[b] = index[group + b]


@cute.jit
def load_tables(op: cutlass.Constexpr, weight, scale, shift, row, thread, j: cutlass.Constexpr, tables: cute.Tensor):
    """The weight, 1 + scale and shift of a vector, as FP32."""
    pairs = cute.make_rmem_tensor((WORDS, 3), Uint32)
    load_vector(op, address_of(weight, 0, thread), j, pairs[None, 0])
    load_vector(op, address_of(scale, row, thread), j, pairs[None, 1])
    load_vector(op, address_of(shift, row, thread), j, pairs[None, 2])
    for k in cutlass.range_constexpr(WORDS):
        pairs[k, 1] = scale_plus_one(pairs[k, 1])
        for t in cutlass.range_constexpr(3):
            low, high = halves(pairs[k, t])
            tables[2 * k, t] = low
            tables[2 * k + 1, t] = high


# Steps 1 and 2: the sum of squares and rstd.


@cute.jit
def sum_and_rstd(op: cutlass.Constexpr, words, eps, thread, sums, shared_rstd, rstd: cute.Tensor):
    lane, warp = thread % LANES, thread // LANES
    for b in cutlass.range_constexpr(op.rows):
        sums[lane, warp, b] = tree_sum([sum_of_squares(words[None, j, b]) for j in range(op.chunks)])
    cute.arch.barrier()
    if const_expr(op.rows == 1):
        rstd[0] = reciprocal_rms(op, sum_over_row(op, 0, lane, sums), eps)
    else:
        if warp < op.rows:
            shared_rstd[warp] = reciprocal_rms(op, sum_over_row(op, warp, lane, sums), eps)
        cute.arch.barrier()
        cute.autovec_copy(shared_rstd, rstd)


def sum_of_squares(words: cute.Tensor):
    """Within a vector. The square of a BF16 is exact in FP32, so the first fma, from 0, is a product."""
    x = unpack(words)
    p = x[0] * x[0]
    for v in x[1:]:
        p = fma(v, v, p)
    return p


def tree_sum(values: list):
    """Halving tree over a list padded with +0 to a power of two; adding +0 to a sum of squares changes nothing."""
    width = 1 << (len(values) - 1).bit_length()
    values = values + [None] * (width - len(values))
    while width > 1:
        width //= 2
        values = [a if b is None else a + b for a, b in zip(values[:width], values[width:], strict=True)]
    return values[0]


def sum_over_row(op: NormQuant, b, lane, sums: cute.Tensor):
    """Above the threads, by one warp: over the warps, then over the lanes."""
    p = tree_sum([sums[lane, w, b] for w in range(min(op.warps, op.tree_chunks))])
    for offset in (16, 8, 4, 2, 1):
        p += cute.arch.shuffle_sync_bfly(p, offset)
    return p


def reciprocal_rms(op: NormQuant, ss, eps):
    return divide(Float32(1.0), square_root(divide(ss, Float32(op.hidden)) + eps))


# Steps 3 to 5: x becomes a.


@cute.jit
def modulate(op: cutlass.Constexpr, weight, scale, shift, table_row, thread, rstd, words: cute.Tensor):
    """The tables are read again only where the index changes within the group."""
    tables = cute.make_rmem_tensor((VECTOR, 3), Float32)
    tables.fill(0.0)
    for j in cutlass.range_constexpr(op.chunks):
        if op.owns(thread, j):
            for b in cutlass.range_constexpr(op.rows):
                if b == 0 or table_row[b] != table_row[b - 1]:
                    row = cutlass.max(table_row[b], 0)
                    load_tables(op, weight, scale, shift, row, thread, j, tables)
                for k in cutlass.range_constexpr(WORDS):
                    words[k, j, b] = modulate_pair(words[k, j, b], rstd[b], tables, k)


def modulate_pair(pair, rstd, tables: cute.Tensor, k: int):
    low, high = 2 * k, 2 * k + 1
    x = halves(opaque(pair))
    n = halves(bf16x2(rms_norm(x[0], rstd, tables[low, 0]), rms_norm(x[1], rstd, tables[high, 0])))
    return bf16x2(fma(n[0], tables[low, 1], tables[low, 2]), fma(n[1], tables[high, 1], tables[high, 2]))


def rms_norm(x, rstd, weight):
    """Step 3 before its rounding to BF16."""
    return x * rstd * weight


def scale_plus_one(pair):
    """Step 4: 1 + scale in one rounding. FP32 has more than 2 * 8 + 2 bits, so that rounding a sum of two BF16 to it
    first, as the contract does, changes nothing."""
    one = Uint32(0x3F803F80)
    return fma_bf16x2(pair, one, one)


# Step 7: s_row.


@cute.jit
def amax_and_scale(
    op: cutlass.Constexpr, words, table_row, group, rows, thread, peaks, shared_divisor, divisor: cute.Tensor, s_row
):
    """amax is 0 where the index is outside the tables. Non-negative BF16 order as their bits do."""
    lane, warp = thread % LANES, thread // LANES
    for b in cutlass.range_constexpr(op.rows):
        pair = Uint32(0)
        for j in cutlass.range_constexpr(op.chunks):
            for k in cutlass.range_constexpr(WORDS):
                pair = max_magnitude(pair, words[k, j, b])
        bits = warp_max(cutlass.max(pair & 0xFFFF, pair >> 16))
        if table_row[b] == OUTSIDE:
            bits = Uint32(0)
        peaks[warp, b] = bits
    cute.arch.barrier()
    if const_expr(op.rows == 1):
        s = row_scale(warp_max(peaks[lane % op.warps, 0]))
        divisor[0, 0], divisor[1, 0] = divisor_of(s)
        if thread == 0:
            s_row[group] = s
    else:
        if warp < op.rows:
            s = row_scale(warp_max(peaks[lane % op.warps, warp]))
            finite, y = divisor_of(s)
            shared_divisor[0, warp] = finite
            shared_divisor[1, warp] = y
            if (lane == 0) & (group + warp < rows):
                s_row[group + warp] = s
        cute.arch.barrier()
        cute.autovec_copy(shared_divisor, divisor)


def warp_max(bits):
    return cute.arch.warp_redux_sync(bits, "umax")


def row_scale(amax_bits):
    amax = (amax_bits << 16).bitcast(Float32)
    return divide(cute.arch.fmax(amax, Float32(contract.AMAX_FLOOR)), Float32(contract.E4M3_MAX))


def divisor_of(s):
    """(s, RN(1 / s)) for ``quotient``.

    s = Inf (amax = Inf) becomes 0: with y = 0, too, a finite a gives a zero of its sign and Inf gives NaN, as a / Inf.
    """
    return cutlass.select_(s < Float32.inf, s, Float32(0.0)), divide(Float32(1.0), s)


# Steps 6 and 8: the codes.


@cute.jit
def quantize(op: cutlass.Constexpr, words: cute.Tensor, divisor, table_row, a_q: cute.Tensor, row, thread):
    """A thread's vectors of a row; codes of +0 where the index is outside the tables."""
    keep = Uint32(0xFFFFFFFF)
    if table_row == OUTSIDE:
        keep = Uint32(0)
    address = address_of(a_q, row, thread)
    for j in cutlass.range_constexpr(op.chunks):
        # Only the store is conditional: the compiler predicates rather than branches, and spilled what it predicated.
        q = [quotient(a, divisor[0], divisor[1]) for a in unpack(words[None, j])]
        codes = cute.make_rmem_tensor(2, Uint32)
        codes[0] = e4m3x4(*q[:4]) & keep
        codes[1] = e4m3x4(*q[4:]) & keep
        if op.owns(thread, j):
            store_codes(op, codes, address, j)


def quotient(a, s, y):
    """RN(a / s) as far as its E4M3 code goes, with y = RN(1 / s).

    Checked for every BF16 a and every mantissa of amax (tests/backends/cute/test_norm_quant.py). The exponent of amax
    does not matter: s is 2e-15 to 8e35, so y is normal; where |a / s| >= 2^-11 the residual is a multiple of 2^-106 and
    exact; below that the code is a zero whatever the residual's rounding.
    Where a is +-0 or a * y underflows, the result must keep the sign of a. q0 has it, and so has the sum, because the
    residual is taken as s * q0 - a and subtracted: a - s * q0 of a = -0 is +0 and would turn the result into +0.
    """
    q0 = a * y
    return fma(-fma(s, q0, -a), y, q0)


# Instructions.


def fma(a, b, c):
    return cute.math.fma(a, b, c)


def divide(a, b):
    return Float32(asm(T.f32(), (a, b), "div.rn.f32 $0, $1, $2;", "=f,f,f"))


def square_root(a):
    return Float32(asm(T.f32(), (a,), "sqrt.rn.f32 $0, $1;", "=f,f"))


def opaque(word):
    """The same word, unknown to the compiler, which otherwise keeps the FP32 halves of step 1 alive: 8 registers a
    vector instead of 4, and spills."""
    return Uint32(asm(T.i32(), (word,), "", "=r,0"))


def unpack(words: cute.Tensor) -> list:
    return [v for k in range(WORDS) for v in halves(words[k])]


def max_magnitude(peak, pair):
    """max(peak, |pair|) of two BF16; a NaN in ``pair`` loses."""
    text = "{.reg .b32 m; abs.bf16x2 m, $2; max.bf16x2 $0, $1, m;}"
    return Uint32(asm(T.i32(), (peak, pair), text, "=r,r,r"))


def e4m3x4(a, b, c, d):
    """Four E4M3 codes, a in the lowest byte: round to nearest even, saturating, NaN to 0x7F."""
    text = (
        "{.reg .b16 lo, hi; cvt.rn.satfinite.e4m3x2.f32 lo, $2, $1; "
        "cvt.rn.satfinite.e4m3x2.f32 hi, $4, $3; mov.b32 $0, {lo, hi};}"
    )
    return Uint32(asm(T.i32(), (a, b, c, d), text, "=r,f,f,f,f"))
