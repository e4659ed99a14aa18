"""Labels of the response tokens, which are all that a framework reads; other labels become -1.

The model sees prompts, responses and padding. A token with the label -1, which is no id, takes no part in the
output layer (``pipeline/microbatches.py``), and its numbers are NaN (``steps.py``).

Read at verl v0.7.0 and slime v0.3.1. Next: ``replaced_functions.py``, which names the functions that these
replace.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from megatron_vocabpar.frameworks.steps import HandleModel


def slime_labels(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Replaces ``_build_shifted_tokens``, which makes labels ``[T]`` of all tokens."""

    @wraps(original)
    def build_shifted_tokens(
        T: int,
        device: torch.device,
        unconcat_tokens: list[Tensor],
        total_lengths: list[int],
        response_lengths: list[int],
        allgather_cp: bool,
    ) -> Tensor:
        labels = original(T, device, unconcat_tokens, total_lengths, response_lengths, allgather_cp)
        positions = torch.arange(T, device=device)
        extract = sys.modules[original.__module__]._extract_per_sample
        responses = torch.cat(extract(positions, None, total_lengths, response_lengths, allgather_cp)[0])
        return torch.full_like(labels, -1).index_copy_(0, responses, labels[responses])

    return build_shifted_tokens


def verl_forward(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replaces ``get_mcore_forward_no_padding_fn``, whose function packs labels, with padding as id 0."""

    @wraps(original)
    def get_forward(*arguments: Any, **options: Any) -> Callable[..., Any]:
        forward = original(*arguments, **options)

        @wraps(forward)
        def packed(model: Any, *inputs: Any, **options: Any) -> Any:
            process, labels = options.get("logits_processor"), options.get("logits_processor_args")
            if not isinstance(model, HandleModel) or process is None or not labels:
                return forward(model, *inputs, **options)

            def logits_processor(logits: Any, label: Tensor, **others: Any) -> Any:
                return process(logits, label=label - 1, **others)

            ids = labels["label"]
            read = _read_by_verl(model.batches[-1]).to(ids.device)
            # verl pads with 0. So labels are one more than ids, and 0 if not read: ids (5, 0, 7) of a prompt
            # and two responses become (0, 1, 8), and in the end (-1, 0, 7).
            increased = torch.where(read, ids.values() + 1, 0)
            label = torch.nested.nested_tensor_from_jagged(increased, offsets=ids.offsets())
            options |= {
                "logits_processor": logits_processor,
                "logits_processor_args": {**labels, "label": label},
            }
            return forward(model, *inputs, **options)

        return packed

    return get_forward


def _read_by_verl(batch: Any) -> Tensor:
    """Boolean ``[t]``: which tokens of a batch without padding verl reads.

    Its losses and trainers read responses; supervised training reads what the loss mask says.
    """
    ids, loss_mask, responses = batch["input_ids"], batch.get("loss_mask"), batch.get("responses")
    read = torch.zeros_like(ids.values(), dtype=torch.bool)
    if loss_mask is not None and loss_mask.is_nested:
        read |= loss_mask.values().bool()
    elif responses is None:
        return ~read
    if responses is not None:
        if responses.is_nested:
            lengths = responses.offsets().diff()
        else:
            lengths = batch["attention_mask"][:, -responses.shape[1] :].sum(1)
        ends, sizes = ids.offsets()[1:], ids.offsets().diff()
        to_end = ends.repeat_interleave(sizes) - torch.arange(len(read), device=read.device)
        read |= to_end <= lengths.repeat_interleave(sizes)
    return read
