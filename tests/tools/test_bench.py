"""The benchmark with a clock of its own, with real calls at small sizes on the CPU, and from a made-up record."""

import json
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import pairwise
from types import ModuleType, SimpleNamespace

import pytest
import torch
from helpers import FFN, HIDDEN
from rich.console import Console

from h3mlp import contract, prepare_fc1_weight_fp8, reference, synthetic, unpack_fc1_rows
from h3mlp.backends import cpu
from h3mlp.tools import bench, cli
from h3mlp.tools.bench import beside, energy, error, harness, mlp_peers, peers, record, timing, work
from h3mlp.tools.bench.plot import apart

MODEL = contract.HIDDEN, contract.FFN
QUICK = timing.Plan(seconds=0.0, rounds=2, warm_rounds=1, pause=0.0)


class FakeTimer:
    """A device on which a run takes the seconds that it returns, and the order in which it is used."""

    def __init__(self, ahead: int = 0):
        self.ahead, self.clock, self.log = ahead, 0.0, []

    def prepare(self, call, rows):  # noqa: ARG002
        return timing.Run(call)

    def launch(self, run):
        seconds = run.call()
        self.clock += seconds
        self.log.append("launch")

        def read():
            self.log.append("read")
            return seconds / run.calls

        return read

    def synchronize(self):
        self.log.append("synchronize")

    def now(self):
        return self.clock

    def joules(self):
        """At 500 W."""
        return 500.0 * self.clock

    def sleep(self, seconds):
        self.clock += seconds
        self.log.append("sleep")


@pytest.fixture
def problem(layer) -> peers.Problem:
    packed = prepare_fc1_weight_fp8(layer.weight)
    return peers.Problem(layer, packed, tuple(unpack_fc1_rows(part) for part in packed))


@pytest.fixture
def gpu_record() -> bench.Record:
    """A round-numbered H200 that multiplies at 1000 TFLOPS hot and 1250 in a burst, and copies at 4000 GB/s."""
    jobs = {
        peers.OURS: (work.operator, 1.1),
        peers.GEMM: (work.gemm, 1.0),
        peers.CHAIN: (work.operator, 1.5),
        peers.CHAIN_EAGER: (work.operator, 2.5),
        peers.STAGE1: (lambda rows, hidden, _: work.norm_quant(rows, hidden), 0.1),
    }
    results = []
    for rows in (1, 4184, 33472):
        for peer, (job, factor) in jobs.items():
            least = job(rows, *MODEL)
            us = factor * max(work.gemm(rows, *MODEL).flops / 1e9, 154e6 / 4e6)
            times = record.Times(20, us, 0.99 * us, 1.01 * us, 0.8 * us)
            results.append(record.Result(rows, peer, *least, times, error.Error(1e-4, 0, 64)))
    lost = replace(results[-2], times=None, error=None, skipped="out of device memory")
    results[-2] = lost
    return bench.Record(
        date="2026-11-30",
        environment={"torch": "2.11.0", "h3mlp": "0.1.0", "cpu": "a CPU", "threads": 16},
        device={
            "device": "cuda:0",
            "backend": "cute",
            "serves": "kernels for sm_90a",
            "name": "NVIDIA H200",
            "power_limit_w": 700.0,
            "driver": "580",
        },
        settings={"rounds": 20},
        hidden=contract.HIDDEN,
        ffn=contract.FFN,
        copy_gb_s=4000.0,
        host_us=4.5,
        peers=dict.fromkeys(jobs, "what it is"),
        results=results,
    )


def text(renderable) -> str:
    console = Console(width=80, highlight=False)
    with console.capture() as shown:
        console.print(renderable)
    return shown.get()


def test_work_at_the_size_of_the_model():
    """Of one row: the weight is 28672 * 5376 codes and 28672 scales."""
    weight = 28672 * 5376 + 4 * 28672
    assert work.operator(1, *MODEL) == (2 * 5376 * 28672, 2 * 5376 + 2 * (5376 + 4) + weight + 2 * 14336)
    assert work.limit(1, *MODEL) == (2 * 5376 * 28672, 2 * 5376 + weight + 2 * 14336)
    assert work.gemm(1, *MODEL) == (2 * 5376 * 28672, 5376 + 4 + weight + 2 * 28672)
    assert work.gemm_bf16(1, *MODEL) == (2 * 5376 * 28672, 2 * (5376 + 28672 * 5376 + 28672))
    assert work.norm_quant(1, 5376) == (0, 3 * 5376 + 4)
    flops, weights = 6 * 5376 * 14336, weight + 5376 * 14336 + 4 * 5376
    assert work.mlp_limit(1, *MODEL) == (flops, 6 * 5376 + weights)
    assert work.mlp(1, *MODEL) == (flops, 6 * 5376 + weights + 2 * (5376 + 4 + 3 * 14336 + 4))
    gemms = 5376 + 4 + 2 * 28672 + 14336 + 4 + 2 * 5376
    assert work.mlp_gemms(1, *MODEL) == (flops, weights + gemms)
    assert work.mlp_bf16(1, *MODEL) == (flops, 2 * (3 * 5376 + 28672 + 3 * 5376 * 14336))


def test_every_round_runs_every_peer_until_time_and_rounds_are_spent():
    timer, calls = FakeTimer(), []

    def take(name, seconds):
        calls.append(name)
        return seconds

    runs = {"a": timing.Run(partial(take, "a", 0.1)), "b": timing.Run(partial(take, "b", 0.4), calls=2)}
    plan = timing.Plan(seconds=10.0, rounds=3, warm_rounds=1, warm_share=0.5)
    shares = []
    samples, failed = timing.interleave(runs, timer, plan, shares.append)
    assert failed == {}
    assert samples == {"a": [0.1] * 11, "b": [0.2] * 11}, "0.5 s a round: 9 rounds to warm up, 11 measured"
    rounds = list(zip(calls[::2], calls[1::2], strict=True))
    assert all(sorted(one) == ["a", "b"] for one in rounds)
    assert len(set(rounds)) == 2, "the order is shuffled"
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    samples, _ = timing.interleave(runs, timer, replace(plan, seconds=0.0, warm_rounds=2))
    assert len(samples["a"]) == 3


def test_a_round_is_read_after_the_next_is_queued():
    timer = FakeTimer(ahead=1)
    timing.interleave({"a": timing.Run(lambda: 1.0)}, timer, QUICK)
    assert timer.log == ["launch", *["launch", "read"] * 3, "synchronize"]


def test_a_peer_that_fails_in_a_round_is_left_out():
    left = iter([0.1, 0.1])

    def fails():
        if (seconds := next(left, None)) is None:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 6.3 GiB")
        return seconds

    samples, failed = timing.interleave({"a": timing.Run(lambda: 0.2), "b": timing.Run(fails)}, FakeTimer(), QUICK)
    assert samples == {"a": [0.2, 0.2]}
    assert failed == {"b": "out of device memory"}
    assert timing.interleave({}, FakeTimer(), QUICK) == ({}, {})


def test_burst_is_the_best_after_a_pause():
    timer, left = FakeTimer(), iter([0.3, 0.1, 0.2])
    plan = replace(QUICK, pause=1.0, burst_runs=3)
    assert timing.burst(timing.Run(lambda: next(left)), timer, plan) == 0.1
    assert timer.log[:3] == ["synchronize", "sleep", "launch"]
    assert timing.burst(timing.Run(lambda: 1.0), timer, QUICK) is None


def test_alone_is_warmed_up_and_counts_every_call():
    """Runs of two calls of 0.1 s: 10 for two seconds, after 5 that do not count, which take longer."""
    timer, left = FakeTimer(), iter([9.0] * 5 + [0.2] * 10)
    found = timing.alone(timing.Run(lambda: next(left), calls=2), 0.1, timer, replace(QUICK, alone=2.0))
    assert found == (pytest.approx(0.1), pytest.approx(50.0))
    assert next(left, None) is None
    assert timer.log[-1] == "synchronize"
    timer.joules = lambda: None
    assert timing.alone(timing.Run(lambda: 5.0), 5.0, timer, replace(QUICK, alone=2.0)) == (5.0, None)


def test_energy_as_nvml_tells(monkeypatch):
    class NVMLError(Exception):
        pass

    def total(handle):
        if handle == "of GPU-hidden":
            raise NVMLError("Not Supported")
        assert handle == "of GPU-1-2"
        return 1234567

    nvml = ModuleType("pynvml")
    nvml.NVMLError, nvml.nvmlInit = NVMLError, lambda: None
    nvml.nvmlDeviceGetHandleByUUID, nvml.nvmlDeviceGetTotalEnergyConsumption = "of {}".format, total
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    uuids = {0: "GPU-1-2", 1: "hidden"}
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=uuids[device.index]))
    assert energy.joules(torch.device("cuda", 0)) == pytest.approx(1234.567)
    assert energy.joules(torch.device("cuda", 1)) is None
    monkeypatch.setitem(sys.modules, "pynvml", None)  # as where it is not installed
    assert energy.joules(torch.device("cuda", 0)) is None


def test_large_problems_run_alone_too(problem):
    plan = replace(QUICK, alone=1e-3, alone_rows=len(problem.layer.x))
    found = harness.measure(problem, [peers.ours(problem)], timing.HostTimer(), plan)
    assert found[0].alone.us > 0
    assert found[0].alone.joules is found[0].alone.watts is None
    few = replace(plan, alone_rows=len(problem.layer.x) + 1)
    assert harness.measure(problem, [peers.ours(problem)], timing.HostTimer(), few)[0].alone is None


def test_host_time_does_not_wait_for_the_device():
    timer, count = FakeTimer(), []

    def enqueue():
        assert timer.log.count("synchronize") == 1 + len(count) // 200
        count.append(1)
        timer.clock += 5e-6

    assert timing.host_seconds(enqueue, timer) == pytest.approx(5e-6)
    assert len(count) == 1000


def test_times():
    assert harness.times_of([3e-6, 1e-6, 2e-6], 5e-7) == record.Times(
        3, *map(pytest.approx, (2.0, 1.5, 2.5)), pytest.approx(0.5)
    )
    assert harness.times_of([1e-6], None) == record.Times(1, 1.0, 1.0, 1.0, None)


def test_violations_count_each_element_out_of_tolerance():
    exact = torch.tensor([[0.0, 100.0, 100.0, 0.0, 1.0]])
    got = torch.tensor([[0.011, 101.6, 101.7, torch.nan, 1.02]])
    assert error.violations(got, exact) == 3
    assert error.error_of(got, exact).relative_rms is None


@pytest.mark.parametrize("rows", [1, 64, 1000])
def test_sampled_rows(rows):
    chosen = harness.sample_rows(rows)
    assert chosen.tolist() == sorted(set(chosen.tolist()))
    assert len(chosen) == min(rows, 64)
    assert 0 <= chosen[0] <= chosen[-1] < rows


def test_a_run_on_the_cpu(tmp_path):
    steps = []
    found = bench.run(
        (1, 70), rounds=2, bf16=True, hidden=HIDDEN, ffn=FFN, progress=lambda step, share: steps.append((step, share))
    )
    assert found.ok
    assert found.row_counts == [1, 70]
    for rows in found.row_counts:
        at = found.at(rows)
        assert list(at) == [peers.OURS, peers.CHAIN_EAGER, peers.STAGE1, peers.BF16]
        assert all(result.times.rounds == 2 and result.times.burst_us is None for result in at.values())
        assert at[peers.STAGE1].error == error.Error(0.0, 0, min(rows, 64)), "the reference's own bits"
        assert at[peers.OURS].error.relative_rms < 1e-4
        assert at[peers.CHAIN_EAGER].error.violations == 0
        assert at[peers.BF16].error is None
    shares = [share for _, share in steps]
    assert shares == sorted(shares)
    assert steps[-1] == ("70 rows: side by side", 1.0)
    shown = text(bench.render(found))
    assert "burst   " not in shown.split("us      median")[0], "a column without a value is left out"
    assert max(map(len, shown.splitlines())) <= 80
    path = tmp_path / "result.json"
    bench.save(found, path)
    assert bench.load(path) == found
    assert list(tmp_path.iterdir()) == [path]


def test_the_peers_of_a_gpu_compute_what_they_say(problem):
    """On the CPU, not compiled. A chain in BF16 rounds n * sp1, which the contract does not: some codes move by a step
    of 6 to 12%, for 1.4% RMS of a_q and 2.1% of y."""
    try:
        a_q, s_row = problem.quantized
        w_q, w_scale = problem.natural
        peers.scaled_mm(a_q, w_q, s_row, w_scale, fast=True)
    except (RuntimeError, ValueError) as error:
        pytest.skip(f"this torch has no FP8 GEMM with a scale a row on the CPU: {error}")
    compiled = []
    found = harness.measure(
        problem,
        peers.on_cuda(problem, cpu.stage1, bf16=True, compiled=lambda f: compiled.append(f) or f),
        timing.HostTimer(),
        QUICK,
    )
    assert compiled == [peers.norm_adaln_quant, peers.silu_mul]
    assert [result.skipped for result in found] == [None] * 9
    rms = {result.peer: result.error.relative_rms for result in found if result.error}
    assert rms[peers.OURS] < 1e-4
    assert rms[peers.OURS_FAST] < 1e-4
    assert rms[peers.GEMM] < 1e-4
    assert rms[peers.GEMM_FP32] < 1e-4
    assert rms[peers.STAGE1] == 0
    assert 0 < rms[peers.CHAIN_STAGE1] < 0.03
    assert rms[peers.CHAIN] == rms[peers.CHAIN_EAGER] < 0.04


def test_a_run_of_the_mlp(tmp_path):
    found = bench.run((1, 70), rounds=2, bf16=True, operator="mlp", runs=False, hidden=HIDDEN, ffn=FFN)
    assert found.ok
    assert found.settings["index"] == "random"
    for rows in found.row_counts:
        at = found.at(rows)
        assert list(at) == [peers.OURS, peers.CHAIN_EAGER, peers.BF16]
        assert at[peers.OURS].error.violations == 0
        assert at[peers.CHAIN_EAGER].error.relative_rms < 2**-7, "one BF16 step of out at most"
        assert at[peers.OURS].flops == work.mlp(rows, HIDDEN, FFN).flops
    assert "MiniMax-H3 MLP half of a block: hidden 384, FFN 128, index random" in text(bench.render(found))
    path = tmp_path / "result.json"
    bench.save(found, path)
    assert bench.load(path) == found
    content = json.loads(path.read_text())
    del content["operator"]
    path.write_text(json.dumps(content))
    assert bench.load(path).operator == "fc1", "as files were written before there were two"


def test_a_wrong_mlp_is_found():
    """One step of BF16 in one element is none; half of a row is."""
    problem = mlp_peers.Problem.make(70, HIDDEN, FFN, 0, torch.device("cpu"))
    sample = harness.sample_rows(70)
    judge, out = problem.judge(sample), mlp_peers.ours(problem).call()[sample]
    assert judge("out", out).violations == 0
    out[3, :192] += 1
    assert judge("out", out).violations > 180


def test_the_mlps_peers_of_a_gpu_compute_what_they_say():
    """On the CPU, not compiled; the FP8 GEMM by the reference where this torch has none."""
    problem = mlp_peers.Problem.make(70, HIDDEN, FFN, 0, torch.device("cpu")).first(70, runs=True)
    assert problem.mlp.fc1.adaln_index.diff().min() >= 0
    compiled = []
    chosen = mlp_peers.on_cuda(problem, bf16=True, compiled=lambda f: compiled.append(f) or f)
    with pytest.MonkeyPatch.context() as patch:
        multiply = reference.accumulate
        patch.setattr(mlp_peers, "scaled_mm", lambda a, w, s, ws, _: reference.dequantize(multiply(a, w), s, ws))
        found = harness.measure(problem, chosen, timing.HostTimer(), QUICK)
    assert len(compiled) == 5
    assert [result.skipped for result in found] == [None] * 9
    errors = {result.peer: result.error for result in found}
    assert errors[peers.OURS].violations == errors[peers.OURS_FAST].violations == 0
    assert errors[mlp_peers.FC1_CHAIN] == errors[peers.OURS], "the same codes, rounded alike"
    for name in (peers.CHAIN, peers.CHAIN_EAGER, mlp_peers.CHAIN_FP32):
        assert 0 < errors[name].relative_rms < 0.02, "a chain in BF16 rounds n * sp1: some codes move by a step"
    assert errors[peers.GEMM] is errors[peers.BF16] is None


def test_a_run_on_a_gpu_with_the_cpu_in_its_place(monkeypatch):
    """All but the device itself: the peers, the host time, the pauses, and a peer that is not there for this shape."""

    class Timer(timing.HostTimer):
        ahead, slept = 1, 0.0

        def sleep(self, seconds):
            self.slept += seconds

    def no_gemm(*_, **__):
        raise RuntimeError("no FP8 GEMM")

    timer = Timer()
    monkeypatch.setattr(harness.dispatch, "select", lambda _: cpu)
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(synthetic.Layer, "to", lambda self, _: self)
    monkeypatch.setattr(harness, "copy_bandwidth", lambda *_: 4e12)
    monkeypatch.setattr(harness, "gpu", lambda _: {"name": "NVIDIA H200", "power_limit_w": 700.0})
    monkeypatch.setattr(peers, "scaled_mm", no_gemm)
    monkeypatch.setattr(peers, "on_cuda", partial(peers.on_cuda, compiled=lambda f: f))
    warmed = []
    monkeypatch.setattr(harness, "warmup", lambda *arguments, **sizes: warmed.append((arguments, sizes)))
    device = torch.device("cuda", 0)
    found = bench.run((1, 3), seconds=0.0, rounds=2, hidden=HIDDEN, ffn=FFN, device=device, timer=timer)
    assert found.ok
    assert warmed == [((device, (1, 3)), {"hidden": HIDDEN, "ffn": FFN, "operators": ["fc1"]})], (
        "a GPU's choice of GEMM is measured first"
    )
    serves = "serves tensors in host memory only"
    described = {"device": "cuda:0", "backend": "cpu", "serves": serves, "name": "NVIDIA H200", "power_limit_w": 700.0}
    assert found.device == described
    assert found.copy_gb_s == 4000.0
    assert found.host_us > 0
    timed = {result.peer for result in found.results if result.times}
    assert timed == {peers.OURS, peers.OURS_FAST, peers.STAGE1, peers.CHAIN_STAGE1}
    assert all(result.times.burst_us > 0 for result in found.results if result.times)
    assert {result.skipped for result in found.results if not result.times} == {"RuntimeError: no FP8 GEMM"}
    assert timer.slept == pytest.approx(2 * len(timed) * timing.Plan().pause)
    assert max(map(len, text(bench.render(found)).splitlines())) <= 80


def test_a_peer_that_cannot_run_is_skipped_and_the_others_go_on(problem):
    def no_memory():
        raise torch.OutOfMemoryError("CUDA out of memory")

    def unsupported():
        raise RuntimeError("\nno kernel for this shape\ndetails")

    mine = peers.ours(problem)
    chosen = [mine, replace(mine, name="big", call=no_memory), replace(mine, name="odd", call=unsupported)]
    ours, big, odd = harness.measure(problem, chosen, timing.HostTimer(), QUICK)
    assert ours.times.rounds == 2
    assert (big.times, big.error, big.skipped) == (None, None, "out of device memory")
    assert odd.skipped == "RuntimeError: no kernel for this shape"


def test_stage_1_is_a_function_of_the_backend():
    assert peers.stage1_of(cpu) is cpu.stage1
    package = ModuleType("cute")
    package.norm_quant = ModuleType("cute.norm_quant")
    assert peers.stage1_of(package) is None
    package.stage1 = cpu.stage1
    assert peers.stage1_of(package) is cpu.stage1


def test_limit_and_verdict(gpu_record):
    """Burst rate 1250 TFLOPS; a row's bytes at 4 TB/s."""
    assert gpu_record.peak_gflops == pytest.approx(1.25e6)
    assert gpu_record.limit_us(33472) == pytest.approx(2 * 33472 * 5376 * 28672 / 1.25e9)
    assert gpu_record.limit_us(1) == pytest.approx(work.limit(1, *MODEL).bytes / 4e6)
    few = replace(gpu_record, results=[r for r in gpu_record.results if r.rows == 1])
    assert few.peak_gflops == 0, "one row says nothing about the tensor cores"
    assert few.limit_us(1) == gpu_record.limit_us(1)
    assert gpu_record.ok
    ours, *others = gpu_record.results
    for wrong in (replace(ours, times=None), replace(ours, error=error.Error(0.1, 5, 64))):
        assert not replace(gpu_record, results=[wrong, *others]).ok
    assert not replace(gpu_record, results=others[:4]).ok


def test_rendering_of_a_gpu(gpu_record):
    shown = text(bench.render(gpu_record))
    for part in (
        "NVIDIA H200, 700 W; driver 580, torch 2.11.0, h3mlp 0.1.0; 2026-11-30",
        "Copy bandwidth 4,000 GB/s, highest rate 1,250 TFLOPS.",
        "Backend cute: kernels for sm_90a",
        "33,472 rows; limit 8,255 us",
        "chain, eager at 33,472 rows was skipped: out of device memory",
        "Host time of a call of h3mlp: 4.5 us.",
        "of the copy bandwidth.",
    ):
        assert part in shown
    ours = next(line.split() for line in shown.split("33,472 rows")[1].splitlines() if line.startswith(" h3mlp "))
    assert ours == ["h3mlp", "11,351", "9,081", "909.1", "161.6", "1.100", "0.733", "1.0e-04", "0"]
    assert max(map(len, shown.splitlines())) <= 80


def test_rendering_of_what_ran_alone(gpu_record, tmp_path):
    """OURS 1.1 times as long as the GEMM with 1.2 times its energy."""
    alone = {peers.OURS: record.Alone(11000.0, 6.0), peers.GEMM: record.Alone(10000.0, 5.0)}
    results = [replace(r, alone=alone.get(r.peer)) if r.rows == 33472 else r for r in gpu_record.results]
    bench.save(replace(gpu_record, results=results), tmp_path / "record.json")
    shown = text(bench.render(bench.load(tmp_path / "record.json")))
    lines = [line.split() for line in shown.split("J/GEMM")[1].splitlines()]
    assert ["h3mlp", "11,000", "545", "6.000", "1.100", "1.200"] in lines
    assert shown.count("J/GEMM") == 1
    assert max(map(len, shown.splitlines())) <= 80


@pytest.mark.parametrize(("name", "start"), [("a.png", b"\x89PNG"), ("a.svg", b"<?xml"), ("a.PDF", b"%PDF")])
def test_plot(gpu_record, tmp_path, name, start):
    path = tmp_path / name
    bench.plot(gpu_record, path)
    assert path.read_bytes().startswith(start)
    assert list(tmp_path.iterdir()) == [path]


def test_a_plot_of_one_number_of_rows_and_of_a_cpu(gpu_record, tmp_path):
    one = replace(gpu_record, results=[r for r in gpu_record.results if r.rows == 1], device={"device": "cpu"})
    bench.plot(one, tmp_path / "one.svg")
    none = replace(one, results=[replace(r, times=None) for r in one.results])
    bench.plot(none, tmp_path / "none.svg")


def test_names_keep_apart():
    assert apart([1.0, 2.0, 3.0], 0.5) == [1.0, 2.0, 3.0]
    assert apart([1.0, 1.0, 3.0], 0.5) == [0.75, 1.25, 3.0]
    moved = apart([1.0, 1.1, 1.2, 1.9], 0.5)
    assert all(b - a >= 0.5 - 1e-9 for a, b in pairwise(moved))


def test_beside_the_chain(problem):
    found = beside.measure_chains(
        problem.layer, problem.packed, timer=timing.HostTimer(), compiled=lambda f: f, plan=QUICK
    )
    assert [result.peer for result in found] == [peers.OURS, peers.CHAIN, peers.CHAIN_EAGER]
    lost = (*found[:2], replace(found[2], times=None, skipped="out of device memory"))
    shown = text(beside.render(lost))
    assert "1.00" in shown
    assert "chain, eager: out of device memory" in " ".join(shown.split())


def test_the_gpu_as_nvidia_smi_tells(monkeypatch):
    properties = SimpleNamespace(name="NVIDIA H200", major=9, minor=0, multi_processor_count=132, uuid="1-2")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    asked = []

    def answer(command, **_):
        asked.append(command)
        return SimpleNamespace(stdout="580.159, 700.00, [N/A]\n")

    monkeypatch.setattr(subprocess, "run", answer)
    device = torch.device("cuda", 0)
    plain = {"name": "NVIDIA H200", "capability": "9.0", "multiprocessors": 132}
    told = {"driver": "580.159", "power_limit_w": 700.0, "max_sm_clock_mhz": "[N/A]"}
    assert harness.gpu(device) == plain | told
    assert "--id=GPU-1-2" in asked[0]

    def missing(*_, **__):
        raise FileNotFoundError("nvidia-smi")

    monkeypatch.setattr(subprocess, "run", missing)
    assert harness.gpu(device) == plain


def stop_of(*arguments: str) -> int:
    with pytest.raises(SystemExit) as stop:
        cli.main(["bench", *arguments])
    return stop.value.code


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--rows", "0"), "Invalid value for '--rows': 0 is not in the range 1<=x<=16777216."),
        (("--rows", "64,many"), "Invalid value for '--rows': 'many' is not a valid integer range."),
        (("--rows", "64,"), "Invalid value for '--rows': '' is not a valid integer range."),
        (("--seconds", "-1"), "Invalid value for '--seconds'"),
        (("--rounds", "0"), "Invalid value for '--rounds'"),
        (("--json-out", "/no/such/x.json"), "folder '/no/such' does not exist or is not writable"),
        (("--plot", "x.gif"), "Invalid value for '--plot': must end in .pdf, .png, .svg; it is 'x.gif'"),
        (("--from", "/no/such.json"), "Invalid value for '--from'"),
        (("--from", __file__), "is not what h3mlp bench --json-out writes"),
        (("--from", __file__, "--rows", "1"), "--rows has no meaning with --from"),
        (("--from", __file__, "--json-out", "x.json"), "--json-out has no meaning with --from"),
    ],
)
def test_bad_arguments_are_one_line_and_exit_code_2(arguments, message, capsys, monkeypatch):
    monkeypatch.setattr(synthetic, "layer", None)  # nothing is done before they are refused
    assert stop_of(*arguments) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("h3mlp: error: ")
    assert message in shown.err
    assert shown.err.count("\n") == 1


@pytest.mark.parametrize("content", ["[]", "{}", '{"schema": 1}', '{"schema": 1, "results": [{"rows": 1}]}', "nan"])
def test_a_foreign_file(content, tmp_path):
    path = tmp_path / "foreign.json"
    path.write_text(content)
    with pytest.raises(ValueError, match="is not what h3mlp bench --json-out writes"):
        bench.load(path)


def test_command_from_a_file(gpu_record, tmp_path, capsys):
    source, picture = tmp_path / "result.json", tmp_path / "result.svg"
    bench.save(gpu_record, source)
    assert stop_of("--from", str(source), "--plot", str(picture)) == 0
    shown = capsys.readouterr().out
    assert "NVIDIA H200" in shown
    assert shown.endswith(f"Plot: {picture}\n")
    assert picture.exists()
    assert stop_of("--from", str(source), "--json") == 0
    assert json.loads(capsys.readouterr().out) == json.loads(source.read_text())


def test_command_measures(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(bench, "run", partial(bench.run, hidden=HIDDEN, ffn=FFN))
    path, picture = tmp_path / "result.json", tmp_path / "result.png"
    arguments = ("--rows", "2,1,2", "--rounds", "3", "--seconds", "0", "--bf16", "--plot", str(picture))
    assert stop_of(*arguments, "--json-out", str(path)) == 0
    shown = capsys.readouterr().out
    assert "h3mlp stage 1" in shown
    assert shown.endswith(f"Result: {path}\nPlot: {picture}\n")
    found = bench.load(path)
    assert found.row_counts == [1, 2]
    assert {result.times.rounds for result in found.results} == {3}
    assert len(found.results) == 8
    assert picture.exists()


def test_command_fails_where_the_operator_is_wrong(gpu_record, tmp_path, capsys):
    wrong = replace(gpu_record.results[0], error=error.Error(1.4, 100, 64))
    bench.save(replace(gpu_record, results=[wrong]), tmp_path / "wrong.json")
    assert stop_of("--from", str(tmp_path / "wrong.json")) == 1
    assert "1.4e+00" in capsys.readouterr().out
