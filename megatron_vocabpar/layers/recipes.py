"""The recipes of 8-bit products as data: the flags name them where no torch is. Standard library only.

Next: ``fp8.py``.
"""

from __future__ import annotations

from dataclasses import dataclass

_BLOCK = 32


@dataclass(frozen=True, slots=True)
class Fp8Recipe:
    """How a matrix is made of 8-bit numbers.

    Attributes:
        name: of the recipe.
        block: entries of a row that share a scale; None: all of them.
        multiple: what hidden size and rows of a shard must be divisible by: the library's loads are of 16
            bytes, and a block is whole.
        keeps_exponentials: S stores the exponentials in 8 bits; else in the operands' dtype.
        capability: the least compute capability of a GPU that multiplies such numbers.
    """

    name: str
    block: int | None
    multiple: int
    keeps_exponentials: bool
    capability: tuple[int, int]


ROW = Fp8Recipe("row", None, 16, True, (8, 9))
MXFP8 = Fp8Recipe("mxfp8", _BLOCK, _BLOCK, False, (10, 0))
RECIPES = {recipe.name: recipe for recipe in (ROW, MXFP8)}
