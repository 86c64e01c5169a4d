"""The verdict and the JSON of a demo; the run itself is in ``test_cli``."""

import json
import math
from dataclasses import replace

import pytest
import torch
from helpers import make_mlp_inputs, nan_mlp_buffers
from rich.console import Console

import h3mlp
from h3mlp import reference
from h3mlp.accuracy import Accuracy
from h3mlp.tools import demo
from h3mlp.tools.bench.record import Error, Result, Times


@pytest.fixture
def good() -> demo.Demo:
    return demo.Demo(
        rows=2,
        seed=0,
        device="cpu",
        backend="cpu",
        reason="",
        environment={},
        weight_bytes_bf16=2,
        weight_bytes_fp8=1,
        seconds={"operator": 1.0},
        against_bf16=Accuracy(0.05, 25.3, 0.03, 2),
        fc1_against_bf16=Accuracy(0.05, 25.3, 0.03, 2),
        y_against_fp64=Accuracy(0.0, math.inf, 1.0, 2),
        against_fp64=Accuracy(0.0, math.inf, 1.0, 2),
        violations=0,
        codes_identical=True,
        error_of_rms=torch.zeros(2),
        steps_from_fp64=torch.zeros(2, dtype=torch.int32),
    )


@pytest.mark.parametrize(
    "wrong",
    [
        {"codes_identical": False},
        {"violations": 5},
        {"against_fp64": Accuracy(1e-3, 60.0, 0.998, 2)},
        {"y_against_fp64": Accuracy(1e-3, 60.0, 0.998, 2)},
        {"against_bf16": Accuracy(1.4, -3.0, 0.0, 2)},
        {"against_bf16": Accuracy(math.nan, math.nan, 0.0, 2)},
    ],
)
def test_each_condition_counts(good, wrong):
    assert good.ok
    bad = demo.Demo(**{**vars(good), **wrong})
    assert not bad.ok
    assert bad.as_json()["ok"] is False


def test_on_a_gpu_the_tolerance_decides_and_the_chain_is_beside(good):
    """A Hopper GPU's sums move a tenth of the outputs by a step of BF16."""
    times = Times(rounds=20, median_us=1000.0, lower_us=990.0, upper_us=1010.0, burst_us=900.0)
    ours = Result(2, "h3mlp", 10**12, 1, times, Error(1e-3, 0, 2))
    chain = Result(2, "chain, compiled", 10**12, 1, replace(times, median_us=1250.0), Error(2e-2, 0, 2))
    lost = replace(chain, peer="chain, eager", times=None, error=None, skipped="out of device memory")
    off = Accuracy(1e-3, 60.0, 0.9, 2)
    assert not replace(good, against_fp64=off).ok
    gpu = replace(good, device="cuda:0", against_fp64=off, call_bytes=450_000_000, chains=(ours, chain, lost))
    assert gpu.ok
    console = Console(width=80, highlight=False)
    with console.capture() as shown:
        console.print(demo.render(gpu))
    for part in (
        "450.0 MB",
        "1.000 │",
        "1,000.0",
        "1.25",
        "2.00e-02",
        "out of device memory",
        "all within 0.01 + 1.6% of FP64",
    ):
        assert part in shown.get()
    told = json.loads(json.dumps(gpu.as_json(), allow_nan=False))
    assert told["chains"][1]["times"]["median_us"] == 1250.0


@pytest.mark.parametrize("name", ["workspace_a_q", "workspace_a_scale", "workspace_y_q", "workspace_y_scale"])
def test_one_code_or_scale_that_is_off_is_seen(name):
    inputs, got = make_mlp_inputs(3), nan_mlp_buffers(3)
    h3mlp.mlp_fp8(*inputs, **got._asdict())
    exact = reference.norm_quant(*inputs[:5])
    assert demo._codes_identical(got, exact)
    getattr(got, name).view(torch.uint8).view(-1)[-1] ^= 1
    assert not demo._codes_identical(got, exact)


def test_json_has_no_infinity(good):
    text = json.dumps(good.as_json(), allow_nan=False)
    assert json.loads(text)["against_fp64"]["snr_db"] is None
    assert "error_of_rms" not in text


def test_a_failed_plot_leaves_the_old_file(good, tmp_path, monkeypatch):
    from matplotlib.figure import Figure

    path = tmp_path / "error.png"
    path.write_text("old")
    demo.plot(good, path)
    new = path.read_bytes()
    assert new.startswith(b"\x89PNG")

    def fail(_self, file, **_options):
        file.write_text("half")
        raise OSError("disk full")

    monkeypatch.setattr(Figure, "savefig", fail)
    with pytest.raises(OSError, match="disk full"):
        demo.plot(good, path)
    assert path.read_bytes() == new
    assert list(tmp_path.iterdir()) == [path]
