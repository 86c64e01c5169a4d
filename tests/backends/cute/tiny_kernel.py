"""A kernel that compiles in 0.03 s: a block of threads reverses pairs through shared memory and adds a constant."""

from dataclasses import dataclass

import cutlass
from cutlass import cute
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream


@dataclass(frozen=True)
class Tiny:
    """``registers`` values a thread are kept across a barrier: 100 do not fit into the 64 registers of 1024 threads."""

    threads: int = 128
    add: float = 1.0
    registers: int = 1
    broken: bool = False

    @property
    def name(self) -> str:
        return f"tiny_{self.threads}"

    def trace(self):
        x = make_fake_compact_tensor(cutlass.Float32, (cute.sym_int32(divisibility=4),))
        return self.launch, (x, make_fake_stream(use_tvm_ffi_env_stream=True))

    @cute.jit
    def launch(self, x: cute.Tensor, stream):
        self.kernel(x).launch(grid=(1, 1, 1), block=(self.threads, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, x: cute.Tensor):
        if cutlass.const_expr(self.broken):
            cute.arch.no_such_instruction()
        thread, _, _ = cute.arch.thread_idx()
        kept = cute.make_rmem_tensor(self.registers, cutlass.Float32)
        for i in cutlass.range_constexpr(self.registers):
            kept[i] = x[thread + i * self.threads]
        shared = cutlass.memory.SmemAllocator().allocate_tensor(cutlass.Float32, cute.make_layout(self.threads), 16)
        shared[thread] = kept[0]
        cute.arch.sync_threads()
        for i in cutlass.range_constexpr(self.registers):
            x[thread + i * self.threads] = kept[i] * kept[(i + 1) % self.registers] + shared[thread ^ 1] + self.add
