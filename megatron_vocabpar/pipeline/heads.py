"""The heads of multi-token prediction.

With ``mtp_num_layers`` D the last stage's F returns the hidden states of 1 + D heads, and the output layer
has 1 + D times the rows. In a layout such as ``Et|tt|m|L`` an earlier stage adds them, and those between pass
them on. Labels, masks, scaling and logging of the further heads stay Megatron's own code. It
runs when the losses are known, on a stand-in for the model, whose output layer returns its input and whose
cross-entropy returns the known losses. So autograd finds every token's gradient through its loss scaler.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer import multi_token_prediction
from megatron.core.transformer.enums import LayerType
from megatron.core.utils import unwrap_model

from megatron_vocabpar.pipeline.microbatches import DROPPED, IGNORED
from megatron_vocabpar.pipeline.recording import ModelCall

_PROCESS = getattr(multi_token_prediction, "process_mtp_loss", None)  # 0.17 and later; else in _postprocess
_ROLLS_PACKED = "packed_seq_params" in inspect.signature(multi_token_prediction.roll_tensor).parameters
_COUNTS = "_compute_mtp_acceptance_counts"
_ROTARY = ("rotary_pos_emb", "rotary_pos_cos", "rotary_pos_sin")


def depths(config: Any) -> int:
    """D: how many further tokens are predicted."""
    return getattr(config, "mtp_num_layers", None) or 0


def stage_of(config: Any) -> int | None:
    """The stage of the further heads' layers where a layout has it, as in ``Et|tt|m|L``; None: the last."""
    layout = getattr(getattr(config, "pipeline_model_parallel_layout", None), "layout", None)
    by_stage = [chunk for chunks in zip(*layout, strict=True) for chunk in chunks] if layout else []
    found = [stage for stage, layers in enumerate(by_stage[:-1]) if LayerType.mtp in layers]
    return found[0] if found else None


class SameEmbedding(torch.nn.Module):
    """The word embeddings of another chunk of this rank, whose parameters they stay.

    In a V the first and the last stage are on one rank, so further heads there need no copy of the embedding.
    """

    def __init__(self, embeddings: torch.nn.Module) -> None:
        super().__init__()
        self._of = (embeddings,)  # in a tuple, which torch.nn.Module does not register

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self._of[0](*args, **kwargs)


@contextmanager
def none_in(config: Any) -> Iterator[None]:
    """In this context Megatron sees no further heads."""
    depths_, config.mtp_num_layers = config.mtp_num_layers, None
    try:
        yield
    finally:
        config.mtp_num_layers = depths_


@contextmanager
def no_copy_in(model: Any) -> Iterator[None]:
    """In this context Megatron does not take a chunk for one with a copy of the embedding for its heads."""
    before, model.mtp_process = getattr(model, "mtp_process", False), False
    try:
        yield
    finally:
        model.mtp_process = before


@contextmanager
def returning_losses(model: Any, labels: torch.Tensor) -> Iterator[None]:
    """In this context a last stage with whole layers returns the token losses of all heads.

    Stock's returns those of the first head, after it has added the gradients of the others. Here the loss
    function, and with it the others' share, is on another rank.

    Args:
        model: the last stage, unwrapped.
        labels: ``[1 + D, b, s]``.
    """
    own = dict(vars(model))  # a plan of the layers may stand in for ``forward`` already
    hidden_of, post_process = model.forward, model.post_process

    def forward(*args: Any, **kwargs: Any) -> torch.Tensor:
        model.post_process = False
        try:
            hidden = hidden_of(*args, **kwargs)
        finally:
            model.post_process = post_process
        return all_losses(model, hidden, labels)

    model.forward = forward
    try:
        yield
    finally:
        del model.forward
        if "forward" in own:
            model.forward = own["forward"]


def all_losses(model: Any, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The token losses ``[1 + D, b, s]`` float32 of hidden states ``[(1 + D) s, b, H]``, by whole layers."""
    weight = model.shared_embedding_or_output_weight() if model.share_embeddings_and_output_weights else None
    losses = []
    for of_head, target in zip(hidden.chunk(len(labels)), labels, strict=True):
        logits, _ = model.output_layer(of_head, weight=weight)
        scaled = getattr(model, "_scale_logits", lambda given: given)(logits)  # muP: from 0.17 on
        losses.append(model.compute_language_model_loss(target, scaled))
    return torch.stack(losses)


def embedded_tokens(model: torch.nn.Module, call: ModelCall) -> torch.Tensor:
    """Token ids ``[1 + D, b, s]``: those that the first stage embeds, then those of each further head.

    Raises:
        ValueError: if ``forward_step`` passed none to the model.
    """
    inner: Any = unwrap_model(model)
    tokens = _given(call.input_ids, "input_ids")
    if depths(inner.config) == 0:
        return tokens.unsqueeze(0)
    arguments = _arguments(inner, call)
    ids = [arguments["input_ids"]]
    group = parallel_state.get_context_parallel_group()
    options: dict[str, Any] = {"shifts": -1, "dims": -1, "cp_group": group}
    if _ROLLS_PACKED:
        options["packed_seq_params"] = arguments.get("packed_seq_params")
    for _ in range(depths(inner.config)):
        ids.append(multi_token_prediction.roll_tensor(ids[-1], **options)[0])
    return torch.stack(ids)


def head_labels(
    model: torch.nn.Module, call: ModelCall, vocab_size: int | None, drops_masked: bool
) -> torch.Tensor:
    """Target ids ``[1 + D, b, s]`` of all heads.

    Of a partitioned vocabulary, masked labels outside it become ``IGNORED``: their losses are not read. The
    mask is the one that ``forward_step`` passes to the model; what its loss function does is not known yet.

    Args:
        model: this rank's last chunk.
        call: the training script's call on the stage with the labels.
        vocab_size: of a partitioned vocabulary; else None.
        drops_masked: labels that the mask leaves out become ``DROPPED``.

    Raises:
        ValueError: if ``forward_step`` passed no labels, no mask where it is needed, or asks the model for
            what vocabulary parallelism does not have.
    """
    labels = _given(call.labels, "labels")
    if call.kwargs.get("output_processor") is not None:
        raise ValueError(
            "forward_step passed an output_processor to the model, which would see the hidden states and the "
            "whole output layer in place of the loss; vocabulary parallelism has neither on one rank: leave "
            "it out"
        )
    if call.kwargs.get("compute_mtp_loss") is False:
        raise ValueError(
            "forward_step passed compute_mtp_loss False to the model, which has the heads of multi-token "
            "prediction all the same here: leave it out, or train without --mtp-num-layers"
        )
    mask = call.kwargs.get("loss_mask")
    if vocab_size is not None and mask is not None:
        outside = (labels < 0) | (labels >= vocab_size)
        labels = labels.masked_fill(outside & (mask == 0), IGNORED)
        call = call.with_argument("labels", labels)
    inner: Any = unwrap_model(model)
    if depths(inner.config) == 0:
        of_heads = labels.unsqueeze(0)
    else:
        heads = _Heads(inner, labels.new_ones((1 + depths(inner.config), *labels.shape)).float(), False)
        heads.main_loss(call)
        of_heads = torch.stack([heads.labels[-1], *heads.labels[:-1]])
    return of_heads.masked_fill(_masked(inner, call), DROPPED) if drops_masked else of_heads


def _given(tensor: torch.Tensor | None, name: str) -> torch.Tensor:
    if tensor is None:
        raise ValueError(
            f"forward_step passed no {name} to the model; vocabulary parallelism needs token ids on the "
            "first stage and labels on the last"
        )
    return tensor


def _masked(model: Any, call: ModelCall) -> torch.Tensor:
    """Tokens ``[1 + D, b, s]`` that the batch's loss mask leaves out; none of heads that are only logged.

    Megatron shifts the mask for further heads. Its own code is asked how: by the gradient of the sum of all
    masked losses, 0 where a token has no part in it.
    """
    mask = call.kwargs.get("loss_mask")
    if mask is None:
        raise ValueError(
            "drop_masked, but forward_step passed no loss_mask to the model: pass it, as pretrain_gpt.py "
            "does, or give tokens without a loss labels of -100"
        )
    assert call.labels is not None
    shape = (1 + depths(model.config), *call.labels.shape)
    losses = mask.new_ones(shape, dtype=torch.float32, requires_grad=True)
    with torch.enable_grad():
        total = (main_loss(model, call, losses, training=False) * mask).sum()
    (grad,) = torch.autograd.grad(total, [losses])
    masked: torch.Tensor = grad == 0
    if not getattr(model.config, "mtp_loss_scaling_factor", None):
        masked[1:] = False
    return masked


def logs_acceptance(config: Any) -> bool:
    """Whether Megatron logs how often a head's most likely id is the target: from 0.19 on."""
    return depths(config) > 0 and hasattr(multi_token_prediction, _COUNTS)


def main_loss(
    model: torch.nn.Module,
    call: ModelCall,
    losses: torch.Tensor,
    *,
    training: bool,
    wins: torch.Tensor | None = None,
) -> torch.Tensor:
    """The losses ``[b, s]`` for the loss function; their backward adds the gradients of the further heads.

    Args:
        model: this rank's last chunk.
        call: the training script's call on the stage with the labels.
        losses: ``[1 + D, b, s]`` of all heads.
        training: log the losses of the further heads.
        wins: ``[1 + D, b, s]``, 1 if the target is the most likely id; without it Megatron counts NaN.
    """
    if len(losses) == 1:
        return losses.squeeze(0)  # unlike losses[0] without a kernel in its backward
    with _acceptance_counts(wins):
        return _Heads(unwrap_model(model), losses, training).main_loss(call)


@contextmanager
def _acceptance_counts(wins: torch.Tensor | None) -> Iterator[None]:
    """Replace Megatron's count, in logits, of targets that are a head's most likely id by the known one."""
    stock = getattr(multi_token_prediction, _COUNTS, None)
    if stock is None:
        yield
        return
    heads = iter(() if wins is None else wins[1:].bool())

    def counts(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        loss_mask = arguments[2].bool()
        total = loss_mask.sum().float()
        if wins is None:
            return torch.full_like(total, torch.nan), total
        return (next(heads) & loss_mask).sum().float(), total

    setattr(multi_token_prediction, _COUNTS, counts)
    try:
        yield
    finally:
        setattr(multi_token_prediction, _COUNTS, stock)


@contextmanager
def logging_known_rates() -> Iterator[None]:
    """In this context Megatron leaves uncounted acceptance rates out of its log."""
    helper = multi_token_prediction.MTPLossLoggingHelper
    stock = vars(helper)["track_mtp_metrics"]  # a static method, before 0.19 a function
    track = helper.track_mtp_metrics

    def track_mtp_metrics(loss_scale: float, iteration: int, writer: Any, wandb: Any, *totals: Any) -> None:
        known = [each and _KnownRates(each) for each in (writer, wandb)]
        track(loss_scale, iteration, *known, *totals)

    helper.track_mtp_metrics = staticmethod(track_mtp_metrics)
    try:
        yield
    finally:
        helper.track_mtp_metrics = stock


class _KnownRates:
    """A writer of tensorboard, or wandb, that skips acceptance rates of NaN."""

    def __init__(self, writer: Any) -> None:
        self._writer = writer

    def add_scalar(self, tag: str, value: torch.Tensor, step: int) -> None:
        if not _is_unknown_rate(tag, value):
            self._writer.add_scalar(tag, value, step)

    def log(self, values: dict[str, torch.Tensor], step: int) -> None:
        if not any(_is_unknown_rate(tag, value) for tag, value in values.items()):
            self._writer.log(values, step)


def _is_unknown_rate(tag: str, value: torch.Tensor) -> bool:
    return "acceptance_rate" in tag and bool(value.isnan())


def _arguments(inner: Any, call: ModelCall) -> dict[str, Any]:
    return inspect.signature(inner.forward).bind(*call.args, **call.kwargs).arguments


class _Heads:
    """Stands in for the model behind its MTP layers. Megatron asks for the losses of head 1 ... D, then 0."""

    post_process = mtp_process = True
    share_embeddings_and_output_weights = False

    def __init__(self, model: Any, losses: torch.Tensor, training: bool) -> None:
        self._model, self._losses, self.training = model, losses, training
        self.labels: list[torch.Tensor] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def output_layer(self, hidden: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, None]:
        return hidden, None

    def compute_language_model_loss(
        self, labels: torch.Tensor, logits: torch.Tensor, *_: Any, **__: Any
    ) -> torch.Tensor:
        self.labels.append(labels)
        losses = self._losses[len(self.labels) % len(self._losses)]
        # The hidden states are 0, but the backward reaches the loss scaler through them.
        return losses + logits.squeeze(-1).transpose(0, 1)

    def main_loss(self, call: ModelCall) -> torch.Tensor:
        k, b, s = self._losses.shape
        arguments = _arguments(self._model, call)
        arguments["hidden_states"] = self._losses.new_zeros(k * s, b, 1)
        if _PROCESS is None:
            postprocess = type(self._model)._postprocess
            accepted = inspect.signature(postprocess).parameters
            arguments = {name: value for name, value in arguments.items() if name in accepted}
            return postprocess(self, **dict.fromkeys(_ROTARY), **arguments)
        arguments |= {
            "output_layer": self.output_layer,
            "output_weight": self._losses.new_zeros(()),  # from 0.19 on it may be detached
            "runtime_gather_output": True,
            "is_training": self.training,
            "compute_language_model_loss": self.compute_language_model_loss,
            "config": self._model.config,
            "cp_group": self._model.pg_collection.cp,
            "tp_group": self._model.pg_collection.tp,
        }
        options = {"loss_mask": None, **arguments}
        accepted = inspect.signature(_PROCESS).parameters
        hidden = _PROCESS(**{name: value for name, value in options.items() if name in accepted})
        return self.compute_language_model_loss(arguments["labels"], hidden)
