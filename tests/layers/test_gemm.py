"""Products that are added in parts: each part of the result comes from its own rows."""

from __future__ import annotations

import pytest
import torch

from megatron_vocabpar.layers.fp8 import E4M3, Fp8Weight
from megatron_vocabpar.layers.gemm import add_product_, row_chunks
from megatron_vocabpar.layers.partition import VocabRange

ROWS, WIDTH = 200, 131_072
"""64 rows of float32 are 32 MiB, which is a part: four of them, the last one shorter."""


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("factor", [None, 0.5])
def test_every_part_of_a_product_is_added(dtype: torch.dtype, factor: float | None) -> None:
    assert len(row_chunks(ROWS, WIDTH)) == 4
    numbers = torch.arange(ROWS) % 61  # so that sums stay below 2^24, and are exact in any order
    a = numbers.to(dtype).unsqueeze(1).expand(ROWS, WIDTH)
    out = torch.ones(ROWS, 1)
    add_product_(
        out, a, torch.full((WIDTH, 1), 2.0, dtype=dtype), None if factor is None else torch.tensor([factor])
    )
    assert torch.equal(out[:, 0], 1 + (factor or 1) * 2 * WIDTH * numbers)


@pytest.mark.parametrize("factor", [None, 0.5])
def test_every_part_of_an_8_bit_weight_gradient_is_added(factor: float | None) -> None:
    weight = Fp8Weight.of(torch.zeros(ROWS + 24, 32), VocabRange(0, ROWS + 24, ROWS))
    numbers = torch.tensor([0.5, 1, 1.5, 2, 3, 4, 6, 8, 12, 16])  # exact in e4m3
    ids = numbers[torch.arange(ROWS + 24) ** 2 % 97 % 10]  # of one id in all tokens; other ones 64 ids away
    e = ids.to(E4M3).expand(WIDTH, ROWS + 24)
    x = torch.ones(WIDTH, 1).expand(WIDTH, 2).bfloat16()
    main_grad = torch.ones(ROWS + 24, 2)
    weight.add_weight_gradient_(main_grad, e, x, ROWS, None if factor is None else torch.tensor([factor]))
    assert torch.equal(main_grad[:ROWS, 0], 1 + (factor or 1) * WIDTH * ids[:ROWS])
    assert torch.equal(main_grad[ROWS:], torch.ones(24, 2))
