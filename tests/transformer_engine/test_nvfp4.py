"""NVFP4 of the stand-in against a search through all numbers of E2M1 and E4M3, in float64."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.transformer_engine import nvfp4, nvfp4_shards
from tests.transformer_engine.dtypes import DType
from tests.transformer_engine.products import generic_gemm

NUMBERS = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
SCALES = np.array(
    [m / 8 * 2.0**-6 for m in range(8)]
    + [(1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8)]
)[:-1]
"""Without the last code, which is no number."""
SIGNS = torch.tensor([1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1])


def matrix() -> Tensor:
    """16 x 16, of Sylvester's construction, with Transformer Engine's signs of rows."""
    square = torch.ones(1, 1)
    for _ in range(4):
        square = torch.kron(square, torch.tensor([[1.0, 1.0], [1.0, -1.0]]))
    return SIGNS[:, None] * square / 4


def quantized(x: Tensor, **options: Any) -> SimpleNamespace:
    """The attributes of an ``NVFP4Tensor`` by rows and columns."""
    m, k = x.shape
    found = SimpleNamespace(
        shape=x.shape,
        _rowwise_data=torch.zeros(m, k // 2, dtype=torch.uint8),
        _rowwise_scale_inv=torch.zeros(m + 80, k // 16 + 2, dtype=torch.uint8),
        _amax_rowwise=torch.zeros(1),
        _columnwise_data=torch.zeros(k, m // 2, dtype=torch.uint8),
        _columnwise_scale_inv=torch.zeros(k + 96, m // 16 + 1, dtype=torch.uint8),
        _amax_columnwise=torch.zeros(1),
    )
    plain = dict.fromkeys(
        ("with_rht", "with_2d_quantization", "stochastic_rounding", "with_amax_reduction"), False
    )
    nvfp4.quantize(x, SimpleNamespace(**plain | {"rht_matrix": matrix()} | options), found)
    return found


def nearest(x: float, among: np.ndarray) -> float:
    """Of two as near the one with the even code."""
    distances = abs(among - abs(x))
    codes = np.flatnonzero(distances == distances.min())
    return float(np.copysign(among[codes[codes % 2 == 0][0] if len(codes) > 1 else codes[0]], x))


def slow(x: Tensor, height: int) -> np.ndarray:
    """What ``x`` becomes, in blocks of so many rows and 16 columns."""
    values = x.double().numpy()
    unit = abs(values).max() / (6 * 448)
    out = np.empty_like(values)
    for i in range(0, values.shape[0], height):
        for j in range(0, values.shape[1], 16):
            block = values[i : i + height, j : j + 16]
            scale = unit * nearest(abs(block).max() / 6 / unit, SCALES)
            out[i : i + height, j : j + 16] = [
                [scale * nearest(v / scale, NUMBERS) for v in row] for row in block
            ]
    return out


def example(*shape: int, seed: int = 0) -> Tensor:
    """With blocks of many sizes."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    return x * torch.exp(2 * torch.randn(shape[0], 1, generator=generator))


@pytest.mark.parametrize("square", [False, True])
def test_values_are_the_nearest(square: bool) -> None:
    x = example(48, 64)
    found = quantized(x, with_2d_quantization=square)
    height = 16 if square else 1
    np.testing.assert_allclose(nvfp4.plain(found, rowwise=True), slow(x, height), rtol=1e-6)
    np.testing.assert_allclose(nvfp4.plain(found, rowwise=False).t(), slow(x.t(), height), rtol=1e-6)


def test_two_numbers_lie_in_a_byte() -> None:
    x = torch.zeros(16, 16)
    x[0, :4] = torch.tensor([6.0, -0.5, 3.0, -4.0])
    found = quantized(x)
    assert found._rowwise_data[0, :2].tolist() == [0x97, 0xE5]  # lower half first; 8 is the sign
    assert found._rowwise_scale_inv[0, 0] == 0x7E  # 448
    assert not found._rowwise_data[1:].any()


@pytest.mark.parametrize("turned", [False, True])
def test_products_are_those_of_the_values(turned: bool) -> None:
    """Of the gradient of a weight, which sums over rows; transforms of both operands are undone."""
    operands = [example(64, 32).bfloat16(), example(64, 48, seed=1).bfloat16()]
    x, grad = (quantized(each, with_rht=turned) for each in operands)
    found, *_ = generic_gemm(
        *(x, False, grad, True, None, None, int(DType.kFloat32), None, 0, False, None, False),
        *(torch.empty(0), 0, False, False),
    )
    values = [nvfp4.plain(each, rowwise=False).double() for each in (x, grad)]
    expected = values[1].t() @ values[0]
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-6 * float(expected.abs().max()))
    exact = operands[1].double().t() @ operands[0].double()
    assert (found - exact).norm() < 0.3 * exact.norm()
    for operand, value in zip(operands, values, strict=True):
        back = (value.t().reshape(-1, 16) @ matrix().double().t()).view(operand.shape[::-1]).t()
        assert ((back if turned else value) - operand).norm() < 0.15 * operand.double().norm()
        assert not turned or (value - operand).norm() > operand.double().norm()


def test_transforms_are_of_16_bits() -> None:
    with pytest.raises(ValueError, match="not of torch"):
        quantized(example(16, 16), with_rht=True)


@pytest.mark.parametrize("option", ["row_scaled_nvfp4", "nvfp4_use_4over6"])
def test_other_kinds_have_no_stand_in(option: str) -> None:
    with pytest.raises(NotImplementedError, match=option):
        quantized(example(16, 16), **{option: True})


def test_rounding_up_is_as_probable_as_near() -> None:
    x = torch.full((256, 512), 2.2)
    x[:, ::16] = x[::16] = 6  # the largest number, with the largest scale
    first, again = (quantized(x, stochastic_rounding=True) for _ in range(2))
    ways = [nvfp4.plain(first, rowwise=True), nvfp4.plain(first, rowwise=False)]
    for values in ways:
        rest = values[x < 6]
        assert set(rest.round(decimals=5).tolist()) == {2.0, 3.0}
        assert float(rest.mean()) == pytest.approx(2.2, abs=0.01)
        assert (values[x == 6] - 6).abs().max() < 1e-5
    assert torch.equal(first._rowwise_data, again._rowwise_data)
    assert not torch.equal(*ways)


@pytest.mark.parametrize("cut", [1000, 1001])
def test_shards_are_cast_as_the_weight(cut: int) -> None:
    """The second may start in the middle of a byte; columns follow from rows."""
    weight = example(48, 64)
    whole = quantized(weight, with_2d_quantization=True)
    bounds = ((0, cut), (cut, weight.numel()))
    amax, tiles, scales = torch.zeros(1), torch.zeros(3, 4), torch.zeros(3, 4)
    for start, end in bounds:
        part, most = torch.zeros(3, 4), torch.zeros(1)
        shard = weight.flatten()[start:end]
        nvfp4_shards.nvfp4_multi_tensor_compute_partial_amax([shard], [part], [most], [48], [64], [start], 16)
        tiles, amax = torch.maximum(tiles, part), torch.maximum(amax, most)
    encode, stored, found = torch.zeros(1), torch.zeros_like(whole._rowwise_scale_inv), torch.zeros(1)
    nvfp4_shards.nvfp4_compute_global_scale(amax, encode)
    nvfp4_shards.nvfp4_multi_tensor_fused_scale(
        [tiles], [amax], [scales], [stored], [found], [3], [4], [128], 16
    )
    data = torch.zeros_like(whole._rowwise_data)
    for start, end in bounds:
        out = data.view(-1)[start // 2 : (end + 1) // 2]
        shard = weight.flatten()[start:end]
        nvfp4_shards.nvfp4_multi_tensor_2d_partial_cast(
            [shard], [out], [scales], [encode], [48], [64], [start], 16
        )
    assert torch.equal(data, whole._rowwise_data)
    assert torch.equal(stored, whole._rowwise_scale_inv)
    assert torch.equal(found, whole._amax_rowwise)
    turned, turned_scales = (
        torch.zeros_like(whole._columnwise_data),
        torch.zeros_like(whole._columnwise_scale_inv),
    )
    nvfp4_shards.nvfp4_2d_multi_tensor_transpose([data], [turned], [stored], [turned_scales], [48], [64])
    assert torch.equal(turned, whole._columnwise_data)
    assert torch.equal(turned_scales, whole._columnwise_scale_inv)
