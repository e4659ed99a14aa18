"""The stand-in's scan beside the same as one product of all pairs of tokens."""

from __future__ import annotations

import torch

from tests.transformer_engine.state_space import scan


def test_a_scan_is_a_product_of_all_pairs() -> None:
    draw = torch.Generator().manual_seed(1)
    x, b, c = (torch.randn(2, 9, 3, size, generator=draw, dtype=torch.float64) for size in (5, 4, 4))
    dt = torch.rand(2, 9, 3, generator=draw, dtype=torch.float64)
    decay, skip = torch.tensor([-0.3, -1.0, -2.0]).double(), torch.tensor([0.5, 1.0, 2.0]).double()
    logs = (dt * decay).cumsum(1)
    between = (logs[:, :, None] - logs[:, None]).exp()  # from each token to each later one
    pairs = torch.einsum("bthn,buhn->btuh", c, b) * between * torch.ones(9, 9).tril()[:, :, None]
    expected = torch.einsum("btuh,buh,buhd->bthd", pairs, dt, x) + skip[:, None] * x
    torch.testing.assert_close(scan(x, dt, decay, b, c, skip), expected)
