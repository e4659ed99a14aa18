"""The recipes of 8-bit products, for flags that are read without torch.

Standard library only.

Next: ``fp8.py``.
"""

from __future__ import annotations

from dataclasses import dataclass

_BLOCK = 32


@dataclass(frozen=True, slots=True)
class Fp8Recipe:
    """How a matrix is made of 8-bit numbers.

    Attributes:
        name: as flags write it.
        block: entries of a row that share a scale; None for the whole row.
        multiple: divides hidden size and rows of a shard: the library loads 16 bytes, and blocks are whole.
        keeps_exponentials: S stores the exponentials in 8 bits, not in the operands' dtype.
        capability: the least compute capability of a GPU with such products.
    """

    name: str
    block: int | None
    multiple: int
    keeps_exponentials: bool
    capability: tuple[int, int]


ROW = Fp8Recipe("row", None, 16, True, (8, 9))
MXFP8 = Fp8Recipe("mxfp8", _BLOCK, _BLOCK, False, (10, 0))

RECIPES = {recipe.name: recipe for recipe in (ROW, MXFP8)}
