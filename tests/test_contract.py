import numpy_contract as oracle
import torch

from h3mlp import contract


def test_dimensions_are_the_models():
    assert (contract.HIDDEN, contract.FFN, contract.FC1_ROWS, contract.ADALN_ROWS) == (5376, 14336, 28672, 9)
    assert contract.HIDDEN % contract.HIDDEN_MULTIPLE == 0
    assert contract.FFN % contract.FFN_MULTIPLE == 0


def test_packed_rows_are_a_permutation():
    rows = sorted(oracle.packed_row(c, up) for c in range(contract.FFN) for up in (0, 1))
    assert rows == list(range(contract.FC1_ROWS))


def test_row_order_is_a_note_on_one_tensor_object():
    t = torch.zeros(4)
    assert contract.row_order(t) is None
    assert contract.tag_row_order(t, contract.PACKED) is t
    assert contract.row_order(t) == contract.PACKED
    assert contract.row_order(t.clone()) is None
