"""``--logits-save-dir``: a teacher's most likely ids and their log-probabilities, for later trainings.

Megatron's own class makes the files, which ``stored_teacher.py`` and stock read. In stock it hooks the output
layer for logits, and its training takes a loss of 0 so that no weight gets a gradient. Here the pipeline
finds the ids from its shards; the ranks that have the loss function get them, and the first tensor-parallel
one among them hands them over when an iteration is queued.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import Any

import torch

from megatron_vocabpar.layers.bins import TopLogprobs
from megatron_vocabpar.megatron_lm.flag_config import FlagConfig

LARGEST = 1 << 17
"""Ids that the files can name: Megatron stores 17 bits of each."""


def save_without_hooks(original: Callable[..., Any], flags: FlagConfig) -> Callable[..., Any]:
    """In place of ``LogitsSaverHooks.attach_hooks``: the saver is known, and sees no logits."""

    @wraps(original)
    def attach_hooks(self: Any, model: Any) -> None:
        if not flags.partitions_vocabulary:
            original(self, model)

    return attach_hooks


class SavedLogits:
    """What this rank gives ``--logits-save-dir`` of every training iteration; all ranks make one.

    Args:
        args: Megatron's arguments.
        config: our flags.

    Raises:
        ValueError: for a vocabulary of more ids than the files can name.
    """

    def __init__(self, args: Any, config: FlagConfig) -> None:
        from megatron.training.distillation import logits_saver

        if (size := args.padded_vocab_size) > LARGEST:
            raise ValueError(
                f"--logits-save-dir: the files name {LARGEST} ids of the vocabulary's {size}; leave it out"
            )
        # Megatron's main makes one on the last stage alone; but each waits for all ranks' to be written.
        self._saver: Any = logits_saver.get_logits_saver() or logits_saver.LogitsSaverHooks(
            save_dir=args.logits_save_dir,
            k=args.logits_save_top_k,
            p=args.logits_save_top_p,
            min_k=args.logits_save_top_p_min_k,
            save_dtype=args.logits_save_dtype,
        )
        self._pack = logits_saver.pack_indices
        self._options = replace(config.options, top_logprobs=min(args.logits_save_top_k, size))
        self._found: dict[int, TopLogprobs] = {}

    def arguments(self, call: dict[str, Any]) -> dict[str, Any]:
        """The arguments of an iteration's call: its loss is 0, and a training's most likely ids are kept."""
        forward_step = call["forward_step_func"]

        def without_loss(*given: Any) -> tuple[Any, Callable[..., Any]]:
            output, loss_func = forward_step(*given)

            def loss(losses: torch.Tensor) -> Any:
                return loss_func(losses * 0)

            return output, loss

        call = {**call, "forward_step_func": without_loss}
        if call.get("forward_only"):
            return call
        return {**call, "options": self._options, "keep_top": self._found.__setitem__}

    def write(self) -> None:
        """Hand an iteration's microbatches to Megatron's class, which writes them with a checkpoint."""
        found, self._found = self._found, {}
        saver = self._saver
        if not found or saver.tp_rank != 0:
            return
        for _, top in sorted(found.items()):
            values, ids = top.logprobs, top.ids
            if saver.p is not None:
                values, ids = saver._apply_topp_truncation(values, ids)
            saver._accumulated_results.append((values.to(saver._save_dtype), *self._pack(ids)))
        saver._save_accumulated_log_probs()
        saver._accumulated_results.clear()
