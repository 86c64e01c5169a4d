"""Vectors of 8 elements in global memory, one a thread: by a single access where they are aligned, else one by one."""

import cutlass
import cutlass.cute as cute
from cutlass import Int64, Uint16, Uint32

from .prologue import VECTOR

VECTOR_BYTES = 2 * VECTOR
CODE_BYTES = VECTOR
"""As BF16 and as E4M3."""


def address_of(tensor: cute.Tensor, row, thread):
    """The address of a thread's first vector in a row of a matrix, or in a vector of numbers (row 0)."""
    address = tensor.iterator.toint() + Int64(thread) * (VECTOR * tensor.element_type.width // 8)
    if cute.rank(tensor) == 2:
        address += Int64(row) * row_bytes(tensor)
    return address


def row_bytes(matrix: cute.Tensor):
    return Int64(matrix.stride[0]) * (matrix.element_type.width // 8)


def vector_at(address, size: int, single=None):
    """A vector of ``size`` bytes as words of 32 bits, aligned as a whole; or, if given, as numbers of type ``single``,
    each aligned on its own."""
    dtype = single or Uint32
    align = dtype.width // 8 if single else size
    pointer = cute.make_ptr(dtype, address, cute.AddressSpace.gmem, assumed_align=align)
    return cute.make_tensor(pointer, size * 8 // dtype.width)


@cute.jit
def load_vector(aligned: cutlass.Constexpr, address, words: cute.Tensor):
    """8 BF16 to four pairs."""
    source = vector_at(address, VECTOR_BYTES, None if aligned else Uint16)
    cute.autovec_copy(source, cute.recast_tensor(words, source.element_type))
