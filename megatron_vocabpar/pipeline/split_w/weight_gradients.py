"""W: weight gradients of linear layers, split off from B.

Zero-bubble schedules fill idle time with weight gradients, so B must leave them out. Until W of the
microbatch they are kept as products (``products.py``). Other gradients, such as of norms, stay in B.

Source: Qi et al., Zero Bubble Pipeline Parallelism (2023). Used by ``handlers/stages.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch

from megatron_vocabpar.pipeline.split_w.products import (
    DelayedProducts,
    LeftProduct,
    LocalProducts,
    check_stores,
    computed_in_b,
    has_store,
    is_local,
)

After = Callable[[float, Sequence[torch.nn.Parameter]], None]
"""Called after a product, with the share of the products that are done and the complete parameters."""


class ChunkLayers(NamedTuple):
    """The layers of a chunk that can leave weight gradients: Transformer Engine's, and local linear ones."""

    delaying: list[Any]
    local: list[Any]

    @staticmethod
    def of(chunk: torch.nn.Module) -> ChunkLayers:
        """Found in a walk over all modules."""
        modules = list(chunk.named_modules())
        delaying = [module for _, module in modules if has_store(module)]
        return ChunkLayers(delaying, [module for name, module in modules if is_local(name, module)])


@contextmanager
def weight_gradients_of(
    chunks: Sequence[torch.nn.Module],
    layers: Sequence[ChunkLayers],
    *,
    splits_w: bool,
    planned: bool = False,
) -> Iterator[list[WeightGradients]]:
    """The context of an iteration, in which the pass that the schedule says computes the weight gradients.

    Args:
        chunks: the model chunks of this rank.
        layers: of each.
        splits_w: the schedule has W, for which B leaves them: the context gives what W needs of each chunk.
            Otherwise B computes them, also in layers that were built to delay them, and it gives nothing.
        planned: without W, Megatron's plans of layers run B, and compute what layers delay by themselves.

    Raises:
        ValueError: as ``DelayedProducts``.
        RuntimeError: at its end, if a weight gradient was delayed and never computed.
    """
    gradients: list[WeightGradients] = []
    delaying = [layer for chunk_layers in layers for layer in chunk_layers.delaying]
    try:
        with nullcontext() if splits_w or planned else computed_in_b(delaying):
            gradients.extend(map(WeightGradients, *((chunks, layers) if splits_w else ((), ()))))
            yield gradients
        for of_chunk in gradients:
            of_chunk.check_computed()
        check_stores(delaying)
    finally:
        for of_chunk in gradients:
            of_chunk.restore()  # also those before the first that is refused


class WeightGradients:
    """The weight gradients of a chunk, by microbatch: B runs in ``left_by``, ``compute`` is W.

    Raises:
        ValueError: as ``DelayedProducts``.
    """

    def __init__(self, chunk: torch.nn.Module, layers: ChunkLayers) -> None:
        self._delayed = DelayedProducts(chunk, layers.delaying)
        self._local = LocalProducts(layers.local)
        self._left: dict[int, list[LeftProduct]] = {}
        self._begun = False

    def parameters(self) -> list[torch.nn.Parameter]:
        """The parameters whose gradients W writes."""
        return self._local.parameters() + self._delayed.parameters()

    def restore(self) -> None:
        """Give the layers their own products back."""
        self._local.restore()
        self._delayed.restore()

    def check_computed(self) -> None:
        """Check that W has computed all that B has left.

        Raises:
            RuntimeError: naming the microbatches whose W has not run.
        """
        if self._left:
            raise RuntimeError(
                f"the iteration has ended without W of microbatches {sorted(self._left)}: their weight "
                "gradients are lost; report this with the schedule that ran"
            )

    @contextmanager
    def left_by(self, microbatch: int) -> Iterator[None]:
        """The context of this microbatch's B."""
        with self._delayed.hidden_from_ddp():
            yield
        self._left[microbatch] = self._local.take() + self._delayed.take()

    def compute(self, microbatch: int, after: After = lambda share, complete: None) -> None:
        """W: add this microbatch's weight gradients.

        Args:
            microbatch: whose B has left them.
            after: called after each product, with the share of the products that are done and the parameters
                whose gradients are complete.

        Raises:
            ValueError: if the first microbatch's gradients would later overwrite this one's.
        """
        if self._delayed.overwrite and microbatch > 0 and not self._begun:
            raise ValueError(
                f"W of microbatch {microbatch} before that of 0: layers of Transformer Engine write the "
                "first microbatch's weight gradients over what is there; use a schedule that begins with "
                "it, --no-gradient-accumulation-fusion, or local layers"
            )
        self._begun = True
        products = self._left.pop(microbatch)
        # A layer that runs several times has several products.
        last = {parameter: product for product in products for parameter in product.parameters}
        with torch.no_grad():
            for number, product in enumerate(products, 1):
                product.add()
                complete = [parameter for parameter in product.parameters if last[parameter] is product]
                after(number / len(products), complete)
