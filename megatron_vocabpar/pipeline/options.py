"""``VocabOptions``: all options of the vocabulary layers, a field for each. Standard library only.

Next: ``rules/``, what cannot be combined.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from megatron_vocabpar.layers.terms import Distillation
from megatron_vocabpar.option import asked_for, option

if TYPE_CHECKING:
    from megatron_vocabpar.layers.terms import LossTerms


@dataclass(frozen=True)
class Metric:
    """A number of every token that a loss function may have.

    Attributes:
        extra: its module and class in ``layers/extras/``; the class names the parameter of the loss function.
        is_: what it is, for ``--help``.
        has_gradient: whether the loss may depend on it, with the word ``<name>-gradient``.
    """

    extra: str
    is_: str
    has_gradient: bool = False


_GRADIENT = "-gradient"
METRICS = {
    "entropy": Metric("entropy:Entropy", "its entropy in nats (entropy)", has_gradient=True),
    "accuracy": Metric("target_rank:TargetRank", "whether no id is likelier than its target (correct)"),
}
_WORDS = tuple(
    word
    for name, metric in METRICS.items()
    for word in (name, f"{name}{_GRADIENT}")[: 1 + metric.has_gradient]
)


@dataclass(frozen=True, kw_only=True)
class VocabOptions:
    """How partitioned vocabulary layers are computed, and what the loss function gets of every token.

    Only the terms of the loss, ``fp8_head`` and ``drop_masked`` change results by more than rounding.
    """

    recompute: bool = option(
        False,
        "Keep nothing of the logits from pass S on; T, and in vocab-1 TW, compute them again.",
        page="A product more in vocab-2, two in vocab-1; less memory.",
        flag="recompute-logits",
    )
    rows_per_chunk: int | None = option(
        None,
        "Tokens whose float32 logits exist at one time; by default what suits the GPU, at most 128 MiB.",
        flag="tokens-per-chunk",
        least=1,
    )
    invariant: bool = option(
        False,
        "The same bits of the loss and the vocabulary layers' gradients for every pipeline and tensor size, "
        "at a cost.",
        page="See [invariance.md](invariance.md). Pads the vocabulary to 256 ids a shard.",
    )
    z_loss: float = option(0.0, "Weight of the squared logsumexp in every token's loss.")
    softcap: float | None = option(
        None,
        "Bound of the logits c: c tanh(logit / c), as in Gemma 2.",
        page="Not with label smoothing.",
        flag="logit-softcap",
    )
    label_smoothing: float = option(
        0.0, "Part of the label that is spread over all ids.", page="As PyTorch's."
    )
    logit_scale: float = option(1.0, "Factor of the logits, before a softcap.")
    distillation: Distillation | None = option(
        None,
        "In training, a divergence from the teacher that the call is given, as a part of every token's loss.",
        flag=None,
    )
    fp32_head: bool = option(
        False,
        "Keep the output layer's weight in float32 in a 16-bit model, and compute with it so.",
        page="See [precision.md](precision.md). Not with tied embeddings.",
    )
    fp8_head: bool = option(
        False,
        "Multiply 8-bit operands in the output layer, with a scale for each row: log-probabilities of "
        "trained models were off by hundredths of a nat.",
        page="See [precision.md](precision.md).",
    )
    drop_masked: bool = option(
        False,
        "In training, leave tokens whose loss mask is 0 in the batch out of the output layer; they report 0.",
        page="Masked tokens are padding, prompts, and with `--eod-mask-loss` ends of documents. A report of "
        "unmasked losses changes. Tokens labelled -100, as in Megatron's `--sft`, are left out anyway.",
    )
    metrics: tuple[str, ...] = option(
        (),
        f"Numbers of every token: {', '.join(metric.is_ for metric in METRICS.values())}. A loss function "
        "that has a parameter of that name gets them, else their mean is logged. With -gradient the loss may "
        "depend on the number: one more product, twice the input gradient to reduce.",
        page="See [entropies and accuracy](reinforcement.md#entropies-and-accuracy).",
        choices=_WORDS,
    )
    target_rank: bool = option(
        False,
        "In forward-only calls, give the loss function rank=[b, s]: how many ids are likelier than the "
        "target. It is called at the end then, and exponentials are kept as long as in training.",
        flag=None,
    )
    top_logprobs: int = option(
        0,
        "In training, give the call's keep_top every token's k most likely ids and their log-probabilities.",
        flag=None,
        least=0,
    )
    channels: int | None = option(
        None,
        "The most channels of NCCL, each on one multiprocessor, of the vocabulary layers' collectives; by "
        "default the fewest with which no pass of the first plan waits.",
        page="Nothing without NCCL. 32 leaves the number to NCCL; see [plan.md](plan.md#channels).",
        least=1,
    )
    independent_init: bool = option(
        False,
        "Draw the initial vocabulary weights on each rank, not as whole layers on the first and last stage; "
        "they then differ from those of a run without the flag.",
        page="For layers that are too large for one rank.",
    )

    @cached_property
    def terms(self) -> LossTerms:
        """The terms of a token's loss; a ``ValueError`` for values that no loss has."""
        from megatron_vocabpar.layers.terms import LossTerms

        return LossTerms(**{name: getattr(self, name) for name in TERMS})

    @property
    def metric_names(self) -> list[str]:
        """The metrics that are asked for, a gradient or not."""
        return [name for name in METRICS if {name, f"{name}{_GRADIENT}"} & {*self.metrics}]

    @property
    def gradients(self) -> tuple[str, ...]:
        """The metrics on which the loss may depend."""
        return tuple(name for name in METRICS if f"{name}{_GRADIENT}" in self.metrics)

    @property
    def keeps_exponentials(self) -> bool:
        """Whether S keeps the plain exponentials of all logits, of which entropies are made."""
        return not asked_for(self, WITHOUT_EXPONENTIALS)


DEFAULTS = VocabOptions()

TERMS = ("z_loss", "softcap", "label_smoothing", "logit_scale", "distillation")
"""The fields that are terms of the loss."""
OF_EXPONENTIALS = ("metrics", "target_rank")
"""The fields that ask for numbers made of kept exponentials."""
WITHOUT_EXPONENTIALS = ("recompute", "invariant", "fp8_head", "softcap")
"""The fields with which S keeps no plain exponentials."""
