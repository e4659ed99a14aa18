"""The replacements of Megatron's names; the table in ``bindings.py`` says where and why."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import cache, partial, wraps
from math import log
from typing import Any

import torch
from megatron.core import parallel_state

from megatron_vocabpar.megatron_lm.bindings import BINDINGS, Binding, recognise
from megatron_vocabpar.megatron_lm.capture import capture_order_of, order_of_the_layers, order_of_the_schedule
from megatron_vocabpar.megatron_lm.checkpoints import starting_checkpoint
from megatron_vocabpar.megatron_lm.flag_config import FlagConfig, OpenSchedules
from megatron_vocabpar.megatron_lm.flags import chain
from megatron_vocabpar.megatron_lm.layouts import layout_notice, model_chunks, place, place_layers
from megatron_vocabpar.megatron_lm.optimizer_buckets import (
    metadata_with_buckets,
    state_of_own_buckets,
    wrapped_in_buckets,
)
from megatron_vocabpar.megatron_lm.patch import Patch, installed, is_here, live_signature, original_of
from megatron_vocabpar.megatron_lm.planning import build, check_costs, check_same_everywhere
from megatron_vocabpar.megatron_lm.rules.check import Declared, check, declared, not_run
from megatron_vocabpar.megatron_lm.rules.layout_rules import LINES
from megatron_vocabpar.megatron_lm.scripts import check_script
from megatron_vocabpar.pipeline import compat, heads
from megatron_vocabpar.pipeline.model.chunks import ChunkPosition, chunk_position, shown_as_rank
from megatron_vocabpar.pipeline.model.stage_model import PartitionedModel
from megatron_vocabpar.pipeline.model.vocab_layers import vocab_shard
from megatron_vocabpar.pipeline.options import VocabOptions
from megatron_vocabpar.pipeline.tuning.watched import Watched
from megatron_vocabpar.plan.pattern import layers_in
from megatron_vocabpar.schedule.make.families import families

_TIED = "share_embeddings_and_output_weights"
_NOT_RUN = "vocab_parallel_not_run"
"""An attribute of parsed arguments, until they are checked: sentences on what has not been read or run."""


def apply(config: FlagConfig) -> Patch:
    """Replace what ``config`` needs; a second call changes nothing.

    Raises:
        ValueError: if Megatron lacks a name or a parameter, naming it, or if a patch with another
            configuration is in force.
    """
    present = installed()
    if present is not None:
        if present.config != config:
            raise ValueError(f"already applied with {present.config}; undo that before applying {config}")
        return present
    patch = Patch(config, recognise(live_signature))
    try:
        for binding in BINDINGS:
            if binding.is_needed(config) and is_here(binding, patch.version):
                patch.replace(binding, replacement_for(binding, original_of(binding), config))
    except BaseException:
        patch.undo()
        raise
    return patch


def replacement_for(binding: Binding, original: Any, config: FlagConfig) -> Any:
    """The replacement of ``original``."""
    makers: dict[str, Callable[[Any, FlagConfig], Any]] = {
        "get_forward_backward_func": _provide_schedule,
        "convert_schedule_table_to_order": order_of_the_schedule,
        "get_overlap_moe_expert_parallel_comm_order": order_of_the_layers,
        "GPTModel": model_class,
        "HybridModel": model_class,
        "MambaModel": model_class,
        "get_gpt_decoder_block_spec": _layers_of_the_stage,
        "get_gpt_mtp_block_spec": _layers_of_the_stage,
        "get_transformer_block_with_experimental_attention_variant_spec": _layers_of_the_stage,
        "select_pipeline_segment": _segment_of_the_stage,
        "DistributedDataParallel.__init__": wrapped_in_buckets,
        "_build_sharded_state_dict_metadata": metadata_with_buckets,
        "DistributedOptimizer.sharded_state_dict": state_of_own_buckets,
        "ChainedOptimizer.sharded_state_dict": state_of_own_buckets,
        "training_log": _log_what_is_known,
        "parse_args": _parse_with_our_flags,
        "validate_args": _check_first,
    }
    return makers[binding.name](original, config)


def _parse_with_our_flags(original: Callable[..., Any], config: FlagConfig) -> Callable[..., Any]:
    @wraps(original)
    def parse_args(extra_args_provider: Any = None, ignore_unknown_args: bool = False) -> Any:
        megatrons: dict[str, Declared] = {}

        def provider(parser: Any) -> Any:
            megatrons.update(declared(parser))  # before the script adds its own
            return chain(extra_args_provider)(parser)

        args = original(provider, ignore_unknown_args)
        if not hasattr(args, "enable_vocab_parallel"):
            raise ValueError("--yaml-cfg drops all flags, ours too; give the settings as flags instead")
        if config.runs_our_schedule:  # for validate_args, which says everything at once
            setattr(args, _NOT_RUN, list(not_run(megatrons, args)))
        return args

    return parse_args


def _check_first(original: Callable[..., Any], config: FlagConfig) -> Callable[..., Any]:
    @wraps(original)
    def validate_args(args: Any, *rest: Any, **named: Any) -> Any:
        if config.runs_our_schedule:
            check_script(vars(sys.modules["__main__"]))
        if config.layout:
            place(args, config.layout)
        unread = [*_version_not_read(), *vars(args).pop(_NOT_RUN, ())]
        warning = check(args, config, unread, more=LINES)
        check_costs(args, config)
        if config.redistribute:
            place_layers(args, config)
        if args.rank == 0 and config.enabled:
            print("\n".join(filter(None, (_announcement(args, config), warning))), flush=True)
        validated = original(args, *rest, **named)
        leave_to_w(args, config)
        return validated

    return validate_args


def _version_not_read() -> list[str]:
    """A sentence if this version of Megatron is in no table."""
    patch = installed()
    return [patch.unread] if patch is not None and patch.unread else []


def leave_to_w(args: Any, config: FlagConfig) -> None:
    """If W is a separate pass, let it compute the gradients that ``--delay-wgrad-compute`` delays.

    Otherwise Megatron's plan would. Call this after Megatron's own checks; the layers themselves are told to
    delay when they are built.
    """
    found = config.open_schedules(args.pipeline_model_parallel_size, model_chunks(args).numerator)
    if found.has_pairs and found.splits_w:
        args.delay_wgrad_compute = False


def _announcement(args: Any, config: FlagConfig) -> str:
    text = f"> vocabulary parallelism: method {config.method}, family {config.family}"
    family = families().get(config.family)
    several_chunks = family is None or family.chunks > 1
    if config.partitions_vocabulary and several_chunks and starting_checkpoint(args) is None:
        text += (
            "\n> initial weights: with several model chunks per rank they are not those that the same seed "
            "gives without --enable-vocab-parallel"
        )
    if config.partitions_vocabulary and (notice := layout_notice(args)):
        text += f"\n{notice}"
    if config.partitions_vocabulary and os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        text += (
            "\n> CUDA_DEVICE_MAX_CONNECTIONS=1 puts all streams of a GPU into one queue, so that collectives "
            "of the vocabulary layers wait for computation: set it to 8, unless Megatron asks for 1"
        )
    return text


class ScheduleRunner:
    """The forward-backward function of this process; its first call makes groups and streams."""

    def __init__(self, config: FlagConfig) -> None:
        self._config = config
        self._run: Watched | None = None

    def __call__(self, **arguments: Any) -> list[Any]:
        if self._run is None:
            from megatron.training import get_args

            self._run = build(self._config, get_args(), arguments)
        return self._run(**compat.call_arguments(arguments))

    def capture_order(self, num_microbatches: int) -> list[int]:
        """The order in which layers are captured, as ``ForwardBackward.capture_order``.

        Raises:
            ValueError: before the first iteration, or as there.
        """
        return capture_order_of(self._run.run if self._run else None, num_microbatches)


def _provide_schedule(_: Any, config: FlagConfig) -> Callable[..., ScheduleRunner]:
    runner = ScheduleRunner(config)
    return lambda _: runner


def model_class(
    original: type,
    flags: FlagConfig,
    true_size: Callable[[int], tuple[int, int]] | None = None,
    compare: Callable[[], None] | None = None,
) -> type:
    """A subclass of ``original`` that places its stages as the schedule does.

    Args:
        true_size: returns the numbers of ``true_vocabulary``, the default.
        compare: all ranks call it before the first model is made; ``check_same_everywhere`` by default.
    """
    bases: tuple[Any, ...] = (PartitionedModel, original) if flags.partitions_vocabulary else (original,)
    signature = inspect.signature(original)
    embeddings: list[Any] = []  # of first stages whose last stage is not built yet
    # Before the first chunk is made, which may communicate.
    compare_once = cache(compare or partial(check_same_everywhere, flags))

    class Model(*bases):  # type: ignore[misc]
        """megatron-core's model as the training script builds it, placed as the schedule has it."""

        # The first chunk's input layer, if tied to it; in a tuple, which torch.nn.Module does not register.
        tied_to: tuple[Any, ...] = ()
        whole_in_v = False

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            compare_once()
            options = signature.bind_partial(*args, **kwargs).arguments
            if _open_schedules(flags).splits_w:
                options["config"].delay_wgrad_compute = True  # layers of Transformer Engine ask for it
            if flags.partitions_vocabulary:
                options |= _partition(flags.options, options, true_size or true_vocabulary)
            position = _position(flags, options.get("vp_stage"), options.get(compat.GROUPS_ARGUMENT))
            options |= {k: v for k, v in position.options.items() if k in signature.parameters}
            # In a V placement both whole layers are on one rank: Megatron's all-reduce has nothing to do.
            self.whole_in_v = not flags.partitions_vocabulary and position.is_v
            tied_here = self.whole_in_v and options.get(_TIED, False)
            if tied_here:
                options[_TIED] = False
            embeds_again = self.whole_in_v and heads.depths(options["config"]) > 0
            self.shown_rank: int = position.shown_rank
            with shown_as_rank(self.shown_rank):
                super().__init__(**options)
            if (tied_here or embeds_again) and self.pre_process:
                embeddings.append(self.embedding.word_embeddings)
            elif (tied_here or embeds_again) and self.post_process:
                first = embeddings.pop()
                if embeds_again:
                    self.embedding.word_embeddings = heads.SameEmbedding(first)
                if tied_here:
                    self.tied_to = (first,)
                    # As stock does where both layers are on one rank: a fused output layer adds to main_grad
                    # itself, and DDP then takes the input layer's gradient only of a weight marked so.
                    first.weight.zero_out_wgrad = True
                    self.share_embeddings_and_output_weights = True
                    self.output_layer.weight = None

        def shared_embedding_or_output_weight(self) -> Any:
            if self.tied_to:
                return self.tied_to[0].weight
            return None if self.whole_in_v else super().shared_embedding_or_output_weight()

        def setup_embeddings_and_output_layer(self) -> None:
            with heads.none_in(self.config) if self.whole_in_v else nullcontext():
                super().setup_embeddings_and_output_layer()

        def tie_embeddings_and_output_weights_state_dict(self, *args: Any, **kwargs: Any) -> None:
            if not self.tied_to:  # else the checkpoint has the weight from the first chunk
                super().tie_embeddings_and_output_weights_state_dict(*args, **kwargs)

        def sharded_state_dict(self, *args: Any, **kwargs: Any) -> Any:
            without = heads.no_copy_in(self) if self.whole_in_v else nullcontext()
            with without, shown_as_rank(self.shown_rank):
                return super().sharded_state_dict(*args, **kwargs)

    Model.__name__ = Model.__qualname__ = original.__qualname__
    return Model


def _partition(
    options: VocabOptions, arguments: Mapping[str, Any], sizes: Callable[[int], tuple[int, int]]
) -> dict[str, Any]:
    """The arguments of ``PartitionedModel`` in place of stock's vocabulary size."""
    padded_size, vp_stage = arguments["vocab_size"], arguments.get("vp_stage")
    true_size, divisible_by = sizes(padded_size)
    if torch.distributed.get_rank() == 0 and not vp_stage and true_size < padded_size:
        print(_padding_notice(true_size, padded_size), flush=True)
    draws_as_stock = not options.independent_init and vp_stage is None
    return {
        "vocab_size": true_size,
        "shard": vocab_shard(true_size, divisible_by, invariant=options.invariant, fp8=options.fp8_head),
        "holds_shard": not vp_stage,
        "stock_vocab_size": padded_size if draws_as_stock else None,
        "terms": options.terms,
        "fp32_head": options.fp32_head,
    }


def _log_what_is_known(original: Callable[..., Any], flags: FlagConfig) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @wraps(original)
    def training_log(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        if flags.partitions_vocabulary and given.arguments["num_zeros_in_grad"]:
            given.arguments["num_zeros_in_grad"] -= _zeros_of_padding(flags.options)
        with heads.logging_known_rates():
            return original(*given.args, **given.kwargs)

    return training_log


def _zeros_of_padding(options: VocabOptions) -> int:
    """How many zeros more than stock's the gradients have, from rows of padding.

    Stock's padding takes part in the softmax, so its rows of the output weight have gradients; those of an
    untied input embedding have none, as ours.
    """
    from megatron.training import get_args

    args = get_args()
    true_size, divisible_by = true_vocabulary(args.padded_vocab_size)
    shard = vocab_shard(true_size, divisible_by, invariant=options.invariant, fp8=options.fp8_head)
    rows = shard.ranges[-1].stop
    of_input = rows - args.padded_vocab_size if args.untie_embeddings_and_output_weights else 0
    return args.hidden_size * (rows - true_size + of_input)


def _open_schedules(flags: FlagConfig) -> OpenSchedules:
    """What the flags leave open on the ranks that megatron-core has set up."""
    chunks = parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1
    return flags.open_schedules(parallel_state.get_pipeline_model_parallel_world_size(), chunks)


def _position(flags: FlagConfig, vp_stage: int | None, groups: Any = None) -> ChunkPosition:
    """The position of the chunk that the training script is about to build."""
    placement = _open_schedules(flags).placement
    rank = parallel_state.get_pipeline_model_parallel_rank()
    return chunk_position(placement, rank, vp_stage or 0, groups or compat.model_groups())


def _layers_of_the_stage(original: Callable[..., Any], flags: FlagConfig) -> Callable[..., Any]:
    @wraps(original)
    def specification(*args: Any, vp_stage: int | None = None, **kwargs: Any) -> Any:
        with shown_as_rank(_position(flags, vp_stage).shown_rank):
            return original(*args, vp_stage=vp_stage, **kwargs)

    return specification


def _segment_of_the_stage(original: Callable[..., Any], _: FlagConfig) -> Callable[..., Any]:
    @wraps(original)
    def select_pipeline_segment(
        pattern: str, group: Any, vp_stage: int | None, *rest: Any, **named: Any
    ) -> Any:
        segments = pattern.split("|")
        if len(segments) == 1:
            return original(pattern, group, vp_stage, *rest, **named)
        stage = (vp_stage or 0) * group.size() + group.rank()
        layers, *offsets = original(segments[stage], None, None)
        before = layers_in("|".join(segments[:stage]))  # Megatron numbers symbols, then groups as one layer
        return layers, *(sum(map(len, before)), len(before))[: len(offsets)]

    return select_pipeline_segment


def _padding_notice(true_size: int, padded_size: int) -> str:
    padding = padded_size - true_size
    return (
        f"> padding of the vocabulary: {padding} ids after {true_size}. Without --enable-vocab-parallel they "
        "take part in the softmax, here they don't: the loss is lower at first, by about "
        f"{log(padded_size / true_size):.1e}"
    )


def true_vocabulary(padded_size: int) -> tuple[int, int]:
    """The number of true token ids of the running training, and what divides the padded size.

    Args:
        padded_size: Megatron's, which pads for tensor parallelism alone and never masks.
    """
    from megatron.training import get_args
    from megatron.training.global_vars import get_tokenizer

    return min(get_tokenizer().vocab_size, padded_size), get_args().make_vocab_size_divisible_by
