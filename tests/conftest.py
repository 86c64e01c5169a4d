import os

if "PYTEST_XDIST_WORKER_COUNT" in os.environ:  # before torch is imported: processes that fight for the cores are slower
    threads = (os.cpu_count() or 1) // int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, threads)))

import pytest
from helpers import FFN, HIDDEN, TABLE_ROWS
from hypothesis import settings

from h3mlp import contract, prepare_fc1_weight_fp8, synthetic

settings.register_profile("h3mlp", deadline=None, max_examples=60, derandomize=True)
settings.register_profile("thorough", deadline=None, max_examples=3000)  # make test ARGS=--hypothesis-profile=thorough
settings.load_profile("h3mlp")


@pytest.fixture(scope="session")
def layer() -> synthetic.Layer:
    return synthetic.layer(70, HIDDEN, FFN, TABLE_ROWS, seed=1)


@pytest.fixture
def inputs(layer) -> contract.FC1Inputs:
    """Small inputs of the operator; fresh tensors for each test."""
    return contract.FC1Inputs(*(t.clone() for t in layer.activations), *prepare_fc1_weight_fp8(layer.weight))
