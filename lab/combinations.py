"""Which flags the accepted recipes set together, and the case of the tests that trains with them.

``tests/megatron_lm/test_recipe_cases.py`` trains a shrunk model with each combination that is frequent,
beside stock; ``recipes.py`` prints the table.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron_vocabpar.megatron_lm.layouts import model_chunks

if TYPE_CHECKING:
    from lab.recipes import Recipe

FREQUENT = 5
"""Recipes that make a combination frequent."""

PRECISIONS = {"bf16": "bf16", "fp8cs": "tensorwise", "fp8sc": "blockwise", "fp8mx": "mxfp8", "nvfp4": "nvfp4"}
"""Of the word in a recipe's name, the precision: in few bits the name of Megatron's recipe for it."""


@dataclass(frozen=True, order=True)
class Combination:
    """Flags that reach the schedule or the vocabulary layers.

    Attributes:
        family: of our flags.
        layout: ``even``, ``counted`` (the vocabulary layers count as layers) or ``by hand``.
        feed_forward: ``dense``, or the dispatcher of the experts' tokens.
        recomputed: modules, separated by spaces; empty without.
        heads: for further tokens.
        gathered: ``--overlap-param-gather``, with ``--overlap-grad-reduce``.
        graphs: parts of layers in CUDA graphs of Transformer Engine, separated by spaces; empty without.
        precision: a value of ``PRECISIONS``; empty for a combination of the others alone.
    """

    family: str
    layout: str
    feed_forward: str
    recomputed: str
    heads: int
    gathered: bool
    graphs: str
    precision: str = ""

    def __str__(self) -> str:
        words = [self.family, f"layout {self.layout}", self.feed_forward]
        words += [f"recompute {self.recomputed}"] if self.recomputed else []
        words += [f"{self.heads} MTP head"] if self.heads else []
        words += ["overlapped gather and reduce"] if self.gathered else []
        words += [f"CUDA graphs of {self.graphs}"] if self.graphs else []
        return ", ".join([*words, *([self.precision] if self.precision else [])])


def combination(recipe: Recipe, with_precision: bool) -> Combination:
    """What a recipe sets."""
    settings = vars(recipe.arguments)
    words = recipe.flags.split()
    family = "1f1b" if model_chunks(recipe.arguments) == 1 else "interleaved"
    if "--vocab-parallel-family" in words:
        family = words[words.index("--vocab-parallel-family") + 1]
    layout = "counted" if settings["account_for_embedding_in_pipeline_split"] else "even"
    selective = settings["recompute_granularity"] == "selective"
    precision = next(PRECISIONS[word] for word in recipe.name.split("_") if word in PRECISIONS)
    return Combination(
        family,
        "by hand" if settings["pipeline_model_parallel_layout"] else layout,
        settings["moe_token_dispatcher_type"] if settings["num_experts"] else "dense",
        " ".join(settings["recompute_modules"]) if selective else settings["recompute_granularity"] or "",
        settings["mtp_num_layers"] or 0,
        bool(settings["overlap_param_gather"]),
        " ".join(settings["cuda_graph_modules"] or ()),
        precision if with_precision else "",
    )


def frequent(recipes: Sequence[Recipe]) -> list[tuple[Combination, int]]:
    """Combinations of accepted recipes, without the precision and with it, and how many have them."""
    accepted = [recipe for recipe in recipes if not recipe.problems]
    counts = Counter(combination(recipe, each) for recipe in accepted for each in (False, True))
    return [(found, count) for found, count in sorted(counts.items()) if count >= FREQUENT]


def table(recipes: Sequence[Recipe]) -> Iterator[str]:
    """Its lines."""
    yield "| set together by five recipes or more | recipes | a case of the test |"
    yield "| --- | --- | --- |"
    for found, count in frequent(recipes):
        shown = "yes"
        if found.feed_forward == "flex":
            shown += ", with `alltoall`: DeepEP and HybridEP are kernels"
        if found.graphs:
            shown += "; graphs over a stand-in"
        yield f"| {found} | {count} | {shown} |"
