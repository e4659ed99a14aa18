"""A model as the planner needs it: the operations and bytes of one token.

Source: for operations ``schedule/times/flops.py``; for activations Korthikanti et al., Reducing Activation
Recomputation (2022), section 4.1, with attention that keeps no scores.
Next: ``read_config.py`` and ``read_arguments.py``, which make models; ``job.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from megatron_vocabpar.plan.decoder import Decoder, mlp_weights, scan_widths, widths_of
from megatron_vocabpar.plan.pattern import ATTENTION, SCANS, layers_in
from megatron_vocabpar.schedule.times.flops import STEP, attention_flops, product_flops

_HALF = 2  # bytes of an element in 16 bits


@dataclass(frozen=True)
class Model(Decoder):
    """A decoder with the operations and bytes of a token."""

    @cached_property
    def matmul_flops(self) -> float:
        """Operations of the mean layer's products with weights, forward, one token."""
        return product_flops(self.shared_weights) + self.expert_flops

    @cached_property
    def expert_flops(self) -> float:
        """Operations of the mean layer's products with weights of routed experts, forward, one token."""
        return product_flops(self.sparse * self.top_k * self.weights_of_an_expert)

    @property
    def repeated_flops(self) -> float:
        """Operations that selective recomputation runs again in the mean layer, one token.

        They are those of dense MLPs, and of latent attention's products into the heads.
        """
        weights = self.share("-") * mlp_weights(self) * self.ffn
        if self.latent:
            queries, keys, plain, _, value = self.latent
            up = queries * widths_of(self)[0] + keys * self.heads * (plain + value)
            weights += self.share(ATTENTION) * up
        return product_flops(weights)

    @property
    def exchanged_width(self) -> float:
        """Elements of a token that the mean layer sends to experts in a forward pass, and gets back."""
        return self.sparse * self.top_k * (self.expert_hidden or self.hidden)

    @property
    def key_width(self) -> float:
        """Elements of a token that the mean layer's attention of other tokens reads."""
        width = sum(widths_of(self)[1:3]) if not self.latent else self.latent[1] + self.latent[3]
        return self.share(ATTENTION) * width

    @property
    def scanned_width(self) -> float:
        """Elements of a token that enter and leave the mean layer's scans."""
        scans = [(self.share(part), scan_widths(self, part)) for part in SCANS if self.share(part)]
        return sum(share * (inputs + output) for share, (inputs, _, output) in scans)

    @cached_property
    def attention_flops(self) -> float:
        """Operations of the mean layer's attention and scans, forward, one token: scores and use, no mask."""
        query, _, _, output = widths_of(self)
        seen = min(self.seq_length, 2 * self.window) if self.window else self.seq_length
        mean = (1.0 - self.windowed) * self.seq_length + self.windowed * seen
        flops = self.share("*+") * attention_flops(mean, query + output)
        if sparse := self.share("D"):
            heads, width, chosen = self.indexer
            scores = product_flops(self.seq_length * heads * width)
            flops += sparse * (attention_flops(min(mean, chosen), query + output) + scores)
        return flops + self.scan_flops

    @property
    def scan_flops(self) -> float:
        """Operations of the mean layer's scans, which stand in place of attention, forward, one token.

        They are counted as Megatron does (``num_floating_point_operations``): 7 for an element of Mamba's
        state, 8 for one of a gated delta net's.
        """
        flops = 0.0
        if mamba := self.share("M"):
            flops += mamba * 7 * scan_widths(self, "M")[2] * self.mamba[3]
        if delta := self.share("G"):
            flops += delta * 8 * scan_widths(self, "G")[2] * self.delta[3]
        return flops

    @property
    def layer_flops(self) -> list[float]:
        """Operations of each layer of a pattern, forward, one token."""
        return [
            self.like(one).matmul_flops + self.like(one).attention_flops for one in layers_in(self.pattern)
        ]

    @property
    def output_flops(self) -> float:
        """Operations of the output layer, forward, one token."""
        return product_flops(self.vocabulary_weights)

    @property
    def step_flops(self) -> float:
        """Operations of one token's forward and backward, as MFU counts them."""
        layer = self.matmul_flops + self.attention_flops
        of_head = self.with_head_layers if self.pattern else self
        head = (
            of_head.matmul_flops
            + of_head.attention_flops
            + product_flops(self.projection_weights)
            + self.output_flops
        )
        return STEP * (self.layers * layer + self.output_flops + self.mtp_depths * head)

    @cached_property
    def activation_bytes(self) -> float:
        """Bytes that the mean layer keeps of one token from forward to backward."""
        parts, per_width = sum(self.parts.values()), 3 if self.gated else 2
        kept = 2 * parts * self.hidden + self.share(ATTENTION) * sum(widths_of(self)) + self._kept_by_scans
        kept += self.share("-") * per_width * self.ffn
        kept += self.sparse * (self.top_k * self._kept_by_an_expert(per_width) + per_width * self.shared_ffn)
        return _HALF * kept + self._masks

    @cached_property
    def selective_bytes(self) -> float:
        """Bytes that the mean layer keeps of one token under selective recomputation.

        Norms, activation functions of experts, dense MLPs and latent attention's products into the heads run
        again (``--recompute-modules layernorm moe_act mlp mla_up_proj``).
        """
        parts, per_width = sum(self.parts.values()), 2 if self.gated else 1
        attention = (
            sum(self.latent[:2]) + self.latent[3] + widths_of(self)[3]
            if self.latent
            else sum(widths_of(self))
        )
        kept = parts * self.hidden + self.share(ATTENTION) * attention + self._kept_by_scans
        kept += self.sparse * (self.top_k * self._kept_by_an_expert(per_width) + per_width * self.shared_ffn)
        return _HALF * kept + self._masks

    def _kept_by_an_expert(self, per_width: int) -> float:
        return per_width * self.expert_ffn + 2 * (self.expert_hidden or self.hidden)

    @property
    def _kept_by_scans(self) -> float:
        """Elements: what enters a scan, and what leaves it before and behind its norm."""
        scans = [(self.share(part), scan_widths(self, part)) for part in SCANS if self.share(part)]
        return self.scanned_width + sum(share * (mixed + output) for share, (_, mixed, output) in scans)

    @property
    def _masks(self) -> float:
        return sum(self.parts.values()) * self.hidden if self.dropout else 0
