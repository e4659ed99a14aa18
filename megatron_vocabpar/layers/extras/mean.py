"""The mean logit, which label smoothing takes: ``(1/V) sum_j Y_j``, j over the true ids.

A shard sends the sum of its logits: that is x times the sum of its rows, where no softcap bends them, or the
row kernel's. The slope g adds ``g / V`` to every dY_j, so dX gets ``g / V`` times the sum of the rows.
"""

from __future__ import annotations

from functools import cached_property

from torch import Tensor

from megatron_vocabpar.layers.extras.extra import Extra
from megatron_vocabpar.layers.gemm import result_dtype
from megatron_vocabpar.layers.kernels.reference import LOGIT_SUM
from megatron_vocabpar.layers.numbers import Softmax
from megatron_vocabpar.layers.operands import Tokens
from megatron_vocabpar.layers.partition import VocabRange


class Mean(Extra):
    """The mean logit.

    Args:
        vocab_size: V.
        weight: [P, H] of this shard, whose true rows are summed once, when S first asks; None: the row kernel
            sums the logits.
        shard: the rows of the weight.
        logit_scale: factor of the logits.
    """

    name = "mean"
    columns = 1

    def __init__(
        self,
        vocab_size: int,
        weight: Tensor | None = None,
        shard: VocabRange | None = None,
        logit_scale: float = 1.0,
    ) -> None:
        self._vocab_size, self._logit_scale = vocab_size, logit_scale
        self._weight, self._shard = weight, shard
        self.row_column = LOGIT_SUM if weight is None else None

    @cached_property
    def _weight_sum(self) -> Tensor:
        """[H] fp32 (fp64 for fp64)."""
        assert self._weight is not None
        assert self._shard is not None
        return self._weight[: self._shard.valid_rows].sum(0, dtype=result_dtype(self._weight.dtype))

    def keep(self, tokens: Tokens) -> Tensor:
        weight_sum = self._weight_sum
        return (tokens.x.to(weight_sum.dtype) @ weight_sum).mul_(self._logit_scale).unsqueeze(1)

    def join(self, statistics: Tensor, columns: Tensor, softmax: Softmax) -> Tensor:
        return columns.squeeze(2).sum(0).div_(self._vocab_size)

    def uniform(self, slope: Tensor) -> Tensor:
        return slope / self._vocab_size

    def bound(self, slope: Tensor, vocab_size: int) -> Tensor:
        return slope.abs()

    def add_input_gradient_(self, grad: Tensor, slope: Tensor) -> None:
        grad.addr_(self.uniform(slope), self._weight_sum)

    def add_weight_gradient_(self, main_grad: Tensor, slope: Tensor, tokens: Tokens) -> None:
        uniform = self.uniform(slope)
        main_grad[: tokens.shard.valid_rows].add_(uniform @ tokens.x.to(uniform.dtype))
