"""Reading a disassembly; that of real kernels is in ``test_jit``."""

import pytest

from h3mlp.backends.cute import sass

LISTING = """
//----- nvinfo : EIATTR_REGCOUNT
        .word   index@(QMMA)
        /*0080*/                   QGMMA.64x128x32.F32.E4M3.E4M3 R88, gdesc[UR20], RZ, !UPT ;
        /*0090*/              @!P0 QGMMA.64x128x32.F32.E4M3.E4M3 R88, gdesc[UR20], R88 ;
        /*00a0*/              @UP1 QMMA.16832.F32.E4M3.E4M3 R4, R8, R12, R4 ;
        /*12340*/                  QMMA.SF.16832.F32.E4M3.E4M3.E8 R4, R8, R12, R4, R2, R3 ;
        /*00c0*/                   HMMA.16816.F32 R4, R8, R12, R4 ;
        /*00d0*/                   HMMA.16816.F32 R4, R8, R12, R4 ;
        /*00e0*/                   IMAD.MOV.U32 R1, RZ, RZ, c[0x0][0x28] ;
        /*00f0*/                   NOP;
"""


def test_count():
    assert sass.count(LISTING) == {"QGMMA": 2, "QMMA": 1, "QMMA.SF": 1, "HMMA": 2}
    assert sass.count("") == dict.fromkeys(sass.TENSOR_CORE, 0)


def test_what_is_not_a_cubin_is_refused():
    try:
        sass.nvdisasm()
    except RuntimeError:
        pytest.skip("no nvdisasm")
    with pytest.raises(RuntimeError, match=r"nvdisasm cannot read the kernel: .*kernel\.cubin"):
        sass.disassemble(b"not a cubin")


def test_no_nvdisasm(monkeypatch):
    monkeypatch.setattr(sass.metadata, "files", lambda _package: None)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(RuntimeError, match="pip install nvidia-cuda-nvdisasm"):
        sass.nvdisasm()
