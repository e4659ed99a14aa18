"""The same layer on a CUDA device, whose library products differ from the CPU's."""

from __future__ import annotations

import pytest
import torch

from tests.support.output_layer import SPLITS, TOLERANCE, V, batch

from . import reference
from .shards import METHODS, run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("ranges", SPLITS.values(), ids=SPLITS.keys())
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_equals_the_unsharded_layer_twice_the_same(method: str, ranges, dtype: torch.dtype) -> None:
    inputs = batch(dtype)
    first, second = (run(method, *(tensor.cuda() for tensor in inputs), ranges) for _ in range(2))
    loss, dx, dw = reference.output_layer(*inputs)
    torch.testing.assert_close(first.loss.cpu().double(), loss, rtol=1e-6, atol=1e-6)
    assert reference.relative_error(first.dx.cpu(), dx) < TOLERANCE[dtype]
    assert reference.relative_error(first.dw[:V].cpu(), dw) < TOLERANCE[dtype]
    assert (first.dw[V:] == 0).all()
    for one, other in ((first.loss, second.loss), (first.dx, second.dx), (first.dw, second.dw)):
        assert torch.equal(one, other)
