"""Prints which pipeline recipes of Megatron Bridge we train, by our own rules, and with which flags.

    python -m lab page recipes

The first table is in ``docs/frameworks.md`` too.

``recipes.json`` has what each recipe sets, as ``tests/frameworks/read_recipes.py`` has read it. The verdict
is that of ``frameworks/bridge.py``, which a run through Bridge asks too.

``tests/megatron_lm/test_recipe_cases.py`` trains a shrunk model with each combination of flags that accepted
recipes frequently set together, beside stock.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from megatron_vocabpar.frameworks.bridge import BRIDGE
from megatron_vocabpar.megatron_lm.flags import config_from_argv
from megatron_vocabpar.megatron_lm.layouts import model_chunks
from megatron_vocabpar.megatron_lm.rules.check import said_of
from megatron_vocabpar.pipeline.rules.rule import IMPOSSIBLE

_PATH = Path(__file__).with_name("recipes.json")


class Settings(SimpleNamespace):
    """What a recipe sets of the arguments that rules read; an error for one that the file lacks.

    A LookupError, which ``getattr`` with a default does not turn into that default.
    """

    def __getattr__(self, name: str) -> Any:
        raise LookupError(f"{name}: a rule reads it since recipes.json was written; write that again")


@dataclass(frozen=True)
class Recipe:
    """A recipe and our verdict.

    Attributes:
        name: of its function, without ``_config``.
        arguments: what it sets, by the names of Megatron's arguments.
        unread: fields that have not been read.
        bridge_says: why Bridge's own check refuses its recipe; None if it does not.
    """

    name: str
    arguments: SimpleNamespace
    unread: tuple[str, ...]
    bridge_says: str | None

    @property
    def flags(self) -> str:
        """Our flags for it: the family of its number of chunks, and a plan that stays where graphs are."""
        if getattr(self.arguments, "overlap_moe_expert_parallel_comm", False):
            family = "1f1b-overlap"
        else:
            family = "1f1b" if model_chunks(self.arguments) == 1 else "interleaved"
        words = [] if family == "1f1b" else ["--vocab-parallel-family", family]
        graphs = self.arguments.cuda_graph_impl not in (None, "none")
        return " ".join([*words, *(["--vocab-parallel-profile-iterations", "0"] if graphs else [])])

    @property
    def problems(self) -> list[str]:
        """Why it is refused; empty if it runs."""
        config = config_from_argv(["--enable-vocab-parallel", *self.flags.split()])
        return said_of(self.arguments, config, BRIDGE)[IMPOSSIBLE]


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


def combinations_table(recipes: Sequence[Recipe]) -> Iterator[str]:
    """The lines of the table of flags that are frequently set together."""
    yield "| set together by five recipes or more | recipes | a case of the test |"
    yield "| --- | --- | --- |"
    for found, count in frequent(recipes):
        shown = "yes"
        if found.feed_forward == "flex":
            shown += ", with `alltoall`: DeepEP and HybridEP are kernels"
        if found.graphs:
            shown += "; graphs over a stand-in"
        yield f"| {found} | {count} | {shown} |"


def recipes() -> tuple[str, list[Recipe]]:
    """The tag of Bridge and its recipes."""
    file = json.loads(_PATH.read_text("utf-8"))
    return file["tag"], [_recipe(name, file["shared"] | own) for name, own in file["recipes"].items()]


def _recipe(name: str, settings: dict[str, Any]) -> Recipe:
    unread, said = tuple(settings.pop("unread")), settings.pop("bridge_says")
    return Recipe(name, Settings(**settings), unread, said)


def models() -> Iterator[str]:
    """The table of ``docs/frameworks.md``: the models with a refused recipe, and why."""
    _, read = recipes()
    yield "| recipes of | accepted | refused for |"
    yield "| --- | --- | --- |"
    named: dict[str, list[Recipe]] = {}
    for recipe in sorted(read, key=lambda each: each.name):
        named.setdefault(recipe.name[: recipe.name.index("gpu_")].rpartition("_")[0], []).append(recipe)
    for name, of_model in named.items():
        refused = [recipe for recipe in of_model if recipe.problems]
        if not refused:
            continue
        reasons = Counter(problem.partition(": ")[0] for recipe in refused for problem in recipe.problems)
        why = ", ".join(f"{_as_code(reason)} ({count})" for reason, count in reasons.most_common())
        yield f"| `{name}` | {len(of_model) - len(refused)} of {len(of_model)} | {why} |"


def page() -> Iterator[str]:
    """The lines that are printed: models, reasons, what is tested, and every recipe with its flags."""
    tag, read = recipes()
    refused = [recipe for recipe in read if recipe.problems]
    reasons = Counter(line for recipe in refused for line in recipe.problems)
    yield f"# Recipes of Megatron Bridge {tag}"
    yield ""
    yield f"Of {len(read)} recipes {len(read) - len(refused)} are accepted."
    yield ""
    yield from models()
    yield ""
    yield "| refused, by reason (some for several) | recipes |"
    yield "| --- | --- |"
    for reason, count in reasons.most_common():
        yield f"| {_shown(reason)} | {count} |"
    yield ""
    yield "What five or more accepted recipes set together, and whether test_recipe_cases.py trains with it:"
    yield ""
    yield from combinations_table(read)
    yield ""
    yield "| recipe | verdict | `VOCAB_PARALLEL_FLAGS` |"
    yield "| --- | --- | --- |"
    for recipe in sorted(read, key=lambda each: each.name):
        verdict = "; ".join(f"refused: {problem.partition(': ')[0]}" for problem in recipe.problems) or "runs"
        flags = f"`{recipe.flags}`" if recipe.flags and not recipe.problems else ""
        yield f"| `{recipe.name}` | {verdict} | {flags} |"


def _as_code(reason: str) -> str:
    return ", ".join(f"`{word}`" if word.startswith("--") else word for word in reason.split(", "))


def _shown(reason: str) -> str:
    return reason.replace("|", "\\|")
