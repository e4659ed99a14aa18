"""A handle in place of logits: it has the log-probability and the entropy of each token, and no more.

The pipeline never forms logits. A framework's code that divides them by a temperature and asks for
log-probabilities or entropies needs none: the handle keeps the temperature, and answers. It is asked twice.
Before the iteration there is no answer, and the exception ``Wanted`` says what the pipeline must compute;
afterwards there is one.

Next: ``steps.py``, which asks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_REMEDY = (
    "vocabulary parallelism forms no logits; they can be divided by a temperature and given to the "
    "framework's function of log-probabilities or entropies. Use its loss without this step, or train "
    "without vocabulary parallelism"
)


class LogitsError(AttributeError, ValueError):
    """A handle was asked for what needs logits; an AttributeError too, so that ``hasattr`` works."""

    def __init__(self, what: str) -> None:
        super().__init__(f"{what}: {_REMEDY}")


@dataclass(frozen=True)
class TokenRequest:
    """The numbers that a framework asks for, of the tokens of one microbatch.

    Attributes:
        labels: target ids, int64, in the tokens' shape.
        temperature: divides the logits.
        entropy: whether it asked for entropies too.
        entropy_gradient: whether a loss may depend on them.
    """

    labels: Tensor
    temperature: float = 1.0
    entropy: bool = False
    entropy_gradient: bool = False


class Wanted(BaseException):
    """Ends a framework's code when it asks for unknown numbers; ``except Exception`` does not catch it."""

    def __init__(self, request: TokenRequest) -> None:
        super().__init__()
        self.request = request


@dataclass(frozen=True)
class Answer:
    """The numbers of every token, float32, in any shape with the tokens' order; NaN if not asked for.

    In training log-probabilities have a gradient, entropies if it was asked for.
    """

    logprobs: Tensor
    entropy: Tensor | None = None


class _Sum:
    """The sum of all logits: loss functions multiply it by 0, to give a loss without tokens a gradient."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer

    def __rmul__(self, factor: Any) -> Tensor:
        if isinstance(factor, Tensor) or factor != 0:
            raise LogitsError(f"{factor} times the sum of the logits")
        return self._answer.logprobs.flatten()[:0].sum()

    __mul__ = __rmul__


class _Shaped:
    """The methods of a tensor's shape."""

    shape: torch.Size

    def size(self, dim: int | None = None) -> torch.Size | int:
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        return len(self.shape)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def __len__(self) -> int:
        return self.shape[0]


class LogitsHandle(_Shaped):
    """Stands for logits [..., P] float32 of tokens [...].

    Args:
        tokens: the tokens' shape, ``(b, s)`` as the model returns them.
        width: P, the ids of a tensor-parallel rank without vocabulary parallelism.

    Raises:
        LogitsError: a ValueError, by everything that needs logits.
    """

    dtype = torch.float32
    requires_grad = True

    def __init__(
        self, tokens: tuple[int, ...], width: int, device: torch.device, answer: Answer | None = None
    ) -> None:
        self.shape = torch.Size((*tokens, width))
        self.device = device
        self._answer = answer
        self._temperatures = torch.ones((1,) * len(tokens), dtype=torch.float64, device=device)
        self._wanted: set[str] = set()  # shared with handles made of this one

    def _like(self, tokens: tuple[int, ...], temperatures: Tensor | None = None) -> LogitsHandle:
        like = LogitsHandle(tokens, self.shape[-1], self.device, self._answer)
        like._wanted = self._wanted
        like._temperatures = self._temperatures if temperatures is None else temperatures
        return like

    def clone(self) -> LogitsHandle:
        return self._like(self.shape[:-1])

    contiguous = clone

    def squeeze(self, dim: int) -> LogitsHandle:
        """Without dimension ``dim`` of the tokens, if its size is 1."""
        dim = dim % len(self.shape)
        if dim == len(self.shape) - 1:
            raise LogitsError("squeeze of the ids")
        tokens = self.shape[:-1]
        if tokens[dim] != 1:
            return self._like(tokens)
        return self._like(tokens[:dim] + tokens[dim + 1 :], self._temperatures.squeeze(dim))

    def unsqueeze(self, dim: int) -> LogitsHandle:
        """With one more dimension of size 1, before the ids."""
        dim = dim % (len(self.shape) + 1)
        if dim == len(self.shape):
            raise LogitsError("unsqueeze behind the ids")
        tokens = self.shape[:-1]
        return self._like((*tokens[:dim], 1, *tokens[dim:]), self._temperatures.unsqueeze(dim))

    def div(self, temperature: Tensor | float) -> LogitsHandle:
        """The logits divided by one positive number, or by one a token, ``[..., 1]``."""
        return self._like(self.shape[:-1], _divided(self._temperatures, temperature, self.shape[:-1]))

    __truediv__ = div

    def div_(self, temperature: Tensor | float) -> LogitsHandle:
        """``div`` in place."""
        self._temperatures = _divided(self._temperatures, temperature, self.shape[:-1])
        return self

    def logprobs(self, labels: Tensor) -> Tensor:
        """Log-probability of each label, in its shape.

        Raises:
            ValueError: for labels of another shape than the tokens.
            Wanted: if there is no answer yet.
        """
        if labels.shape != self.shape[:-1]:
            raise ValueError(
                f"labels of shape {tuple(labels.shape)}: the tokens have {tuple(self.shape[:-1])}"
            )
        if self._answer is None:
            wanted = dict.fromkeys(self._wanted, True)
            raise Wanted(TokenRequest(labels, _one_temperature(self._temperatures, labels), **wanted))
        return self._answer.logprobs.view(labels.shape)

    def entropy(self, gradient: bool = True) -> Tensor:
        """Entropy of each token in nats; zeros if there is no answer yet.

        Args:
            gradient: whether a loss may depend on it; else it is a metric.

        Raises:
            LogitsError: if log-probabilities were asked for first, without entropies.
        """
        if self._answer is None:
            self._wanted |= {"entropy", "entropy_gradient"} if gradient else {"entropy"}
            return torch.zeros(self.shape[:-1], device=self.device)
        if self._answer.entropy is None:
            raise LogitsError("entropy that was asked for after the log-probabilities")
        entropy = self._answer.entropy.view(self.shape[:-1])
        return entropy if gradient else entropy.detach()

    def sum(self, *dims: Any, **options: Any) -> _Sum:
        """The sum of all logits, which can only be multiplied by 0."""
        if dims or options or self._answer is None:
            raise LogitsError("logits.sum")
        return _Sum(self._answer)

    def __getattr__(self, name: str) -> Any:
        raise LogitsError(f"logits.{name}")

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], *_: Any, **__: Any) -> Any:
        raise LogitsError(f"{getattr(func, '__name__', func)} of logits")


def _refuse(name: str) -> Callable[..., Any]:
    def refuse(*_: Any) -> Any:
        raise LogitsError(f"logits.{name}")

    return refuse


_OPERATORS = (
    *("add", "radd", "sub", "rsub", "mul", "rmul", "rtruediv", "neg", "pow", "matmul"),
    *("getitem", "setitem", "iter", "lt", "gt", "le", "ge"),
)
for _name in _OPERATORS:
    setattr(LogitsHandle, f"__{_name}__", _refuse(f"__{_name}__"))


def _divided(temperatures: Tensor, divisor: Tensor | float, tokens: tuple[int, ...]) -> Tensor:
    """Temperatures of logits that are divided: by one number, or by one for each token ([..., 1])."""
    divisor = torch.as_tensor(divisor, dtype=torch.float64, device=temperatures.device)
    if divisor.numel() == 1:
        return temperatures * _positive(float(divisor))
    if divisor.shape == (*tokens, 1):
        return temperatures * divisor.squeeze(-1)
    raise ValueError(
        f"a temperature of shape {tuple(divisor.shape)} for tokens {tuple(tokens)}: give one number, or one "
        "a token with a last dimension of 1"
    )


def _one_temperature(temperatures: Tensor, labels: Tensor) -> float:
    """The temperature that all tokens with a label share; padding may have another."""
    everyone = temperatures.expand(labels.shape)
    labelled = everyone[labels >= 0].unique().tolist() or [float(everyone.max())]
    if len(labelled) > 1:
        raise ValueError(
            f"temperatures {labelled} in one microbatch: vocabulary parallelism takes one for all tokens of "
            "an iteration; sample them with one temperature"
        )
    return _positive(labelled[0])


def _positive(temperature: float) -> float:
    if not 0 < temperature < float("inf"):
        raise ValueError(f"temperature {temperature}: give a positive number")
    return temperature
