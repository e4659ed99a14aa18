"""The flags of this package for a choice, and Megatron's flags that place its layers.

A training that plans for itself asks them, too. Next: ``advice.py``.
"""

from __future__ import annotations

from megatron_vocabpar.plan.choice import STOCK, Choice
from megatron_vocabpar.plan.job import OVERLAP
from megatron_vocabpar.plan.layer_counts import written
from megatron_vocabpar.plan.pattern import written_in
from megatron_vocabpar.schedule.make.families import family_named
from megatron_vocabpar.schedule.words.methods import BASELINE, REDIS, method_named


def placing_flags(choice: Choice) -> list[str]:
    """The flags of this package, and Megatron's flags that place the layers."""
    if choice.method == STOCK:
        return list(choice.flags)
    request, family = choice.request, family_named(choice.family)
    flags = []
    if request.model.pattern:  # redis places its bars when the training starts
        bars = choice.method != REDIS and len(choice.layers) > 1
        flags += [written_in(request.model.written_pattern, choice.layers)] if bars else []
    elif choice.method == REDIS:
        flags.append(f"--final-stage-num-layers {choice.layers[-1]}")
    elif len(set(choice.layers)) > 1:
        flags.append(written(choice.layers, request.model.mtp_depths))
    elif family.chunks > 1:
        flags.append(f"--num-virtual-stages-per-pipeline-rank {family.chunks}")
    if (choice.method, choice.family) == (BASELINE, "1f1b"):
        return flags
    if family.pairs:
        flags += OVERLAP[:1] if family.splits_w else OVERLAP  # W in B may be delayed within the pair
    flags += ["--enable-vocab-parallel", f"--vocab-parallel-method {choice.method}"]
    softcap = request.model.softcap if method_named(choice.method).vocabulary_parallel else 0.0
    flags += [f"--vocab-parallel-logit-softcap {softcap:g}"] if softcap else []
    return [*flags, *([] if choice.family == "1f1b" else [f"--vocab-parallel-family {choice.family}"])]
