"""``--logits-load-dir``: training on the divergence from a teacher's stored log-probabilities.

Megatron's own classes read the files. In stock the last stage alone has them, and compares them with the
logits that its output layer made. Here every rank reads them for its shard, and the pipeline computes the
divergence as a part of every token's loss. The script's loss function gets both parts of it:

    stock   loss = (1 - alpha) sum(losses) + alpha sum(divergences)      gradients through losses and logits
    here    likewise, of the same values, whose gradient is that of ``(1 - alpha) loss + alpha divergence``
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import Any

import torch
from megatron.core import parallel_state

from megatron_vocabpar.layers.bins import TopLogprobs
from megatron_vocabpar.layers.terms import Distillation
from megatron_vocabpar.megatron_lm.flag_config import FlagConfig


def capture_without_hooks(original: Callable[..., Any], flags: FlagConfig) -> Callable[..., Any]:
    """In place of ``StudentLogitsCapture.attach_hooks``: the capture is known, and sees no logits."""

    @wraps(original)
    def attach_hooks(self: Any, model: Any) -> None:
        if not flags.partitions_vocabulary:
            return original(self, model)
        from megatron.training.distillation import cached_logits_loss

        cached_logits_loss._ACTIVE_STUDENT_LOGITS_CAPTURE = self
        return None

    return attach_hooks


def divergence_of_the_pipeline(original: Callable[..., Any], _: FlagConfig) -> Callable[..., Any]:
    """In place of ``CachedLogitsKDLoss.__call__``, which is called with what the capture holds."""

    @wraps(original)
    def __call__(self: Any, student_logits: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return student_logits  # StoredTeacher has put the divergences there

    return __call__


class StoredTeacher:
    """What ``--logits-load-dir`` holds for the microbatches of this rank; all ranks make one.

    Args:
        args: Megatron's arguments.
        config: our flags.
        device: where the model lives.
    """

    def __init__(self, args: Any, config: FlagConfig, device: torch.device) -> None:
        from megatron.training.distillation import cached_logits_loss, utils_logits

        how = Distillation("forward", weight=args.logits_load_kd_loss_alpha)
        self._options = replace(config.options, distillation=how)
        self._device = device
        self._iteration_now = utils_logits.get_current_iteration
        self._reader = cached_logits_loss.CachedLogitsKDLoss(
            logprobs_dir=args.logits_load_dir,
            decode_threads=args.logits_load_decode_threads,
            prefetch_factor=args.logits_load_prefetch_factor,
            msc_prefetch_depth=args.logits_load_msc_prefetch_depth,
        )
        self._iteration: int | None = None
        self._capture = cached_logits_loss.get_student_logits_capture()

    def arguments(self, call: dict[str, Any]) -> dict[str, Any]:
        """The arguments of a training iteration's call.

        Raises:
            ValueError: if the files have another number of microbatches.
        """
        iteration, reader = self._iteration_now(), self._reader
        if reader._dataloader_iter is None:
            reader._init_dataloader(iteration)
        if iteration != self._iteration:
            reader._advance_iteration()
            self._iteration = iteration
        stored, asked = len(reader._current_values), call["num_microbatches"]
        if stored != asked:
            raise ValueError(
                f"--logits-load-dir {reader.logprobs_dir}: iteration {iteration} has {stored} microbatches, "
                f"this training {asked}; store them with the same batch sizes"
            )
        forward_step = call["forward_step_func"]

        def with_both_parts(*given: Any) -> tuple[Any, Callable[..., Any]]:
            output, loss_func = forward_step(*given)
            return output, self._with_both_parts(loss_func)

        return {**call, "forward_step_func": with_both_parts, "options": self._options, "teacher": self._of}

    def _of(self, i: int) -> TopLogprobs:
        values, ids = self._reader._current_values[i], self._reader._current_indices[i]
        return TopLogprobs(
            values.to(self._device, non_blocking=True), ids.to(self._device, non_blocking=True)
        )

    def _with_both_parts(self, loss_func: Callable[..., Any]) -> Callable[..., Any]:
        """The script's loss function, which adds two parts: each has its true value, the sum the gradient."""

        def loss(output: torch.Tensor, divergence: torch.Tensor, cross_entropy: torch.Tensor) -> Any:
            assert self._capture is not None
            path = output - output.detach()
            # Stock's divergences are parts that it adds up over the tensor-parallel ranks; here all have all.
            part = divergence / parallel_state.get_tensor_model_parallel_world_size()
            self._capture._logits = part + path
            return loss_func(cross_entropy + path)

        return loss
