"""Stage 1 without a GPU: its shared memory and its machine code."""

import pytest

from h3mlp import contract

pytest.importorskip("cutlass", reason="the CuTe DSL is not installed")

from h3mlp.backends.cute import jit
from h3mlp.backends.cute.norm_quant import NormQuant
from h3mlp.backends.cute.sass import SHARED_LIMIT


def test_the_ring_fits_in_the_shared_memory_of_every_architecture():
    rings = {}
    for hidden in range(128, 65536 + 1, 128):
        op = NormQuant(hidden)
        assert op.own * op.threads >= op.row_vectors, hidden
        if op.ring:
            assert op.ring % 4 == 0, hidden
            assert op.shared_bytes <= SHARED_LIMIT, hidden
        rings[hidden] = op.ring
    assert rings[128] == rings[contract.HIDDEN] == 8
    assert rings[8192] == 4
    assert rings[65536] == 0
    assert NormQuant(contract.HIDDEN, vectors=False).ring == 0


@pytest.mark.parametrize("arch", ["sm_89", "sm_90a", "sm_120a"])
@pytest.mark.parametrize(
    "fields",
    [{}, {"vectors": False}, {"stages": 4}, {"modulation": "eager"}, {"modulation": None, "index_bits": 0}],
    ids=["default", "scalars", "ring of 4", "eager", "plain"],
)
def test_machine_code(arch, fields):
    kernel = NormQuant(contract.HIDDEN, **{"index_bits": 64, **fields})
    report = jit.inspect(kernel, arch)
    assert not report.spills
    assert report.shared_bytes == kernel.shared_bytes


@pytest.mark.parametrize(
    ("fields", "wrong"), [({"hidden": 100}, "hidden"), ({"index_bits": 16}, "index_bits"), ({"warps": 31}, "warps"),
                          ({"warps": 0}, "warps"), ({"stages": -4}, "stages"), ({"stages": 6}, "stages"),
                          ({"modulation": None}, "index_bits"), ({"modulation": "plain"}, "modulation"),
                          ({"index_bits": 0}, "index_bits")],
)  # fmt: skip
def test_refused(fields, wrong):
    with pytest.raises(ValueError, match=wrong):
        NormQuant(**{"hidden": 384, **fields})
