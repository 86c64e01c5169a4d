"""What is timed for FC1: the operator, and what a user would run in its place."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch
import torch.nn.functional as F

from ... import contract, reference, synthetic
from ...backends import reference_stage1
from ...backends.chain import scaled_mm
from ...operators.fc1_swiglu import allocate, fc1_swiglu_fp8
from ...weights import prepare_fc1_weight_fp8, unpack_fc1_rows
from . import work
from .error import Error, error_of

OURS = "h3mlp"
OURS_FAST = "h3mlp, fast"
GEMM = "bare GEMM, fast"
GEMM_FP32 = "bare GEMM, FP32"
CHAIN = "chain, compiled"
CHAIN_EAGER = "chain, eager"
BF16 = "BF16"
STAGE1 = "h3mlp stage 1"
CHAIN_STAGE1 = "chain stage 1"

STAGE1_ROWS = 4096
"""Rows of the reference's stage 1 at a time: 176 MB in FP64."""

Compile = Callable[[Callable], Callable]
NormQuant = Callable[[contract.FC1Inputs, float, torch.Tensor, torch.Tensor], None]
"""Stage 1 alone: from inputs and eps into a_q and s_row."""

Judge = Callable[[str, torch.Tensor], Error]
"""How far some rows of an output, of this name, are from what they should be."""


@dataclass(frozen=True)
class Peer:
    """One line of the benchmark.

    Attributes:
        name: what tables and plots call it.
        what: what it is, in a line.
        work: operations and bytes of a call.
        call: makes one call and returns its output.
        output: which of the reference's values the output stands for; None where it is another one.
    """

    name: str
    what: str
    work: work.Work
    call: Callable[[], torch.Tensor]
    output: str | None


@dataclass(frozen=True)
class Problem:
    """One number of rows: a batch, its packed weight, and the same weight with all gate rows before all up rows."""

    layer: synthetic.Layer
    packed: tuple[torch.Tensor, torch.Tensor]
    natural: tuple[torch.Tensor, torch.Tensor]

    @classmethod
    def make(cls, rows: int, hidden: int, ffn: int, seed: int, device: torch.device) -> "Problem":
        layer = synthetic.layer(rows, hidden, ffn, seed=seed).to(device)
        packed = prepare_fc1_weight_fp8(layer.weight)
        return cls(layer, packed, tuple(unpack_fc1_rows(part) for part in packed))

    def first(self, rows: int, runs: bool) -> "Problem":
        """The first rows of the batch; their indices in runs, as a model's are, or as they are."""
        layer = self.layer.rows(torch.arange(rows, dtype=torch.long, device=self.layer.x.device))
        return replace(self, layer=layer.with_runs() if runs else layer)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Rows, H and F."""
        return *self.layer.x.shape, self.layer.weight.shape[0] // 2

    @property
    def device(self) -> torch.device:
        return self.layer.x.device

    @cached_property
    def inputs(self) -> contract.FC1Inputs:
        return contract.FC1Inputs(*self.layer.activations, *self.packed)

    @cached_property
    def buffers(self) -> contract.FC1Buffers:
        return allocate(self.inputs)

    @cached_property
    def quantized(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The reference's codes and scales of x: what the bare GEMM reads."""
        x = self.layer.x
        a_q, s_row = x.new_empty(x.shape, dtype=contract.QUANTIZED), x.new_empty(len(x), dtype=contract.SCALE)
        reference_stage1(self.inputs, contract.EPS, a_q, s_row, "fused", STAGE1_ROWS)
        return a_q, s_row

    def judge(self, sample: torch.Tensor) -> Judge:
        """Against the reference on these rows."""
        sampled = (*self.layer.rows(sample).activations, *self.packed)
        exact = vars(reference.fc1_swiglu_fp8(*sampled, return_intermediates=True))
        return lambda output, got: error_of(got, exact[output])


def norm_adaln_quant(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor, index: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Stage 1 as a user writes it: RMSNorm in FP32, AdaLN in BF16, one FP8 scale a row. Codes [M, H], scales [M, 1]."""
    x32 = x.float()
    n = (x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + contract.EPS) * weight.float()).to(x.dtype)
    return quantize(n * (1 + scale[index]) + shift[index])


def quantize(a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One FP8 scale a row: codes [M, N], scales [M, 1]."""
    s_row = a.abs().amax(-1, keepdim=True).float().clamp(min=contract.AMAX_FLOOR) / contract.E4M3_MAX
    codes = (a.float() / s_row).clamp(-contract.E4M3_MAX, contract.E4M3_MAX).to(contract.QUANTIZED)
    return codes, s_row


def silu_mul(h: torch.Tensor) -> torch.Tensor:
    """SwiGLU on [M, 2F], gate columns first."""
    gate, up = h.chunk(2, dim=-1)
    return F.silu(gate) * up


def on_cuda(
    problem: Problem, norm_quant: NormQuant | None = None, bf16: bool = False, compiled: Compile | None = None
) -> list[Peer]:
    """The peers on a CUDA device. ``compiled`` is ``torch.compile`` for exactly these shapes unless given."""
    compiled = compiled or partial(torch.compile, dynamic=False)
    layer, shape = problem.layer, problem.shape
    operator, gemm = work.operator(*shape), work.gemm(*shape)
    w_q, w_scale = problem.natural

    def bare(fast: bool) -> torch.Tensor:
        a_q, s_row = problem.quantized
        return scaled_mm(a_q, w_q, s_row, w_scale, fast)

    def chain(first: Callable, last: Callable) -> torch.Tensor:
        a_q, s_row = first(*layer.activations)
        return last(scaled_mm(a_q, w_q, s_row[:, 0], w_scale, fast=True))

    first, last = compiled(norm_adaln_quant), compiled(silu_mul)
    eager = partial(chain, norm_adaln_quant, silu_mul)
    peers = [
        ours(problem),
        Peer(OURS_FAST, 'the operator, accumulate="fast"', operator, _call(problem, accumulate="fast"), "y"),
        Peer(GEMM, "torch's scaled_mm, a scale a row, use_fast_accum=True", gemm, partial(bare, True), "h"),
        Peer(GEMM_FP32, "torch's scaled_mm, a scale a row, use_fast_accum=False", gemm, partial(bare, False), "h"),
        Peer(CHAIN, "torch.compile, the fast GEMM, torch.compile", operator, partial(chain, first, last), "y"),
        Peer(CHAIN_EAGER, "the same chain, not compiled", operator, eager, "y"),
        *_stage1(problem, norm_quant),
        Peer(
            CHAIN_STAGE1,
            "torch.compile(RMSNorm + AdaLN + quantization) alone",
            work.norm_quant(*shape[:2]),
            lambda: first(*layer.activations)[0],
            "a_q",
        ),
    ]
    if bf16:
        weight = partial(F.linear, layer.x, layer.weight)
        peers.append(Peer(BF16, "the bare GEMM in BF16", work.gemm_bf16(*shape), weight, None))
    return peers


def on_cpu(problem: Problem, norm_quant: NormQuant | None = None, bf16: bool = False) -> list[Peer]:
    """The peers on the CPU, where torch has no fast FP8 GEMM: the eager chain dequantizes and multiplies in FP32."""
    layer, shape = problem.layer, problem.shape
    w_q, w_scale = problem.natural

    def chain() -> torch.Tensor:
        stage1 = reference.norm_quant(*layer.activations)
        acc = stage1.a_q.float() @ w_q.float().T
        return silu_mul(reference.dequantize(acc, stage1.s_row, w_scale))

    what = "plain torch: stage 1, dequantize, matmul in FP32, silu * up"
    peers = [ours(problem), Peer(CHAIN_EAGER, what, work.operator(*shape), chain, "y"), *_stage1(problem, norm_quant)]
    if bf16:
        what = "the BF16 layer that the operator replaces"
        peers.append(Peer(BF16, what, work.gemm_bf16(*shape), layer.forward_bf16, None))
    return peers


def ours(problem: Problem) -> Peer:
    """The operator itself, as it is called by default."""
    return Peer(OURS, "the operator, into buffers", work.operator(*problem.shape), _call(problem), "y")


def _call(problem: Problem, **options: str) -> Callable[[], torch.Tensor]:
    return lambda: fc1_swiglu_fp8(*problem.inputs, **problem.buffers._asdict(), **options)


def _stage1(problem: Problem, norm_quant: NormQuant | None) -> list[Peer]:
    """Stage 1 alone, where the backend tells how."""
    if norm_quant is None:
        return []
    _, a_q, s_row = problem.buffers

    def call() -> torch.Tensor:
        norm_quant(problem.inputs, contract.EPS, a_q, s_row)
        return a_q

    what = "RMSNorm + AdaLN + quantization alone"
    return [Peer(STAGE1, what, work.norm_quant(*problem.shape[:2]), call, "a_q")]


def stage1_of(backend: object) -> NormQuant | None:
    """The function of a backend module that is stage 1 alone, where it has one."""
    return getattr(backend, "stage1", None)
