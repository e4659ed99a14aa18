"""The split of a logit is exact where it is said to be."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_vocabpar.layers.exponents import (
    EXPONENT_LIMIT,
    NOTHING,
    fraction_power,
    log_of_power,
    power_of_two,
    split_exponent,
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_powers_of_two_are_exact(dtype: torch.dtype) -> None:
    low = -126 if dtype == torch.float32 else -1022
    exponents = torch.arange(low, 128, dtype=dtype)
    expected = torch.tensor([math.ldexp(1.0, int(e)) for e in exponents.tolist()], dtype=dtype)
    assert torch.equal(power_of_two(exponents), expected)
    assert torch.equal(
        power_of_two(torch.tensor([low - 1.0, -1e5, NOTHING], dtype=dtype)), torch.zeros(3, dtype=dtype)
    )


@given(st.floats(-7e5, 7e5, width=32))
def test_split_keeps_the_precision_of_the_logit(y: float) -> None:
    q, r = split_exponent(torch.tensor([y], dtype=torch.float32))
    assert q.item() == round(q.item())
    assert abs(r.item()) <= math.log(2) / 2 + 1e-5 + 6e-8 * abs(y)
    # y, whose own spacing is 6e-2 at 7e5, comes back to 2e-5: the split adds nothing to its rounding.
    assert abs(q.double().item() * math.log(2) + r.double().item() - y) < 4e-7 + 2e-11 * abs(y)
    assert fraction_power(r.clone()).item() == pytest.approx(math.exp(r.item()), rel=3e-7)


def test_infinite_and_undefined_logits() -> None:
    q, r = split_exponent(torch.tensor([-torch.inf, torch.inf, torch.nan]))
    assert q[0] == NOTHING
    assert q[1] == EXPONENT_LIMIT
    powers = fraction_power(r)
    assert powers[0] == 0
    assert powers[1] == torch.inf
    assert powers[2].isnan()


def test_log_of_power_is_accurate_for_large_exponents() -> None:
    exponents = torch.tensor([0.0, 1.0, -14427.0, 14427.0, 288539.0])
    torch.testing.assert_close(
        log_of_power(exponents).double(), exponents.double() * math.log(2), rtol=1e-7, atol=0
    )
