"""Plain PyTorch in place of the compiled kernels of Megatron's Mamba layers and gated delta nets.

``install`` lets Megatron import mamba_ssm, causal_conv1d and fla. A scan runs one token after another, as its
recurrence says: a token's state is the last one's, decayed, and what the token adds. With
``--deterministic-mode`` the delta rule and its convolution are Megatron's own PyTorch.
"""

from __future__ import annotations

import importlib.machinery
import sys
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tests.transformer_engine.unserved import unserved


def scan(x: Tensor, dt: Tensor, decay: Tensor, b: Tensor, c: Tensor, skip: Tensor | None) -> Tensor:
    """The outputs ``[batch, s, heads, d]`` of a state ``[d, n]`` for each head.

    Args:
        x: ``[batch, s, heads, d]``.
        dt: steps, ``[batch, s, heads]``, above 0.
        decay: ``[heads]``, below 0.
        b, c: how inputs enter and how outputs leave, ``[batch, s, heads, n]``.
        skip: what of x is added to the output, ``[heads]`` or ``[heads, d]``.
    """
    state = x.new_zeros(*x.shape[::2], x.shape[3], b.shape[3])
    outputs = []
    for t in range(x.shape[1]):
        added = (dt[:, t, :, None] * x[:, t])[..., None] * b[:, t, :, None]
        state = state * torch.exp(dt[:, t] * decay)[..., None, None] + added
        outputs.append((state * c[:, t, :, None]).sum(-1))
    y = torch.stack(outputs, 1)
    return y if skip is None else y + x * (skip if skip.dim() == 2 else skip[:, None])


def mamba_split_conv1d_scan_combined(
    zxbcdt: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor,
    dt_bias: Tensor,
    A: Tensor,
    D: Tensor | None = None,
    headdim: int | None = None,
    ngroups: int = 1,
    activation: str = "silu",
    seq_idx: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """A Mamba mixer between its projections: ``[batch, s, z + x + b + c + dt]`` to ``[batch, s, x]``."""
    assert (seq_idx, activation) == (None, "silu"), "packed sequences have no stand-in"
    heads, width = len(A), len(conv_weight)
    inner = heads * (headdim or (D.shape[1] if D is not None else 0))
    states = (width - inner) // (2 * ngroups)
    z, xbc, dt = zxbcdt.float().split([inner, width, heads], -1)
    padded = functional.pad(xbc.transpose(1, 2), (conv_weight.shape[1] - 1, 0))
    xbc = functional.conv1d(padded, conv_weight[:, None].float(), conv_bias.float(), groups=width)
    x, b, c = functional.silu(xbc).transpose(1, 2).split([inner, ngroups * states, ngroups * states], -1)
    x = x.unflatten(-1, (heads, -1))
    b, c = (t.unflatten(-1, (ngroups, -1)).repeat_interleave(heads // ngroups, 2) for t in (b, c))
    y = scan(x, functional.softplus(dt + dt_bias), A, b, c, D)
    return (y.flatten(2) * functional.silu(z)).to(zxbcdt.dtype)


class RMSNorm(torch.nn.Module):
    """A norm of each of several groups of channels."""

    def __init__(
        self, hidden_size: int, eps: float, group_size: int, device: Any = None, dtype: Any = None, **_: Any
    ) -> None:
        super().__init__()
        self.eps, self.group = eps, group_size
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        groups = x.float().unflatten(-1, (-1, self.group))
        normed = groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + self.eps)
        return (normed.flatten(-2) * self.weight.float()).to(x.dtype)


def l2norm(x: Tensor, eps: float = 1e-6) -> Tensor:
    return (x.float() * torch.rsqrt(x.float().square().sum(-1, keepdim=True) + eps)).to(x.dtype)


_MODULES: dict[str, dict[str, Any]] = {
    "mamba_ssm": {"__version__": "2.3.0"},
    "mamba_ssm.ops": {},
    "mamba_ssm.ops.triton": {},
    "mamba_ssm.ops.triton.layernorm_gated": {"RMSNorm": RMSNorm},
    "mamba_ssm.ops.triton.ssd_combined": {
        "mamba_split_conv1d_scan_combined": mamba_split_conv1d_scan_combined
    },
    "mamba_ssm.ops.triton.selective_state_update": {},
    "causal_conv1d": {"__version__": "1.6.0"},
    "fla": {"__version__": "0.5"},
    "fla.modules": {},
    "fla.modules.convolution": {},
    "fla.modules.l2norm": {"l2norm": l2norm},
    "fla.ops": {},
    "fla.ops.gated_delta_rule": {},
}


def install() -> None:
    """Let this process, and those that it forks, import them; what is not above raises when it is called."""
    for name, served in _MODULES.items():
        module = sys.modules[name] = ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        vars(module).update(__path__=[], __getattr__=unserved(name), **served)
