"""What is timed for the whole half: the operator, and what a user would run in its place."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch
import torch.nn.functional as F

from ... import contract, reference, synthetic
from ...accuracy import mlp_outside
from ...backends.chain import scaled_mm
from ...operators.fc1_swiglu import fc1_swiglu_fp8
from ...operators.mlp import mlp_fp8
from ...weights import PackedMLP, unpack_fc1_rows
from . import work
from .error import error_of
from .peers import (
    BF16,
    CHAIN,
    CHAIN_EAGER,
    GEMM,
    GEMM_FP32,
    OURS,
    OURS_FAST,
    Compile,
    Judge,
    NormQuant,
    Peer,
    norm_adaln_quant,
    quantize,
    silu_mul,
)

CHAIN_FP32 = "chain, FP32"
FC1_CHAIN = "h3mlp FC1 + chain"


@dataclass(frozen=True)
class Problem:
    """One number of rows: a batch, its prepared weights, and FC1's with all gate rows before all up rows."""

    mlp: synthetic.MLP
    packed: PackedMLP
    natural: tuple[torch.Tensor, torch.Tensor]

    @classmethod
    def make(cls, rows: int, hidden: int, ffn: int, seed: int, device: torch.device) -> "Problem":
        mlp = synthetic.mlp(rows, hidden, ffn, seed=seed).to(device)
        packed = PackedMLP.from_bf16(mlp.fc1.weight, mlp.fc2_weight)
        return cls(mlp, packed, tuple(unpack_fc1_rows(part) for part in packed.fc1))

    def first(self, rows: int, runs: bool) -> "Problem":
        """The first rows of the batch; their indices in runs, as a model's are, or as they are."""
        mlp = self.mlp.rows(torch.arange(rows, dtype=torch.long, device=self.device))
        return replace(self, mlp=replace(mlp, fc1=mlp.fc1.with_runs()) if runs else mlp)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Rows, H and F."""
        return *self.mlp.fc1.x.shape, self.packed.fc2_weight.shape[1]

    @property
    def device(self) -> torch.device:
        return self.mlp.fc1.x.device

    @cached_property
    def inputs(self) -> contract.MLPInputs:
        return contract.MLPInputs(*self.mlp.activations, *self.packed)

    @cached_property
    def out(self) -> torch.Tensor:
        return torch.empty_like(self.inputs.x)

    @cached_property
    def codes(self) -> contract.MLPBuffers:
        """All that the operator writes: what the bare GEMMs read."""
        rows, hidden, ffn = self.shape
        kinds = contract.mlp_buffer_rows(hidden, ffn).items()
        buffers = {name: self.out.new_empty((rows, *row), dtype=dtype) for name, (dtype, row) in kinds}
        mlp_fp8(*self.inputs, **buffers)
        return contract.MLPBuffers(**buffers)

    def judge(self, sample: torch.Tensor) -> Judge:
        """Against exact products of the codes of y that the operator writes for these rows, by the rule of the public
        test of the specified MLP. (From x on, a y that is off by a step and its row's largest changes all codes of its
        row.)"""
        some = replace(self, mlp=self.mlp.rows(sample))
        read, written = some.inputs, some.codes
        acc = reference.accumulate(written.workspace_y_q, read.fc2_weight_q)
        o = reference.dequantize(acc, written.workspace_y_scale, read.fc2_weight_scale)
        out = read.gate, read.residual, read.adaln_index
        exact = reference.gated_residual(o, *out)
        return lambda _, got: error_of(got, exact, mlp_outside(got, o, *out).sum().item())


def gated_residual(o: torch.Tensor, gate: torch.Tensor, residual: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Step 16 as a user writes it."""
    return residual + gate[index] * o


def silu_mul_quant(h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """SwiGLU on [M, 2F], gate columns first, to codes [M, F] and scales [M, 1]."""
    return quantize(silu_mul(h))


def on_cuda(
    problem: Problem, _norm_quant: NormQuant | None = None, bf16: bool = False, compiled: Compile | None = None
) -> list[Peer]:
    """The peers on a CUDA device. ``compiled`` is ``torch.compile`` for exactly these shapes unless given."""
    compiled = compiled or partial(torch.compile, dynamic=False)
    shape, read = problem.shape, problem.inputs
    operator, gemms = work.mlp(*shape), work.mlp_gemms(*shape)
    w1, w2 = problem.natural, (read.fc2_weight_q, read.fc2_weight_scale)
    tables = read.gate, read.residual, read.adaln_index

    def multiply(codes: tuple[torch.Tensor, torch.Tensor], weight: tuple, fast: bool) -> torch.Tensor:
        return scaled_mm(codes[0], weight[0], codes[1].view(-1), weight[1], fast)

    def bare(fast: bool) -> torch.Tensor:
        found = problem.codes
        multiply((found.workspace_a_q, found.workspace_a_scale), w1, fast)
        return multiply((found.workspace_y_q, found.workspace_y_scale), w2, fast)

    def chain(first: Callable, middle: Callable, last: Callable, fast: bool) -> torch.Tensor:
        h = multiply(first(*problem.mlp.fc1.activations), w1, fast)
        return last(multiply(middle(h), w2, fast), *tables)

    def behind_fc1(middle: Callable, last: Callable) -> torch.Tensor:
        y = fc1_swiglu_fp8(*read.fc1)
        return last(multiply(middle(y), w2, True), *tables)

    steps = norm_adaln_quant, silu_mul_quant, gated_residual
    first, middle, last, rest = (compiled(step) for step in (*steps, quantize))
    what = "torch.compile, the GEMM, torch.compile, the GEMM, torch.compile"
    peers = [
        ours(problem),
        Peer(OURS_FAST, 'the operator, accumulate="fast"', operator, _call(problem, accumulate="fast"), "out"),
        Peer(GEMM, "torch's scaled_mm for FC1 and FC2, use_fast_accum=True", gemms, partial(bare, True), None),
        Peer(GEMM_FP32, "the same, use_fast_accum=False", gemms, partial(bare, False), None),
        Peer(CHAIN, what, operator, partial(chain, first, middle, last, True), "out"),
        Peer(CHAIN_FP32, "the same, use_fast_accum=False", operator, partial(chain, first, middle, last, False), "out"),
        Peer(FC1_CHAIN, "FC1's operator, then likewise", operator, partial(behind_fc1, rest, last), "out"),
        Peer(CHAIN_EAGER, "the chain, not compiled", operator, partial(chain, *steps, True), "out"),
    ]
    if bf16:
        half = compiled(_half_bf16)
        weights = problem.mlp.fc1.weight, problem.mlp.fc2_weight
        call = partial(half, *problem.mlp.activations, *weights)
        peers.append(Peer(BF16, "the half in BF16, torch.compile", work.mlp_bf16(*shape), call, None))
    return peers


def on_cpu(problem: Problem, _norm_quant: NormQuant | None = None, bf16: bool = False) -> list[Peer]:
    """The peers on the CPU, where torch has no fast FP8 GEMM."""
    shape = problem.shape

    def chain() -> torch.Tensor:
        return reference.mlp_fp8(*problem.inputs)

    peers = [ours(problem), Peer(CHAIN_EAGER, "the reference: sums in FP64", work.mlp(*shape), chain, "out")]
    if bf16:
        what = "the BF16 half that the operator replaces"
        peers.append(Peer(BF16, what, work.mlp_bf16(*shape), problem.mlp.forward_bf16, None))
    return peers


def ours(problem: Problem) -> Peer:
    """The operator itself, as it is called by default."""
    return Peer(OURS, "the operator, into out", work.mlp(*problem.shape), _call(problem), "out")


def _call(problem: Problem, **options: str) -> Callable[[], torch.Tensor]:
    return lambda: mlp_fp8(*problem.inputs, out=problem.out, **options)


def _half_bf16(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    shift: torch.Tensor,
    index: torch.Tensor,
    gate: torch.Tensor,
    residual: torch.Tensor,
    fc1: torch.Tensor,
    fc2: torch.Tensor,
) -> torch.Tensor:
    a = F.rms_norm(x, x.shape[-1:], weight, contract.EPS) * (1 + scale[index]) + shift[index]
    return gated_residual(F.linear(silu_mul(F.linear(a, fc1)), fc2), gate, residual, index)
