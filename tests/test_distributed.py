"""Split over processes, the operator gives the bits of the whole. Two processes on the CPU, through gloo.

With ten or more rows a process: BLAS may add the products of fewer in another order (``h3mlp.contract``, step 9).
"""

import processes
import pytest
import torch
from helpers import FFN, HIDDEN

from h3mlp import PackedFC1, fc1_swiglu_fp8
from h3mlp.distributed import shard

ROWS = 96


@pytest.mark.parametrize(
    "work", [processes.split_rows, processes.split_columns, processes.distributed_module, processes.mlp_rows]
)
def test_two_processes(work):
    processes.run(work, 2, "gloo", ("cpu",), ROWS, HIDDEN, 256)


@pytest.mark.parametrize("mesh_shape", [(2,), (2, 2)])
def test_distributed_tensors(mesh_shape):
    world = torch.Size(mesh_shape).numel()
    processes.run(processes.distributed_tensors, world, "gloo", ("cpu",), ROWS, HIDDEN, 256, mesh_shape)


def test_a_failing_process_fails_the_test():
    """Or the tests above could not."""
    with pytest.raises(torch.multiprocessing.ProcessRaisedException, match="world must be such that"):
        processes.run(processes.split_columns, 2, "gloo", ("cpu",), ROWS, HIDDEN, 64)


class TestShard:
    @pytest.fixture
    def packed(self, inputs):
        return PackedFC1(inputs.fc1_weight_q, inputs.fc1_weight_scale)

    def test_parts_make_the_whole(self, packed, inputs):
        whole = fc1_swiglu_fp8(*inputs)
        for world in (1, 2):
            parts = [shard(packed, rank, world) for rank in range(world)]
            got = [fc1_swiglu_fp8(*inputs[:5], *part) for part in parts]
            assert torch.equal(torch.cat(got, dim=1), whole)
            assert all(isinstance(part, PackedFC1) for part in parts)

    def test_a_part_is_a_copy(self, packed):
        """So that the whole can be freed."""
        part = shard(packed, 0, 2)
        for mine, all_of in zip(part, packed, strict=True):
            assert mine.untyped_storage().nbytes() == all_of.untyped_storage().nbytes() // 2

    @pytest.mark.parametrize(
        ("rank", "world", "match"),
        [
            (2, 2, r"rank must be an int in \[0, 2\); it is 2 \(int\)"),
            (-1, 2, r"rank must be an int in \[0, 2\)"),
            (0.0, 1, r"rank must be an int in \[0, 1\)"),
            (True, 2, "rank must be an int"),
            (0, 0, "world must be a positive int"),
            (0, 4, rf"world must be such that {FFN} / world is a multiple of 64; it is 4 \(int\)"),
            (0, 3, "world must be such that"),
        ],
    )
    def test_refused(self, packed, rank, world, match):
        with pytest.raises(ValueError, match=match):
            shard(packed, rank, world)

    def test_not_a_packed_weight(self, packed):
        with pytest.raises(ValueError, match="packed must be an h3mlp"):
            shard(tuple(packed), 0, 1)
