"""How torch's DTensor splits the functional operators. Imported where there is a DTensor: importing it takes 0.6 s."""

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

from .. import check, contract


@register_sharding(torch.ops.h3mlp.fc1_swiglu_fp8.default)
def _fc1_ways(_x, _x_norm_weight, _scale, _shift, index, _weight_q, _weight_scale, *options):
    """Of the output and of each argument; a mesh dimension takes one of these, whichever moves the least."""

    def way(out, rows, weight):
        tables, index_rows = (None, None) if index is None else (Replicate(), rows)
        return [out], [rows, Replicate(), tables, tables, index_rows, weight, weight, *(None for _ in options)]

    return [
        way(Replicate(), Replicate(), Replicate()),
        way(Shard(0), Shard(0), Replicate()),  # rows to rows
        way(Shard(1), Replicate(), Shard(0)),  # weight rows to output columns
    ]


@register_sharding(torch.ops.h3mlp.mlp_fp8.default)
def _mlp_ways(_x, _x_norm_weight, _scale, _shift, index, *others):
    """Rows alone: with FC1's columns split, a row's scale of y would be that of a part, and other bits come out."""
    options = others[6:]

    def way(rows):
        tables, index_rows = (None, None) if index is None else (Replicate(), rows)
        operands = [rows, Replicate(), tables, tables, index_rows, tables, rows, *[Replicate()] * 4]
        return [rows], [*operands, *(None for _ in options)]

    return [way(Replicate()), way(Shard(0))]


def refuse_buffers(inputs: tuple, given: contract.FC1Buffers | contract.MLPBuffers) -> None:
    """Where an argument is a DTensor: it might redistribute a buffer, and a copy would be written.

    Raises:
        ValueError: there is a buffer; says which.
    """
    if any(isinstance(value, DTensor) for value in (*inputs, *given)):
        for name, value in given._asdict().items():
            if value is not None:
                check.refuse(name, "None, since there are DTensors among the arguments", value)
