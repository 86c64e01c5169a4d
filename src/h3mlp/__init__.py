"""Fused FP8 operators for the MLP of the MiniMax-H3 video diffusion transformer."""

from . import contract, reference
from ._version import __version__
from .checkpoint.prepared import load_fc1
from .module import FC1SwiGLU
from .operators.fc1_swiglu import fc1_swiglu_fp8, minimax_h3_fc1_swiglu_fp8
from .operators.mlp import minimax_h3_mlp_fp8, mlp_fp8
from .tools.warmup import warmup
from .weights import (
    PackedFC1,
    PackedMLP,
    pack_fc1_rows,
    prepare_fc1_weight_fp8,
    prepare_fc2_weight_fp8,
    prepare_minimax_h3_fc1_weight_fp8,
    prepare_minimax_h3_fc2_weight_fp8,
    unpack_fc1_rows,
)

__all__ = [
    "FC1SwiGLU",
    "PackedFC1",
    "PackedMLP",
    "__version__",
    "contract",
    "fc1_swiglu_fp8",
    "load_fc1",
    "minimax_h3_fc1_swiglu_fp8",
    "minimax_h3_mlp_fp8",
    "mlp_fp8",
    "pack_fc1_rows",
    "prepare_fc1_weight_fp8",
    "prepare_fc2_weight_fp8",
    "prepare_minimax_h3_fc1_weight_fp8",
    "prepare_minimax_h3_fc2_weight_fp8",
    "reference",
    "unpack_fc1_rows",
    "warmup",
]
