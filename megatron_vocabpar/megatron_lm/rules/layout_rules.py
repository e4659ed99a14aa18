"""``CHUNKS`` and ``REDISTRIBUTION``: flags that place layers, or read data, in ways that a schedule has not.

Standard library only.
"""

from __future__ import annotations

from typing import NamedTuple

from megatron_vocabpar.megatron_lm.flag_config import AUTO
from megatron_vocabpar.megatron_lm.layouts import (
    Order,
    has_separate_heads,
    heads_elsewhere,
    known_vocab_size,
    layers_to_divide,
    other_order,
    written_out,
)
from megatron_vocabpar.pipeline.rules.facts import Facts
from megatron_vocabpar.pipeline.rules.rule import UNTESTED, Rule, flags
from megatron_vocabpar.schedule.make.families import SEARCH, families, family_named
from megatron_vocabpar.schedule.words.placement import Placement

_ENDS = ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers")
PLACING = (
    *_ENDS,
    *("pipeline_model_parallel_layout", "hybrid_layer_pattern", "hybrid_override_pattern"),
    *("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"),
)
_LAYOUT = "pipeline_model_parallel_layout"
_CHUNKS = ("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank")
_BESIDE = (*_CHUNKS, *(name for name in PLACING if name != _LAYOUT))


class Need(NamedTuple):
    """The model chunks that a family needs, how to ask for them, and the families that take those given."""

    chunks: int
    how: str
    fitting: str


def _other_chunks(facts: Facts) -> Need | None:
    """What to do if the family cannot have these model chunks."""
    if facts.chunks.denominator != 1 or facts.family in (SEARCH, AUTO):
        return None
    fitting = [name for name, family in families().items() if family.allows(facts.chunks.numerator)]
    needed = family_named(facts.family).chunks
    bars = f"write {facts.p * needed - 1} | into"
    if facts.pattern:
        how = f"{bars} --hybrid-layer-pattern"
    elif written_out(facts.settings):
        how = f"{bars} --pipeline-model-parallel-layout"
    else:
        how = f"give --num-virtual-stages-per-pipeline-rank {needed}"
    return None if facts.family in fitting else Need(needed, how, ", ".join(fitting))


def _placing(facts: Facts) -> list[str]:
    """The flags that place layers; a pattern places none until it has bars."""
    bare = facts.pattern and "|" not in facts.pattern
    return [name for name in PLACING if facts.is_set(name) and not (bare and name.startswith("hybrid"))]


def _stages(facts: Facts) -> int:
    return facts.p * facts.chunks.numerator


def _skips(facts: Facts) -> str:
    """Which iterations Megatron skips, reading their data on every rank from one iterator; else empty."""
    if facts.chunks == 1 and (facts.p <= 2 or facts.sft):
        return ""
    return " ".join(map(str, facts.iterations_to_skip)) or facts.result_rejected_tracker_filename


class Ends(NamedTuple):
    """Flags that fix the layers of the first or last rank, and what they leave for how many other ranks."""

    flags: str
    layers: int
    ranks: int
    even: bool

    @property
    def left(self) -> str:
        """What is left where there are layers without a rank, or ranks without a layer; else empty."""
        if self.layers > 0 >= self.ranks:
            return f"{self.layers} layers are left, and no rank for them"
        if self.ranks > 0 >= self.layers:
            return f"no layer is left for {self.ranks} ranks"
        return "" if self.ranks >= 0 and self.layers >= 0 else "there are not as many layers or ranks"


def _ends(facts: Facts) -> Ends | None:
    """What is left to divide; None if something else places the layers."""
    args, chunks, layers = facts.settings, facts.chunks, layers_to_divide(facts.settings)
    if facts.redistributes or written_out(args) or facts.pattern or chunks.denominator != 1 or not layers:
        return None
    fixed = {name: getattr(args, name) for name in _ENDS if getattr(args, name, None) is not None}
    rest, ranks = layers - sum(fixed.values()), facts.p - len(fixed)
    even = all(count % chunks == 0 for count in fixed.values()) and rest % (max(ranks, 1) * chunks) == 0
    return Ends(flags(fixed), rest, ranks, even)


def _lopsided(facts: Facts) -> Ends | None:
    ends = _ends(facts)
    return ends if ends and ends.left else None


def _undivided(facts: Facts) -> Ends | None:
    ends = _ends(facts)
    return None if ends is None or ends.left or ends.even else ends


def _other_layers(facts: Facts) -> Order | None:
    """What a layout has in the place of the model's layers."""
    if getattr(facts.settings, _LAYOUT, None) is None or not facts.num_layers:
        return None
    return other_order(written_out(facts.settings), facts.num_layers, facts.mtp_num_layers)


def _idle_rank(facts: Facts) -> str:
    """The first rank whose stages in a layout are all empty, where its vocabulary layers are not its own."""
    stages = written_out(facts.settings).split("|")
    if facts.partitions or len(stages) == 1 or facts.chunks.denominator != 1:
        return ""
    placement = Placement(facts.p, facts.chunks.numerator, "vshape" if facts.in_v else "standard")
    held = ("".join(stages[stage] for stage in placement.stages_of(rank)) for rank in range(facts.p))
    return next((str(rank) for rank, layers in enumerate(held) if not layers), "")


def _stage_layers(facts: Facts) -> list[str]:
    """The letters of each stage, as in a layout; empty if something else places the layers."""
    if written := written_out(facts.settings):
        return written.split("|")
    ends = _ends(facts)
    if ends is None or ends.left or not ends.even:
        return []
    first, last = (getattr(facts.settings, name, None) for name in _ENDS)
    share = ends.layers // max(ends.ranks, 1)
    of_ranks = [share if first is None else first, *[share] * (facts.p - 2), share if last is None else last]
    placement = Placement(facts.p, facts.chunks.numerator, "vshape" if facts.in_v else "standard")
    ranks = map(placement.rank_of, range(placement.num_stages))
    stages = ["t" * (of_ranks[rank] // placement.chunks) for rank in ranks]
    counted = [facts.is_set(f"account_for_{end}_in_pipeline_split") for end in ("embedding", "loss")]
    stages[0] = stages[0][counted[0] :]
    stages[-1] = stages[-1][counted[1] :] + "m" * facts.mtp_num_layers
    return stages


def _logs(facts: Facts) -> bool:
    """Whether experts have a loss of their own, which Megatron logs."""
    given = getattr(facts.settings, "moe_aux_loss_coeff", 0.0)
    balancing = any(given) if isinstance(given, list | tuple) else bool(given)
    return balancing or getattr(facts.settings, "moe_z_loss_coeff", None) is not None


def _rank_without(facts: Facts, have: list[bool]) -> str:
    """The first rank of which no stage ``have`` experts; empty if none has."""
    placement = Placement(facts.p, len(have) // facts.p, "vshape" if facts.in_v else "standard")
    having = {placement.rank_of(stage) for stage, has in enumerate(have) if has}
    return next((str(rank) for rank in range(facts.p) if rank not in having), "") if having else ""


def _rank_without_experts(facts: Facts) -> str:
    """The first rank without experts in a model with some and with heads, where Megatron then waits for ever.

    Versions before 0.17 exchange what experts log in tensors that are longer by the heads on ranks with
    experts (https://github.com/NVIDIA/Megatron-LM/pull/3401).
    """
    if facts.since_0_17 or not (facts.num_experts and facts.mtp_num_layers and facts.p > 1 and _logs(facts)):
        return ""
    stages = _stage_layers(facts)
    if not stages or len(stages) % facts.p or sum(stage.count("t") for stage in stages) != facts.num_layers:
        return ""  # refused by other rows
    have, layer = [], 0
    for letters in stages:
        layers = [
            *range(layer, layer + letters.count("t")),
            *([facts.num_layers - 1] if "m" in letters else []),
        ]
        layer += letters.count("t")
        have.append(any(map(facts.has_experts, layers)))
    return _rank_without(facts, have)


def _waits(_: Facts, rank: str) -> str:
    return f"rank {rank} has no layer with experts, and Megatron's first log then waits for ever, stock's too"


def _rank_without_expert_symbol(facts: Facts) -> str:
    """The first rank without an ``E`` in a pattern with some, where Megatron then waits for ever.

    Versions up to 0.19 exchange what experts log in tensors as long as all layers on ranks with experts, and
    as long as all ``E`` on the others.
    """
    stages = facts.pattern.split("|")
    if (
        facts.since_0_20
        or not ("E" in facts.pattern and facts.p > 1 and _logs(facts))
        or len(stages) % facts.p
    ):
        return ""
    return _rank_without(facts, ["E" in symbols for symbols in stages])


_HETEROGENEOUS = "heterogeneous_layers_config_path heterogeneous_layers_config_encoded_json"

CHUNKS = (
    Rule("--num-layers-per-virtual-pipeline-stage, --num-virtual-stages-per-pipeline-rank, "
        "--pipeline-model-parallel-layout or --hybrid-layer-pattern",
        lambda f: f.chunks.denominator != 1 or f.chunks < 1,
        lambda f, _: f"they give {f.chunks} model chunks on each of {f.p} ranks", "choose what divides"),
    Rule(lambda f, _: f.family_flag, _other_chunks,
        lambda f, found: f"needs {found.chunks} model chunks per rank, not {f.chunks}",
        lambda _, found: f"{found.how}, or use one of {found.fitting}"),
    Rule(lambda f, _: f"--pipeline-model-parallel-layout {f.settings.pipeline_model_parallel_layout}",
        _other_layers,
        lambda _, found: f"in order it has {found.given}, but --num-layers and --mtp-num-layers give "
        f"{found.wanted}",
        "write these letters, with | between stages"),
    Rule(lambda f, _: f"m in --pipeline-model-parallel-layout {f.settings.pipeline_model_parallel_layout}",
        lambda f: heads_elsewhere(written_out(f.settings), f.p),
        "Megatron keeps all m together, in the last model chunk of a rank",
        lambda f, _: f"write them into one of the last {f.p} stages"),
    Rule(lambda f, _: f"--pipeline-model-parallel-layout {f.settings.pipeline_model_parallel_layout}",
        _idle_rank, lambda _, found: f"rank {found} has no layer to train",
        "give each rank one, or use fewer ranks"),
    Rule("--no-overlap-p2p-communication", lambda f: f.chunks > 1 and f.p == 2 and not f.overlap_p2p_comm,
        "Megatron refuses it with model chunks on two ranks"),
    Rule("m before the last stage of --pipeline-model-parallel-layout",
        lambda f: f.in_v and has_separate_heads(f.settings),
        lambda f, _: f"{f.family_flag} has Megatron's stages in another order than it gives out batches",
        "use 1f1b, zb-h1 or interleaved, or write m into the stage of L"),
    Rule("--dataloader-inter-document-masking",
        lambda f: f.dataloader_inter_document_masking and _stages(f) > 2 and not f.sft,
        "all stages take ends of documents from the data, which Megatron reads on the first and the last",
        "use 2 stages of one model chunk, or --sft"),
    Rule(lambda _, found: f"--iterations-to-skip, --result-rejected-tracker-filename ({found})", _skips,
        "Megatron skips data on ranks that have some, of one model chunk each",
        "use 1f1b or zb-h1 on 2 stages at most, or leave it out"),
    Rule("--heterogeneous-layers-config-path",
        lambda f: f.chunks > 1 and f.any_set(_HETEROGENEOUS),
        "Megatron makes its layers for one model chunk a rank alone", "use 1f1b or zb-h1"),
    Rule(lambda f, found: f"--num-layers {f.num_layers} with {found.flags}", _lopsided,
        lambda _, found: found.left, lambda _, found: f"leave out {found.flags}"),
    Rule(lambda f, _: f"--num-layers {f.num_layers}", _undivided,
        lambda f, found: f"{found.layers} layers do not divide into {f.chunks} model chunks on each of "
        f"{found.ranks} ranks",
        "choose another number, or place them with --pipeline-model-parallel-layout"),
)  # fmt: skip

LINES = (
    Rule(lambda _, found: f"--pipeline-model-parallel-layout with {found}",
        lambda f: f.is_set(_LAYOUT) and flags(filter(f.is_set, _BESIDE)),
        "the layout alone says which layers each stage has", lambda _, found: f"leave out {found}"),
    Rule("--num-experts with --mtp-num-layers, with Megatron before 0.17", _rank_without_experts,
        _waits,
        "give each rank one with --pipeline-model-parallel-layout, or use 0.17 or later", UNTESTED),
    Rule("--hybrid-layer-pattern with experts, with Megatron up to 0.19", _rank_without_expert_symbol,
        _waits,
        "give each rank an E in --hybrid-layer-pattern, or use Megatron's main", UNTESTED),
)  # fmt: skip
"""Of launch lines alone: configurations of Bridge have a layout and its number of chunks, and Bridge logs."""

_REDISTRIBUTE = "--enable-layer-redistribution"

REDISTRIBUTION = (
    Rule(_REDISTRIBUTE, lambda f: f.redistributes and f.p < 2, "there is no other stage",
        "give --pipeline-model-parallel-size of at least 2"),
    Rule(lambda _, found: f"{_REDISTRIBUTE} with {found}", lambda f: f.redistributes and flags(_placing(f)),
        "it places the layers itself", lambda _, found: f"leave out {found}"),
    Rule(_REDISTRIBUTE, lambda f: f.redistributes and f.chunks != 1 and not f.runs_ours,
        "Megatron's own schedule has one model chunk per rank on 1f1b", "leave out what asks for several"),
    Rule(_REDISTRIBUTE,
        lambda f: f.redistributes and f.final_stage_layers is None and not known_vocab_size(f.settings),
        "how many layers stay is computed from the size of the vocabulary",
        "give --final-stage-num-layers N, or --vocab-size"),
)  # fmt: skip
