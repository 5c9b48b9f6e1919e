"""How leaves divide into stacking dims, rows and columns, and what masks choose."""

from __future__ import annotations

import pytest

from jaxtrain.optim.leaves import everything, hidden_matrices, leaf_dims, matrices

TABLE = [
    # axes, stacked dims, rows, columns, matrix, hidden matrix
    ((), 0, (), (), False, False),
    (("embed",), 0, (), (0,), False, False),
    (("layers",), 1, (), (), False, False),
    (("layers", "embed"), 1, (), (1,), False, False),
    (("layers", "heads", "head_dim"), 1, (), (1, 2), False, False),
    (("layers", "experts"), 1, (), (1,), False, False),
    (("layers", "experts", "mlp"), 2, (), (2,), False, False),
    (("vocab", "embed"), 0, (0,), (1,), True, False),
    (("embed", "vocab"), 0, (0,), (1,), True, False),
    (("seq", "embed"), 0, (0,), (1,), True, False),
    (("embed", "classes"), 0, (0,), (1,), True, False),
    (("embed", "mlp"), 0, (0,), (1,), True, True),
    (("layers", "embed", "experts"), 1, (1,), (2,), True, True),
    (("layers", "embed", "heads", "head_dim"), 1, (1,), (2, 3), True, True),
    (("layers", "embed", "kv_heads", "head_dim"), 1, (1,), (2, 3), True, True),
    (("layers", "heads", "head_dim", "embed"), 1, (1, 2), (3,), True, True),
    (("layers", "experts", "embed", "mlp"), 2, (2,), (3,), True, True),
    ((None, "layers", "embed", "mlp"), 2, (2,), (3,), True, True),
    ((None,), 0, (), (0,), False, False),
    ((None, None), 0, (0,), (1,), True, True),
    (("height", "width", "channels", None), 0, (0, 1, 2), (3,), True, True),
]


@pytest.mark.parametrize(("axes", "stacked", "rows", "columns", "matrix", "hidden"), TABLE, ids=str)
def test_dims_and_masks(axes, stacked, rows, columns, matrix, hidden) -> None:
    assert leaf_dims(axes) == (stacked, rows, columns)
    assert matrices(axes) is matrix
    assert hidden_matrices(axes) is hidden
    assert everything(axes) is True
