"""The chain's blocks, row order and answers, with the reference in the place of torch's ``scaled_mm``, which
``tests/gpu/test_chain.py`` tests."""

import pytest
import torch
from helpers import (
    FFN,
    HIDDEN,
    assert_mlp,
    bits,
    make_inputs,
    make_mlp_inputs,
    mlp_edge_inputs,
    nan_buffers,
    nan_mlp_buffers,
    shifted,
    without_adaln,
)
from torch.profiler import ProfilerActivity, profile

from h3mlp import contract, reference
from h3mlp.backends import chain


@pytest.fixture
def calls(monkeypatch):
    """The GEMMs that were asked for, each computed by the reference."""
    calls = []

    def scaled_mm(a_q, w_q, s_row, w_scale, fast):
        calls.append((a_q.shape[0], fast))
        for t in (a_q, w_q, s_row, w_scale):
            assert t.is_contiguous()
            assert t.data_ptr() % 16 == 0
        return reference.dequantize(reference.accumulate(a_q, w_q), s_row, w_scale)

    monkeypatch.setattr(chain, "scaled_mm", scaled_mm)
    return calls


@pytest.mark.parametrize("block_bytes", [1, 2**16, 2**18, 2**28])
@pytest.mark.parametrize("rows", [1, 15, 300, 513])
def test_every_bit_is_the_references(monkeypatch, calls, rows, block_bytes):
    """Blocks of one row, of 128 and 512 rows (2^16 and 2^18 bytes of 256 BF16 columns), and one of all rows. The
    GEMM is the reference's, and torch's silu and BF16 product round as the contract does: on the CPU y is equal but
    where torch's vectorized exp is not, less than one in 1000 by one BF16 number (2^-7)."""
    monkeypatch.setattr(chain, "BLOCK_BYTES", block_bytes)
    inputs, buffers = make_inputs(rows), nan_buffers(rows)
    chain.fc1_swiglu(inputs, 1e-5, buffers, "fp32")
    want = reference.fc1_swiglu_fp8(*inputs, return_intermediates=True)
    assert torch.equal(bits(buffers.workspace_q), bits(want.a_q))
    assert torch.equal(buffers.workspace_scale, want.s_row)
    assert (buffers.out == want.y).float().mean() >= 0.999
    torch.testing.assert_close(buffers.out, want.y, rtol=2**-7, atol=0)
    block = {1: 1, 2**16: 128, 2**18: 512, 2**28: rows}[block_bytes]
    assert [count for count, _ in calls] == [min(block, rows - first) for first in range(0, rows, block)]


@pytest.mark.parametrize(("accumulate", "fast"), [("fp32", False), ("fast", True)])
def test_accumulate_reaches_the_gemm(calls, accumulate, fast):
    chain.fc1_swiglu(make_inputs(3), 1e-5, nan_buffers(3), accumulate)
    assert calls == [(3, fast)]


def test_operands_at_odd_addresses_are_copied(calls):
    inputs, want, got = make_inputs(5), nan_buffers(5), nan_buffers(5)
    chain.fc1_swiglu(inputs, 1e-5, want, "fp32")
    weight = {name: shifted(getattr(inputs, name)) for name in ("fc1_weight_q", "fc1_weight_scale")}
    got = got._replace(workspace_q=shifted(got.workspace_q), workspace_scale=shifted(got.workspace_scale))
    assert all(t.data_ptr() % 16 for t in (*weight.values(), got.workspace_q, got.workspace_scale))
    chain.fc1_swiglu(inputs._replace(**weight), 1e-5, got, "fp32")
    assert len(calls) == 2
    for have, expected in zip(got, want, strict=True):
        assert torch.equal(bits(have.clone()), bits(expected))


@pytest.mark.parametrize(
    ("columns", "element_bytes", "step"),
    [(2 * contract.FFN, 2, 4608), (contract.HIDDEN, chain.STAGE1_BYTES, 1536), (2**27, 2, 1), (2**20, 2, 128)],
)
def test_blocks_cover_the_rows_within_the_budget(columns, element_bytes, step):
    blocks = chain._blocks(33472, columns, element_bytes)
    assert blocks[0] == slice(0, step)
    assert step * columns * element_bytes <= chain.BLOCK_BYTES
    assert [row for block in blocks for row in range(33472)[block]] == list(range(33472))
    assert chain._blocks(0, columns, element_bytes) == []


def peak_bytes(call) -> int:
    """The most that torch's CPU allocator held during the call beyond what it held before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        call()
    held = peak = 0
    events = [e for e in profiled.profiler.kineto_results.events() if e.name() == "[memory]"]
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def test_memory_of_stage_1(monkeypatch):
    """Four blocks, each within BLOCK_BYTES; what remains, less than 1%, is a few values a row."""
    monkeypatch.setattr(chain, "BLOCK_BYTES", chain.STAGE1_BYTES * 5376 * 32)
    inputs, buffers = make_inputs(128, hidden=5376), nan_buffers(128, hidden=5376)
    peak = peak_bytes(lambda: chain.stage1(inputs, 1e-5, buffers.workspace_q, buffers.workspace_scale))
    assert 0.9 < peak / chain.BLOCK_BYTES < 1.01


def test_memory_of_stage_2(monkeypatch):
    """Four blocks: of each the product h, BLOCK_BYTES, and g, half of it."""
    monkeypatch.setattr(chain, "BLOCK_BYTES", 256 * 2 * FFN * 2)
    monkeypatch.setattr(chain, "scaled_mm", lambda a_q, w_q, *_: torch.ones(len(a_q), len(w_q), dtype=torch.bfloat16))
    inputs, buffers = make_inputs(1024), nan_buffers(1024)
    peak = peak_bytes(lambda: chain.gemm_swiglu(*buffers[1:], *inputs[5:], buffers.out, fast=False))
    assert peak == 1.5 * chain.BLOCK_BYTES
    assert (buffers.out == 0.73046875).all(), "bf16(silu(1))"


class TestMLP:
    @pytest.mark.parametrize("block_bytes", [1, 2**16, 2**28])
    @pytest.mark.parametrize("rows", [1, 15, 300])
    def test_in_blocks(self, monkeypatch, calls, rows, block_bytes):
        """Blocks of one row, of 128 (2^16 bytes of FC1's 256 BF16 columns), and one of all rows."""
        monkeypatch.setattr(chain, "BLOCK_BYTES", block_bytes)
        inputs, buffers = make_mlp_inputs(rows), nan_mlp_buffers(rows)
        chain.mlp(inputs, 1e-5, buffers, "fp32")
        assert_mlp(buffers, inputs)
        assert sum(count for count, _ in calls) == 2 * rows, "each row goes through both GEMMs once"
        out = torch.full_like(buffers.out, torch.nan)
        chain.mlp(inputs, 1e-5, contract.MLPBuffers(out), "fp32")
        assert torch.equal(bits(out), bits(buffers.out))

    @pytest.mark.usefixtures("calls")
    @pytest.mark.parametrize("inputs", [mlp_edge_inputs(), without_adaln(make_mlp_inputs(70))])
    def test_edge_rows_and_no_adaln(self, inputs):
        buffers = nan_mlp_buffers(len(inputs.x))
        chain.mlp(inputs, 1e-5, buffers, "fp32")
        assert_mlp(buffers, inputs)

    @pytest.mark.parametrize(("accumulate", "fast"), [("fp32", False), ("fast", True)])
    def test_accumulate_reaches_both_gemms(self, calls, accumulate, fast):
        chain.mlp(make_mlp_inputs(3), 1e-5, nan_mlp_buffers(3), accumulate)
        assert calls == [(3, fast), (3, fast)]

    @pytest.mark.usefixtures("calls")
    def test_operands_at_odd_addresses(self):
        inputs, want = make_mlp_inputs(5), nan_mlp_buffers(5)
        chain.mlp(inputs, 1e-5, want, "fp32")
        odd = contract.MLPInputs(*map(shifted, inputs))
        got = contract.MLPBuffers(*map(shifted, nan_mlp_buffers(5)))
        chain.mlp(odd, 1e-5, got, "fp32")
        assert all(torch.equal(bits(a.clone()), bits(b)) for a, b in zip(got, want, strict=True))

    def test_memory_of_the_quantization(self, monkeypatch):
        """Four blocks, each within BLOCK_BYTES; what remains, less than 2%, is a few values a row."""
        monkeypatch.setattr(chain, "BLOCK_BYTES", chain.QUANTIZE_BYTES * 5376 * 32)
        y, y_q = torch.randn(128, 5376).bfloat16(), torch.empty(128, 5376, dtype=contract.QUANTIZED)
        peak = peak_bytes(lambda: chain.quantize_rows(y, y_q, torch.empty(128)))
        assert 0.8 < peak / chain.BLOCK_BYTES < 1.02

    def test_memory_of_stage_3(self, monkeypatch):
        """Four blocks: o, the gate's rows and what torch needs to gather them, within BLOCK_BYTES."""
        monkeypatch.setattr(chain, "BLOCK_BYTES", 256 * 4 * HIDDEN * 2)
        monkeypatch.setattr(chain, "scaled_mm", lambda a, w, *_: torch.ones(len(a), len(w), dtype=torch.bfloat16))
        inputs, buffers = make_mlp_inputs(1024), nan_mlp_buffers(1024)
        y_q, s_y = buffers.workspace_y_q, buffers.workspace_y_scale
        peak = peak_bytes(lambda: chain.gemm_gated_residual(y_q, s_y, inputs, buffers.out, fast=False))
        assert 0.4 < peak / chain.BLOCK_BYTES < 1.02
        assert torch.equal(buffers.out, inputs.residual + inputs.gate[inputs.adaln_index])


class TestServes:
    @pytest.fixture
    def gpu(self, monkeypatch):
        """A CUDA device whose capability is the list's one element."""
        capability = [(9, 0)]
        monkeypatch.setattr(torch.version, "hip", None)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability[0])
        monkeypatch.setattr(chain.sys, "platform", "linux")
        return capability

    @pytest.mark.parametrize("device", ["cpu", "xpu:0", "mps", "meta"])
    def test_no_other_device(self, device):
        assert chain.serves(torch.device(device)) == (False, "serves CUDA devices only")

    @pytest.mark.parametrize("capability", [(8, 9), (9, 0), (10, 0), (10, 3), (12, 0), (12, 1)])
    def test_fp8_tensor_cores(self, gpu, capability):
        gpu[0] = capability
        serves, reason = chain.serves(torch.device("cuda:0"))
        assert serves
        assert "scaled_mm in blocks of rows" in reason
        assert f"{capability[0]}.{capability[1]}" in reason

    @pytest.mark.usefixtures("gpu")
    def test_a_torch_without_scaled_mm(self, monkeypatch):
        monkeypatch.delattr(torch.nn.functional, "scaled_mm")
        serves, reason = chain.serves(torch.device("cuda:0"))
        assert not serves
        assert reason.startswith("needs torch.nn.functional.scaled_mm, of torch 2.10 or newer; this is ")

    @pytest.mark.parametrize("capability", [(7, 5), (8, 0), (8, 6)])
    def test_older(self, gpu, capability):
        gpu[0] = capability
        serves, reason = chain.serves(torch.device("cuda:0"))
        assert not serves
        assert reason.endswith(f"compute capability 8.9 or newer; this is {capability[0]}.{capability[1]}")

    @pytest.mark.usefixtures("gpu")
    def test_rocm(self, monkeypatch):
        monkeypatch.setattr(torch.version, "hip", "7.0")
        serves, reason = chain.serves(torch.device("cuda:0"))
        assert not serves
        assert "ROCm" in reason

    @pytest.mark.usefixtures("gpu")
    def test_cuda_without_a_gpu(self, monkeypatch):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        assert chain.serves(torch.device("cuda:0")) == (False, "torch finds no CUDA device")

    @pytest.mark.parametrize(("capability", "served"), [((8, 9), False), ((9, 0), True), ((12, 0), False)])
    def test_windows(self, gpu, monkeypatch, capability, served):
        gpu[0] = capability
        monkeypatch.setattr(chain.sys, "platform", "win32")
        assert chain.serves(torch.device("cuda:0"))[0] == served
