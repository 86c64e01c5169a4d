"""Split over processes, the kernels give the bits of one GPU."""

import processes
import pytest
import torch

from h3mlp import contract

SIZE = (2048, contract.HIDDEN, 1024)
"""Rows, H, F: any row and column in another place of another tile than in the whole."""


@pytest.mark.parametrize("work", [processes.split_rows, processes.split_columns])
def test_two_processes_on_one_gpu(work):
    """NCCL does not connect two processes on one GPU, so their results go through gloo."""
    processes.run(work, 2, "gloo", ("cuda:0",), *SIZE)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("work", [processes.split_rows, processes.split_columns, processes.distributed_module])
def test_two_gpus(work):
    processes.run(work, 2, "nccl", ("cuda:0", "cuda:1"), *SIZE)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_distributed_tensors_on_two_gpus():
    processes.run(processes.distributed_tensors, 2, "nccl", ("cuda:0", "cuda:1"), *SIZE, (2,))
