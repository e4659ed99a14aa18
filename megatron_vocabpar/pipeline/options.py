"""``VocabOptions``: all options of the vocabulary layers, a field for each. Standard library only.

Next: ``rules/``, what cannot be combined.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from megatron_vocabpar.layers.terms import Distillation, LossTerms
from megatron_vocabpar.option import asked_for, option


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
    "entropy": Metric("entropy:Entropy", "entropy, in nats", has_gradient=True),
    "accuracy": Metric("target_rank:TargetRank", "accuracy, 1 if no id is likelier than the target, else 0"),
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
        "Keep nothing of the size of the logits from pass S on; T, and in vocab-1 also TW, compute them "
        "again.",
        page="That saves 2 bytes a logit of every microbatch in flight, and costs one more product in "
        "vocab-2 or two in vocab-1.",
        flag="recompute-logits",
    )
    rows_per_chunk: int | None = option(
        None,
        "The number of tokens whose float32 logits exist at one time; by default what suits the GPU, at most "
        "128 MiB.",
        page="Fewer tokens take less memory during S and T, and more kernel launches.",
        flag="tokens-per-chunk",
        example="1024",
        by_default="what suits the GPU, so that the logits of a chunk take at most 128 MiB",
        least=1,
    )
    invariant: bool = option(
        False,
        "Make the loss and the gradients of the vocabulary layers the same, to the bit, for every pipeline "
        "and tensor parallel size, at a cost.",
        page="[invariance.md](invariance.md) gives the cost. The vocabulary is padded to 256 ids a shard.",
    )
    z_loss: float = option(
        0.0, "The weight of the squared logsumexp in the loss of every token.", example="1e-4"
    )
    softcap: float | None = option(
        None,
        "The bound c of logits, which become c tanh(logit / c), as in Gemma 2.",
        page="It cannot be combined with label smoothing.",
        flag="logit-softcap",
        example="30",
        by_default="no bound",
    )
    label_smoothing: float = option(
        0.0,
        "The part of the label that is spread evenly over all ids.",
        page="PyTorch's `cross_entropy` defines it in the same way.",
        example="0.1",
    )
    logit_scale: float = option(
        1.0, "The factor by which logits are multiplied, before a softcap.", example="0.5"
    )
    distillation: Distillation | None = option(
        None,
        "In training, a divergence from the teacher that the call is given, as a part of every token's loss.",
        flag=None,
    )
    fp32_head: bool = option(
        False,
        "Keep the LM head's weight in float32 in a 16-bit model, and multiply in float32 in the LM head.",
        page="[precision.md](precision.md#a-float32-head) says what it costs. Embeddings must be untied.",
    )
    fp8_head: bool = option(
        False,
        "Multiply 8-bit operands in the LM head, with a scale for each row; log-probabilities of trained "
        "models were off by hundredths of a nat.",
        page="[precision.md](precision.md#an-8-bit-head) has its errors. It has not run on a GPU.",
    )
    drop_masked: bool = option(
        False,
        "In training, leave tokens whose loss mask is 0 out of the LM head; their reported loss is 0.",
        page="Masked tokens are padding, prompts, and with `--eod-mask-loss` ends of documents, so time and "
        "memory of the LM head follow the tokens that train. A report of unmasked losses changes. Tokens "
        "labelled -100, as in Megatron's `--sft`, are left out without the flag.",
    )
    metrics: tuple[str, ...] = option(
        (),
        f"Numbers of every token: {'; '.join(metric.is_ for metric in METRICS.values())}; entropy-gradient, "
        "an entropy on which the loss may depend, which takes one more product and doubles the input "
        "gradient to reduce. A loss function gets them through parameters called entropy and correct; if it "
        "has neither, their means are logged.",
        page="[Entropies and accuracy](reinforcement.md#entropies-and-accuracy) has an example.",
        choices=_WORDS,
        example="entropy accuracy",
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
        "The most channels of NCCL that the collectives of the vocabulary layers may use, each of which "
        "occupies a multiprocessor; by default the fewest with which no pass of the first plan waits.",
        page="It has no effect without NCCL. 32 leaves the number to NCCL; [plan.md](plan.md#channels) says "
        "how the default is found.",
        least=1,
        example="4",
        by_default="the fewest with which no pass of the first plan waits",
    )
    independent_init: bool = option(
        False,
        "Draw the initial vocabulary weights on every rank for itself, instead of whole layers on the first "
        "and last stage; they then differ from those of a run without the flag.",
        page="Use it where a whole layer does not fit on one rank.",
    )

    @cached_property
    def terms(self) -> LossTerms:
        """The terms of a token's loss; a ``ValueError`` for values that no loss has."""
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
