"""The loss of a token in terms, and the transformation of its logits before the softmax.

None takes another pass over [n, P]: the row kernel scales and caps the logits, and the terms are made of four
numbers per token (``token_loss.py``). Next: ``numbers.py``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # flags of a launch line are read without torch
    from torch import Tensor


KINDS = ("forward", "reverse", "js")


@dataclass(frozen=True, slots=True)
class Distillation:
    """A divergence D of the student from a teacher, as a part of each token's loss (``divergence.py``).

    Attributes:
        kind: ``forward`` KL(teacher || student), ``reverse`` KL(student || teacher), or ``js``.
        weight: 0 to 1; the loss is ``(1 - weight) * (the other terms) + weight * D``.
        temperature: divides the logits of both; stored log-probabilities are taken as they are.
        mixture: of ``js``, the teacher's part in the mixture.

    Raises:
        ValueError: for values outside these ranges.
    """

    kind: str = "forward"
    weight: float = 1.0
    temperature: float = 1.0
    mixture: float = 0.5

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"distillation {self.kind!r}: choose one of {', '.join(KINDS)}")
        if not 0 <= self.weight <= 1:
            raise ValueError(f"distillation's weight {self.weight}: give 0 to 1")
        if not 0 < self.temperature < math.inf:
            raise ValueError(f"distillation's temperature {self.temperature}: give a positive number")
        if not 0 < self.mixture < 1:
            raise ValueError(f"distillation's mixture {self.mixture}: give more than 0 and less than 1")


@dataclass(frozen=True, slots=True)
class LossTerms:
    """The loss of one token, with y' the transformed logits, V the true ids and t the target:

        y'   = softcap * tanh(logit_scale * y / softcap)       (logit_scale * y without a softcap)
        loss = lse - (1 - label_smoothing) y'_t - label_smoothing / V * sum_j y'_j + z_loss * lse^2
        loss = (1 - weight) * loss + weight * D                       with a distillation
        lse  = logsumexp_j y'_j

    With the defaults it is the cross-entropy. Label smoothing is PyTorch's: the target keeps its part of
    the uniform distribution.

    Attributes:
        label_smoothing: 0 to below 1.
        z_loss: weight of the squared logsumexp, 0 or more.
        logit_scale: positive factor of the logits.
        softcap: positive bound of the logits' size, or None.
        distillation: a divergence from a teacher, or None.

    Raises:
        ValueError: for values outside these ranges; for label smoothing of softcapped logits, whose
            gradient is no rank-1 term.
    """

    label_smoothing: float = 0.0
    z_loss: float = 0.0
    logit_scale: float = 1.0
    softcap: float | None = None
    distillation: Distillation | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.label_smoothing < 1:
            raise ValueError(f"label smoothing {self.label_smoothing}: give 0 or more, and less than 1")
        if not 0 <= self.z_loss < math.inf:
            raise ValueError(f"z-loss {self.z_loss}: give a finite weight of 0 or more")
        if not 0 < self.logit_scale < math.inf:
            raise ValueError(f"logit scale {self.logit_scale}: give a positive, finite factor")
        if self.softcap is not None and not 0 < self.softcap < math.inf:
            raise ValueError(f"softcap {self.softcap}: give a positive, finite bound, or None")
        if self.softcap is not None and self.label_smoothing:
            raise ValueError(
                f"label smoothing {self.label_smoothing} with softcap {self.softcap}: the gradient of "
                "the smoothed part then differs in every logit; use one of the two"
            )

    def transform(self, logits: Tensor) -> Tensor:
        """y' [...] of the logits y."""
        if self.logit_scale != 1:
            logits = logits * self.logit_scale
        return logits if self.softcap is None else self.softcap * (logits / self.softcap).tanh()

    @property
    def is_cross_entropy(self) -> bool:
        """Whether the loss is the cross-entropy of the transformed logits alone."""
        return not (self.label_smoothing or self.z_loss or self.distillation)

    @property
    def needs_mean(self) -> bool:
        """Whether the loss depends on the mean logit, which S then sends."""
        return self.label_smoothing > 0


PLAIN = LossTerms()
"""Cross-entropy and nothing else."""
