import pytest
import torch

from h3mlp.backends import chain, cpu, cute
from h3mlp.operators import dispatch

CPU = torch.device("cpu")


def test_the_cpu_is_served_everywhere():
    assert dispatch.select(CPU) is cpu
    verdict = next(v for v in dispatch.survey(CPU) if v.backend == "cpu")
    assert verdict.serves
    assert "threads" in verdict.reason


def test_our_kernels_come_before_torchs_and_the_cpu_is_last():
    assert list(dispatch.BACKENDS) == [cute, chain, cpu]
    assert [verdict.backend for verdict in dispatch.survey(CPU)] == ["cute", "chain", "cpu"]


@pytest.mark.parametrize("device", ["xpu:0", "mps", "hpu"])
def test_an_unserved_device_is_named_with_what_would_serve(device):
    with pytest.raises(NotImplementedError) as error:
        dispatch.select(torch.device(device))
    message = str(error.value)
    assert f"no h3mlp backend serves {device} " in message
    assert "backend cpu: serves tensors in host memory only" in message
    assert "Move the arguments to the CPU" in message


def test_the_best_device_comes_with_its_reason():
    device, reason = dispatch.best()
    assert device in dispatch.devices()
    assert any(v.serves and reason.startswith(v.reason) for v in dispatch.survey(device))


def test_a_device_that_is_passed_over_is_said(monkeypatch):
    monkeypatch.setattr(dispatch, "devices", lambda: [torch.device("xpu", 0), CPU])
    device, reason = dispatch.best()
    assert device == CPU
    assert reason.endswith("no backend serves xpu:0")
