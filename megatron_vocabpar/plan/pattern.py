"""Patterns of layers, Megatron's ``--hybrid-layer-pattern``: ``M-M|[*-]E/*E``.

A layer is one symbol, or several in brackets: ``[*-]`` is attention and then an MLP. A bar ends a stage.
Behind ``/`` stand the layers of a head of multi-token prediction, once for each depth.

Source: Megatron-LM, ``models/hybrid/hybrid_layer_allocation.py``; brackets by its pull request 4942.
Next: ``decoder.py``.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from itertools import accumulate, pairwise

ATTENTION, SCANS, SYMBOLS = "*+D", "MG", "*+DMGE-"
"""Attention (latent, sparse); Mamba and gated delta net; and with them MLPs and experts."""


def layers_in(pattern: str) -> list[str]:
    """The symbols of each layer, without bars and heads: ``M``, ``*-`` and ``E`` of ``M|[*-]E/*E``."""
    return [layer.strip("[]") for layer in _written(pattern)]


def with_bars(pattern: str, counts: Sequence[int]) -> str:
    """The pattern with so many layers on each stage; bars that it has are moved."""
    layers, (_, slash, heads) = _written(pattern), pattern.partition("/")
    stages = ("".join(layers[start:end]) for start, end in pairwise([0, *accumulate(counts)]))
    return "|".join(stages) + slash + heads


def written_in(pattern: str, counts: Sequence[int]) -> str:
    """Megatron's flag for a pattern with so many layers on each stage."""
    return f"--hybrid-layer-pattern {shlex.quote(with_bars(pattern, counts))}"


def check_pattern(pattern: str) -> None:
    """Refuse what Megatron would, by ValueError."""
    layer = rf"([{SYMBOLS}]|\[[{SYMBOLS}]+\])"
    main, *heads = pattern.split("/")
    well_formed = re.fullmatch(rf"({layer}|\|)+(/{layer}+)*", pattern)
    if not well_formed or not layers_in(main) or len(set(heads)) > 1:
        raise ValueError(
            f"{pattern!r} is no pattern of layers; give {' '.join(SYMBOLS)}, groups in [ ], | between "
            "stages, and behind each / the same layers of a head"
        )


def _written(pattern: str) -> list[str]:
    return re.findall(r"\[[^]]*\]|.", pattern.partition("/")[0].replace("|", ""))
