"""A model as the planner needs it: the operations and bytes of one token.

Source: for operations ``schedule/times/flops.py``; for activations Korthikanti et al., Reducing Activation
Recomputation (2022), section 4.1, with attention that keeps no scores.
Next: ``read_config.py`` and ``read_arguments.py``, which make models; ``job.py``.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_vocabpar.plan.decoder import Decoder, mlp_weights, widths_of
from megatron_vocabpar.schedule.times.flops import STEP, attention_flops, product_flops

_HALF = 2  # bytes of an element in 16 bits


@dataclass(frozen=True)
class Model(Decoder):
    """A decoder with the operations and bytes of a token."""

    @property
    def matmul_flops(self) -> float:
        """Operations of the mean layer's products with weights, forward, one token."""
        return product_flops(self.shared_weights) + self.expert_flops

    @property
    def expert_flops(self) -> float:
        """Operations of the mean layer's products with weights of routed experts, forward, one token."""
        return product_flops(self.sparse * self.top_k * mlp_weights(self) * self.expert_ffn)

    @property
    def repeated_flops(self) -> float:
        """Operations that selective recomputation runs again in the mean layer, one token.

        They are those of dense MLPs, and of latent attention's products into the heads.
        """
        weights = (1.0 - self.sparse) * mlp_weights(self) * self.ffn
        if self.latent:
            queries, keys, plain, _, value = self.latent
            weights += queries * widths_of(self)[0] + keys * self.heads * (plain + value)
        return product_flops(weights)

    @property
    def exchanged_width(self) -> float:
        """Elements of a token that the mean layer sends to experts in a forward pass, and gets back."""
        return self.sparse * self.top_k * self.hidden

    @property
    def key_width(self) -> int:
        """Elements of a token that attention of other tokens reads."""
        return sum(widths_of(self)[1:3]) if not self.latent else self.latent[1] + self.latent[3]

    @property
    def attention_flops(self) -> float:
        """Operations of the mean layer's attention, forward, one token: scores and their use, no mask."""
        query, _, _, output = widths_of(self)
        seen = min(self.seq_length, 2 * self.window) if self.window else self.seq_length
        mean = (1.0 - self.windowed) * self.seq_length + self.windowed * seen
        return attention_flops(mean, query + output)

    @property
    def output_flops(self) -> float:
        """Operations of the output layer, forward, one token."""
        return product_flops(self.vocabulary_weights)

    @property
    def step_flops(self) -> float:
        """Operations of one token's forward and backward, as MFU counts them."""
        layer = self.matmul_flops + self.attention_flops
        head = layer + product_flops(self.projection_weights) + self.output_flops
        return STEP * (self.layers * layer + self.output_flops + self.mtp_depths * head)

    @property
    def activation_bytes(self) -> float:
        """Bytes that the mean layer keeps of one token from forward to backward."""
        attention = sum(widths_of(self)) + 4 * self.hidden  # and what enters both norms, attention and MLP
        per_width = 3 if self.gated else 2
        dense = (1.0 - self.sparse) * per_width * self.ffn
        routed = self.top_k * (per_width * self.expert_ffn + 2 * self.hidden)
        sparse = self.sparse * (routed + per_width * self.shared_ffn)
        masks = 2 * self.hidden if self.dropout else 0
        return _HALF * (attention + dense + sparse) + masks

    @property
    def selective_bytes(self) -> float:
        """Bytes that the mean layer keeps of one token under selective recomputation.

        Norms, activation functions of experts, dense MLPs and latent attention's products into the heads run
        again (``--recompute-modules layernorm moe_act mlp mla_up_proj``).
        """
        attention = 2 * self.hidden + (
            sum(self.latent[:2]) + self.latent[3] + widths_of(self)[3]
            if self.latent
            else sum(widths_of(self))
        )
        kept = 2 if self.gated else 1
        routed = self.top_k * (kept * self.expert_ffn + 2 * self.hidden) + kept * self.shared_ffn
        masks = 2 * self.hidden if self.dropout else 0
        return _HALF * (attention + self.sparse * routed) + masks
