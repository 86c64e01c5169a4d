"""What a kernel's machine code says: registers, local and shared memory, tensor core instructions."""

import re
import shutil
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

TENSOR_CORE = ("QGMMA", "QMMA", "QMMA.SF", "HMMA")
"""FP8 wgmma, FP8 mma.sync, the same with block scales, FP16 mma.sync: what FP8 mma.sync is emulated with on Hopper."""

SHARED_LIMIT = 99 * 1024
"""Bytes of shared memory that a block may have on every architecture."""

RESERVED_SHARED = 1024
"""From sm_90 on, the system's part of a block's shared memory. The cubin counts it, the limit of 227 KB does not."""

LAUNCH_CONFIG = "!llvm.struct<(array<3 x i32>, array<3 x i32>, i64, ptr, ptr, i32)>"
"""cudaLaunchConfig_t in the DSL's IR: grid, block, dynamic shared bytes, stream, attributes."""


@dataclass(frozen=True)
class Report:
    """What one kernel needs and how it multiplies."""

    kernel: str
    arch: str
    registers: int  # of a thread, at launch: setmaxnreg may move them between warps later
    local_bytes: int  # of a thread: spilled registers, and arrays that are not in registers
    shared_bytes: int  # of a block
    instructions: dict[str, int]
    wgmma_waits: int = 0
    multiplies_with: str | None = None  # what the kernel is written for

    @property
    def spills(self) -> bool:
        """Whether a thread keeps anything in local memory."""
        return self.local_bytes > 0

    @property
    def serialized(self) -> bool:
        """Whether there is a wait behind every wgmma: ptxas puts them in, silently, where it cannot tell that nobody
        touches an accumulator in flight, and the GEMM takes three times as long."""
        return 0 < self.instructions["QGMMA"] <= self.wgmma_waits

    @property
    def fits(self) -> bool:
        """Whether a block may have so much shared memory."""
        return self.shared_bytes <= shared_limit(self.arch)

    @property
    def multiplies_otherwise(self) -> bool:
        """Whether other tensor core instructions are there than what the kernel is written for, or none."""
        found = {name for name, count in self.instructions.items() if count}
        return self.multiplies_with is not None and found != {self.multiplies_with}


def shared_limit(arch: str) -> int:
    """Bytes of shared memory that a block may have, and all blocks of an SM together."""
    return 227 * 1024 if arch == "sm_90a" else SHARED_LIMIT


def report(
    kernel: str, arch: str, cubin: bytes, dynamic_shared_bytes: int, multiplies_with: str | None = None
) -> Report:
    """Read a cubin. Of several kernels in it: the most registers and memory, all instructions.

    Raises:
        RuntimeError: nvdisasm is missing, or cannot read the cubin.
    """
    text = disassemble(cubin)
    static = [
        int(n) for n in re.findall(r"^\s*\.section\s+\.nv\.shared\.(?!reserved).*?\.zero\s+(\d+)", text, re.M | re.S)
    ]
    return Report(
        kernel=kernel,
        arch=arch,
        registers=_attribute(text, "REGCOUNT"),
        local_bytes=_attribute(text, "FRAME_SIZE"),
        shared_bytes=max(0, max(map(int, static), default=0) - RESERVED_SHARED) + dynamic_shared_bytes,
        instructions=count(text),
        wgmma_waits=text.count("WARPGROUP.DEPBAR"),
        multiplies_with=multiplies_with,
    )


def count(text: str) -> dict[str, int]:
    """Tensor core instructions in a disassembly, by name, with the zeros."""
    found = Counter(re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?(QMMA\.SF|[A-Z0-9]+)", text))
    return {name: found[name] for name in TENSOR_CORE}


def disassemble(cubin: bytes) -> str:
    """All sections of the cubin as text.

    Raises:
        RuntimeError: nvdisasm is missing, or cannot read the cubin.
    """
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch, "kernel.cubin")
        file.write_bytes(cubin)
        done = subprocess.run([nvdisasm(), file], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"nvdisasm cannot read the kernel: {done.stderr.strip()}")
    return done.stdout


def nvdisasm() -> Path:
    """The disassembler: of the wheel nvidia-cuda-nvdisasm, else the one on PATH, which may be too old.

    Raises:
        RuntimeError: there is none.
    """
    try:
        for file in metadata.files("nvidia-cuda-nvdisasm") or ():
            if file.name == "nvdisasm":
                return Path(file.locate())
    except metadata.PackageNotFoundError:
        pass
    if found := shutil.which("nvdisasm"):
        return Path(found)
    raise RuntimeError("no nvdisasm, which reads the machine code: pip install nvidia-cuda-nvdisasm")


def launch_shared_bytes(module) -> int:
    """The dynamic shared memory that the host code asks for at launch, the most of several launches; 0 where it is not
    a constant. ``module`` is the compiled function's IR."""
    from cutlass._mlir import ir

    found = [0]

    def visit(operation):
        # The store of a constant into the third field of the launch configuration.
        if (
            operation.name == "llvm.getelementptr"
            and str(operation.attributes["elem_type"]) == LAUNCH_CONFIG
            and list(operation.attributes["rawConstantIndices"]) == [0, 2]
        ):
            for use in operation.results[0].uses:
                value = use.owner.operands[0].owner
                if use.owner.name == "llvm.store" and value.name == "llvm.mlir.constant":
                    found.append(value.attributes["value"].value)
        return ir.WalkResult.ADVANCE

    module.operation.walk(visit)
    return max(found)


def _attribute(text: str, name: str) -> int:
    """The largest value of a numeric attribute that the cubin holds for each kernel."""
    values = re.findall(rf"EIATTR_{name}\n.*?\.word\s+index@.*?\.word\s+0x([0-9a-f]+)", text, re.S)
    if not values:
        raise RuntimeError(f"nvdisasm shows no {name} of the kernel")
    return max(int(value, 16) for value in values)
