"""W: weight gradients of linear layers, split off from B.

Zero-bubble schedules fill idle time with weight gradients, so B must leave them out. Until W of the
microbatch they are kept as products: of megatron-core's own linear layers (``local_products.py``) and of
Transformer Engine's (``delayed_products.py``). Other gradients (norms, position embeddings) stay in B.

Source: Qi et al., Zero Bubble Pipeline Parallelism (2023). Used by ``stages.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from megatron_vocabpar.pipeline.split_w.delayed_products import DelayedProducts
from megatron_vocabpar.pipeline.split_w.left_product import LeftProduct
from megatron_vocabpar.pipeline.split_w.local_products import LocalProducts

After = Callable[[float, Sequence[torch.nn.Parameter]], None]
"""Called after a product, with the share of the products that are done and the complete parameters."""


@contextmanager
def split_weight_gradients(chunks: Sequence[torch.nn.Module]) -> Iterator[list[WeightGradients]]:
    """In this context the backward of these chunks leaves out the weight gradients."""
    gradients: list[WeightGradients] = []
    try:
        gradients.extend(map(WeightGradients, chunks))  # if one is refused, those before it are restored
        yield gradients
    finally:
        for each in gradients:
            each.restore()


class WeightGradients:
    """The weight gradients of a chunk, by microbatch: B runs in ``left_by``, ``compute`` is W.

    Raises:
        ValueError: as ``DelayedProducts``.
    """

    def __init__(self, chunk: torch.nn.Module) -> None:
        self._delayed = DelayedProducts(chunk)
        self._local = LocalProducts(chunk)
        self._left: dict[int, list[LeftProduct]] = {}
        self._begun = False

    def parameters(self) -> list[torch.nn.Parameter]:
        """The parameters whose gradients W writes."""
        return self._local.parameters() + self._delayed.parameters()

    def restore(self) -> None:
        """Give the layers their own products back."""
        self._local.restore()
        self._delayed.restore()

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
