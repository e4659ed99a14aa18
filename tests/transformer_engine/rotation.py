"""Rotary position embeddings of ``[s, b, h, d]`` or ``[b, s, h, d]``, whose positions start from 0."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.transformer_engine.dtypes import wide


def _quarter_turn(x: Tensor, interleaved: bool) -> Tensor:
    """Pairs ``(a, b)`` become ``(-b, a)``; a pair is two neighbours, or one of each half."""
    if interleaved:
        return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


def _options(options: tuple[Any, ...]) -> tuple[Any, bool]:
    """Layout, and whether pairs are neighbours; newer versions give start positions before them."""
    if isinstance(options[0], Tensor) or options[0] is None:
        start, *options = options  # type: ignore[assignment]
        if start is not None:
            raise NotImplementedError("rotary embeddings with start positions")
    layout, interleaved, lengths, cp_size, *_ = options
    if lengths is not None or cp_size > 1:
        raise NotImplementedError("rotary embeddings of packed or context-parallel sequences")
    return layout, interleaved


def _angles(x: Tensor, freqs: Tensor, layout: Any) -> Tensor:
    """``[s, 1, 1, d]``, for ``[b, s, h, d]`` ``[1, s, 1, d]``."""
    if layout.name.endswith("BSHD"):
        return wide(freqs)[: x.shape[1]].transpose(0, 1)
    return wide(freqs)[: x.shape[0]]


def fused_rope_forward(x: Tensor, freqs: Tensor, *rest: Any) -> Tensor:
    """``freqs`` are ``[s, 1, 1, d]``; what x has beyond d stays as it is."""
    layout, interleaved = _options(rest)
    angles, size = _angles(x, freqs, layout), freqs.shape[-1]
    turned = wide(x[..., :size])
    turned = turned * angles.cos() + _quarter_turn(turned, interleaved) * angles.sin()
    return torch.cat((turned.to(x.dtype), x[..., size:]), -1)


def fused_rope_backward(grad: Tensor, freqs: Tensor, *rest: Any) -> Tensor:
    """The transpose: a quarter turn's is the one back."""
    layout, interleaved = _options(rest)
    angles, size = _angles(grad, freqs, layout), freqs.shape[-1]
    turned = wide(grad[..., :size])
    turned = turned * angles.cos() - _quarter_turn(turned * angles.sin(), interleaved)
    return torch.cat((turned.to(grad.dtype), grad[..., size:]), -1)


FUNCTIONS = {"fused_rope_forward": fused_rope_forward, "fused_rope_backward": fused_rope_backward}
