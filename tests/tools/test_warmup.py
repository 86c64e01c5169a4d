import pytest
import torch

import h3mlp
from h3mlp.operators import dispatch


def test_there_is_nothing_to_do_on_the_cpu():
    h3mlp.warmup("cpu")
    h3mlp.warmup(torch.device("cpu"), rows=[1, 33472], accumulate="fast")


def test_the_backend_is_told(monkeypatch):
    calls = []
    backend = dispatch.select(torch.device("cpu"))
    monkeypatch.setattr(backend, "warmup", lambda *arguments: calls.append(arguments), raising=False)
    h3mlp.warmup("cpu", rows=(n for n in (3, 4)), hidden=384, ffn=128)
    h3mlp.warmup("cpu", rows=[5], gemm="plain:128x256", modulation="eager", operators=["mlp"])
    cpu = torch.device("cpu")
    assert calls[0] == (cpu, (3, 4), 384, 128, "fp32", None, "fused", ("fc1", "mlp"))
    assert calls[1] == (cpu, (5,), 5376, 14336, "fp32", "plain:128x256", "eager", ("mlp",))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rows": [0]}, r"rows must be a positive int; it is 0 \(int\)"),
        ({"rows": [1.5]}, r"rows must be a positive int; it is 1.5 \(float\)"),
        ({"hidden": 100}, r"hidden must be a multiple of 128; it is 100 \(int\)"),
        ({"ffn": 32}, r"ffn must be a multiple of 64; it is 32 \(int\)"),
        ({"accumulate": "bf16"}, r"accumulate must be 'fp32' or 'fast'"),
        ({"operators": []}, r"operators must be some of 'fc1', 'mlp'; it is \(\) \(tuple\)"),
        ({"operators": ["fc2"]}, r"operators must be some of 'fc1', 'mlp'; it is \('fc2',\) \(tuple\)"),
        ({"modulation": None}, r"modulation must be 'fused' or 'eager'; it is None \(NoneType\)"),
        (
            {"gemm": "plain:128x256"},
            r"gemm must be None on cpu, where there is no choice; it is 'plain:128x256' \(str\)",
        ),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        h3mlp.warmup("cpu", **arguments)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there():
    with pytest.raises(NotImplementedError, match="no h3mlp backend serves cuda:3"):
        h3mlp.warmup("cuda:3")
