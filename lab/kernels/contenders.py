"""What ``python -m lab kernels`` compares with: a frozen head, the published passes, other projects' layers.

Next: ``published.py``, ``others.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from lab.kernels.others import Loss, forward_backward, runnable
from lab.kernels.output_layer import OutputLayer
from lab.kernels.published import published_embedding, published_embedding_gradient, published_pass
from lab.timing import Contender
from megatron_vocabpar.layers.numbers import Slopes
from megatron_vocabpar.layers.partition import VocabRange
from megatron_vocabpar.schedule.words.methods import VOCAB_1


def output_contenders(layer: OutputLayer, mean_loss: float) -> tuple[dict[str, Contender], dict[str, str]]:
    """What runs on this shard beside our passes; why the rest does not.

    Args:
        mean_loss: ours; a layer that finds another one is not measured.
    """
    parameter = torch.nn.Parameter(layer.weight.clone())
    inputs = layer.inputs[0]
    others, reasons = runnable(inputs.x, parameter, inputs.targets, mean_loss)
    contenders: dict[str, Contender] = {f"published-{n}": partial(_published, layer, n) for n in (1, 2)}
    contenders["frozen"] = partial(_frozen, layer)
    contenders |= {name: partial(_other, layer, loss, parameter) for name, loss in others.items()}
    return contenders, reasons


def _frozen(layer: OutputLayer, i: int) -> None:
    """vocab-1 without the weight gradient, which a frozen weight does not get."""
    state, softmax = layer.s(i, VOCAB_1)
    state.input_gradient(softmax, Slopes(layer.g))


def _published(layer: OutputLayer, algorithm: int, i: int) -> None:
    x, targets = layer.inputs[i].x, layer.inputs[i].targets
    published_pass(x, layer.weight, targets, layer.g, layer.main_grad, algorithm, out=layer.exponentials)


def _other(layer: OutputLayer, loss: Loss, parameter: Tensor, i: int) -> None:
    forward_backward(loss, layer.inputs[i].x, parameter, layer.inputs[i].targets)


def input_contenders(
    tokens: Sequence[Tensor], weight: Tensor, shard: VocabRange, grad: Tensor, main_grad: Tensor
) -> dict[str, Contender]:
    """The published IF and IB of a shard: dense [n, H], masked where another rank has the token's row.

    Args:
        tokens: [n] ids of each of the rotated inputs.
        weight: [P, H] rows of the shard.
        grad: [n, H] gradient of the embedded tokens.
        main_grad: [P, H], added to in place.
    """
    return {
        "IF": lambda i: published_embedding(tokens[i], weight, shard),
        "IB": lambda i: published_embedding_gradient(tokens[i], grad, shard, main_grad),
    }
