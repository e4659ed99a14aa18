"""A stage of a language model that also holds this rank's rows of both vocabulary layers.

Every stage gets an ``embedding.word_embeddings`` and an ``output_layer`` with the standard parameter names,
each with ``P = V_pad / (p * t)`` rows, so one DDP wrapper covers transformer layers and shards. The
transformer layers run as in Megatron. In the schedule the first stage gets rows that pass IF looked up, and
the last stage returns its hidden states for pass S.

Next: ``handlers/``.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedStateDict
from megatron.core.models.common.language_module.language_module import LanguageModule

from megatron_vocabpar.layers.terms import PLAIN, LossTerms
from megatron_vocabpar.pipeline import compat, heads
from megatron_vocabpar.pipeline.model.vocab_layers import (
    VocabShard,
    VocabShardEmbedding,
    VocabShardOutput,
    stage_rows,
    vocab_shard,
)
from megatron_vocabpar.pipeline.model.whole_rows import WholeRows, scatter_rows
from megatron_vocabpar.pipeline.options import VocabOptions
from megatron_vocabpar.pipeline.rules.facts import Facts
from megatron_vocabpar.pipeline.rules.model_rules import HEADS
from megatron_vocabpar.pipeline.rules.rule import require


def _check_arguments(arguments: Mapping[str, Any], fp32_head: bool) -> None:
    """Raise for arguments of a model, defaults included, that a partitioned one can't have."""
    config, learned = arguments["config"], arguments.get("position_embedding_type") == "learned_absolute"
    if learned and getattr(config, "mtp_num_layers", None) and config.pipeline_model_parallel_size > 1:
        raise ValueError(
            "multi-token prediction with learned positions: the last stage would learn a copy of its own of "
            "them; use position_embedding_type rope or none"
        )
    untied = SimpleNamespace(
        untie_embeddings_and_output_weights=not arguments["share_embeddings_and_output_weights"]
    )
    require(Facts(settings=untied, options=VocabOptions(fp32_head=fp32_head)), HEADS)


def _add_shards(model: PartitionedModel, terms: LossTerms, draws: bool) -> None:
    """Put this rank's rows of both layers in the place of stock's, with drawn weights or zeros."""
    shard, config, mup = model.shard, model.config, compat.uses_mup(model.config)
    embedding_init = config.embedding_init_method if draws else torch.nn.init.zeros_
    output_init = config.init_method if draws else torch.nn.init.zeros_
    group = compat.tensor_parallel_group(model)
    model.embedding.word_embeddings = VocabShardEmbedding(
        shard, config, init_method=embedding_init, tp_group=group
    )
    model.embedding.reduce_scatter_embeddings = False
    model.output_layer = VocabShardOutput(
        shard,
        config,
        compat.with_mup_scale(terms, config),
        init_method=embedding_init if mup and not model.tied else output_init,
        skip_weight_param_allocation=model.tied,
        tp_group=group,
    )
    for weight in model.vocabulary_weights():
        weight.is_embedding_or_output_parameter = True  # type: ignore[attr-defined]
        if mup:
            weight.is_embedding_parameter = True  # type: ignore[attr-defined]


class _EmbeddedRows(torch.nn.Module):
    """The input embedding of a last stage with further heads, whose rank holds its shard in another chunk."""

    def __init__(self) -> None:
        super().__init__()
        self.rows_to_embed: deque[torch.Tensor] = deque()

    def forward(self, _: torch.Tensor) -> torch.Tensor:
        return self.rows_to_embed.popleft()


class PartitionedModel(LanguageModule):
    """A language model of megatron-core, both vocabulary layers partitioned over all pipeline stages.

    A mixin; list it before the model's class. It overrides where hidden states come from and where they go.
    With multi-token prediction the further layers of the last stage get rows, as the first stage does.

    Takes the model's arguments, and:

    Args:
        vocab_size: number of true token ids ``V`` (not padded).
        shard: the partition; by default the even one over this process's PP x TP ranks.
        holds_shard: False for a rank's chunks after its first, which hold transformer layers alone.
        stock_vocab_size: rows that stock's vocabulary layers would have, padding included: draw the weights
            that stock draws from the same random state, for one chunk a rank. By default every rank draws
            its own rows.
        terms: scale and softcap of the logits in a call outside the schedule.
        fp32_head: draw the output weight in the model's dtype, but keep it and compute with it in float32.
        share_embeddings_and_output_weights: tied weights; both layers are then one parameter, because each
            rank holds the same rows of both. No all-reduce is needed.

    Raises:
        ValueError: for a tied weight in float32; for learned positions with multi-token prediction on several
            stages, where stock's copies differ too.
    """

    embedding: Any
    pre_process: bool
    post_process: bool
    share_embeddings_and_output_weights: bool
    shows_whole_layers = False
    """Whether ``whole_layers`` has put stock's vocabulary layers into the place of the shards."""

    def __init__(
        self,
        *args: Any,
        shard: VocabShard | None = None,
        holds_shard: bool = True,
        stock_vocab_size: int | None = None,
        terms: LossTerms = PLAIN,
        fp32_head: bool = False,
        **kwargs: Any,
    ) -> None:
        build: Any = super().__init__
        bound = inspect.signature(build).bind(*args, **kwargs)
        options = dict(bound.arguments)
        bound.apply_defaults()
        _check_arguments(bound.arguments, fp32_head)
        config, tied = options["config"], bound.arguments["share_embeddings_and_output_weights"]
        shard = shard or vocab_shard(options["vocab_size"])
        build(
            **options
            | {
                "vocab_size": stock_vocab_size or stage_rows(shard, config),
                # With several stages megatron-core would all-reduce two copies of a tied weight; we have one.
                "share_embeddings_and_output_weights": tied and config.pipeline_model_parallel_size == 1,
            }
        )
        self.shard: VocabShard = shard
        self.tied: bool = tied
        self.holds_shard: bool = holds_shard
        drawn = (
            self.embedding.word_embeddings.weight if self.pre_process else None,
            cast(Any, self).output_layer.weight if self.post_process else None,
        )
        if self.post_process:
            delattr(self, "output_layer")  # so that a tied weight is named by its embedding on every stage
        embeds = hasattr(self, "embedding")
        if not holds_shard:
            if embeds:
                self.embedding.word_embeddings = _EmbeddedRows()
                self.embedding.reduce_scatter_embeddings = False
            return
        if not embeds:
            self.embedding = torch.nn.Module()
        _add_shards(self, terms, draws=not stock_vocab_size)
        if stock_vocab_size and config.perform_initialization:
            last = parallel_state.get_pipeline_model_parallel_world_size() - 1
            # Stock draws a tied weight on the first stage: zip stops after it.
            for weight, whole, stage in zip(self.vocabulary_weights(), drawn, (0, last), strict=False):
                scatter_rows(whole, weight, rows_on(stage, shard, config, stock_vocab_size))
        if fp32_head:
            self.vocab_output.keep_fp32()

    @property
    def word_embeddings(self) -> VocabShardEmbedding:
        """This rank's rows of the input embedding."""
        return cast(VocabShardEmbedding, self.embedding.word_embeddings)

    @property
    def vocab_output(self) -> VocabShardOutput:
        """This rank's rows of the output weight."""
        return cast(VocabShardOutput, self.output_layer)

    @property
    def output_weight(self) -> torch.nn.Parameter:
        """``[P, H]``: the output layer's own weight, or the embedding's where they are tied."""
        return self.word_embeddings.weight if self.tied else self.vocab_output.weight

    def vocabulary_weights(self) -> tuple[torch.nn.Parameter, ...]:
        """The parameters of this rank's shards: one if tied, else embedding and output."""
        embedding = self.word_embeddings.weight
        return (embedding,) if self.tied else (embedding, self.output_weight)

    def _scale_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """Overrides stock's scaling behind its output layer; ours has muP's factor in its terms."""
        return logits

    def setup_embeddings_and_output_layer(self) -> None:
        """Mark parameters as megatron-core does, but without a copy of the embedding for the last stage."""
        with heads.none_in(self.config):
            super().setup_embeddings_and_output_layer()

    def shared_embedding_or_output_weight(self) -> torch.Tensor | None:
        """The weight for a call outside the schedule; None if stages have nothing to all-reduce."""
        shared: Any = super().shared_embedding_or_output_weight
        return shared() if self.share_embeddings_and_output_weights else None

    @contextmanager
    def in_schedule(self, rows: torch.Tensor | None) -> Iterator[None]:
        """Calls in this context take ``rows`` ``[k, b, s, H]`` for look-ups and return hidden states."""
        if rows is not None:
            self.word_embeddings.rows_to_embed.extend(rows.unbind())
        post_process, self.post_process = self.post_process, False
        try:
            yield
        finally:
            self.post_process = post_process

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> ShardedStateDict:
        replicas = parallel_state.get_data_parallel_group(with_context_parallel=True)
        # A new dictionary: Megatron writes the one that it passes into the checkpoint.
        metadata = {"dp_cp_group": replicas, **(metadata or {})}
        # The model's and LanguageModule's own methods place the vocabulary layers on the first and last
        # stage.
        state = super(LanguageModule, self).sharded_state_dict(prefix, sharded_offsets, metadata)
        if not self.holds_shard:
            return state
        if not any(parent.__name__ == "GPTModel" for parent in type(self).__mro__):
            # GPTModel leaves the output layer's empty extra state out of its checkpoints, others don't.
            extra = f"{prefix}output_layer._extra_state"
            replica = (self.shard.member, 0, dist.get_rank(replicas))
            state[extra] = ShardedObject(extra, None, (1,), (0,), replica_id=replica)
        key = f"{prefix}embedding.word_embeddings."
        return state | self.word_embeddings.sharded_state_dict(key, (), metadata)


def check_output_layer(model: PartitionedModel) -> None:
    """Raise a ValueError if the output layer was replaced, as frameworks do for a critic."""
    if not isinstance(model.output_layer, VocabShardOutput):
        raise ValueError(
            f"the model's output layer is a {type(model.output_layer).__name__}: a critic has no "
            "vocabulary to partition; train without one (GRPO), or without vocabulary parallelism"
        )


def rows_on(stage: int, shard: VocabShard, config: Any, size: int | None = None) -> WholeRows:
    """Rows of a whole layer on ``stage``, and of this rank's shard.

    Args:
        size: how many, with stock's padding; by default as many as the model has ids.
    """
    size, tensor = size or shard.range.vocab_size, config.tensor_model_parallel_size
    return WholeRows(shard.ranges, shard.member, stage, size, tensor)
