"""The sizes of a decoder, and how many weights they make.

All layers count as the mean layer, even if some differ (leading dense layers of a mixture of experts, sliding
windows). A head of multi-token prediction has such a layer, a projection of hidden states and embedded
tokens, and the output layer's work once more. If the model has experts, the head's layer has them, too
(DeepSeek-V3, README_WEIGHTS.md: 11.5 B weights in its head).

Next: ``model.py``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self


@dataclass(frozen=True)
class Decoder:
    """A decoder.

    Attributes:
        name, source: the model's name, and where the sizes are from.
        vocab, hidden, layers, seq_length: V, H, L, s.
        heads, groups, head_dim: attention's heads, its groups of heads that share keys and values, and the
            width of a head.
        ffn: the width of a dense MLP.
        gated: the MLP has a gate, three products instead of two.
        tied: both vocabulary layers share one weight.
        dropout: masks are kept for the backward pass.
        learned_positions: positions have a weight.
        experts, top_k: experts of a mixture, and those that a token goes to; 0 without a mixture.
        expert_ffn, shared_ffn: the widths of one expert and of the shared experts.
        routed_groups: the most groups of experts that one token's experts may come from; 0: any number.
        dense_layers: layers with a dense MLP in a model whose other layers have experts.
        window, windowed: tokens that a windowed layer sees, and the share of layers that are windowed.
        latent: widths of latent attention: query and key-value compression, and the three parts of a head
            (without and with rotary position, value); empty for ordinary attention.
        mtp_depths: heads of multi-token prediction besides the first head.
        flags: Megatron's flags that make the model, but change no count here.
        softcap: the bound of a tanh on logits; 0: none.
        beyond: properties of the model that no flag of Megatron's gives, in words.
    """

    name: str
    source: str
    vocab: int
    hidden: int
    layers: int
    seq_length: int
    heads: int
    groups: int
    head_dim: int
    ffn: int
    gated: bool = True
    tied: bool = False
    dropout: bool = False
    learned_positions: bool = False
    experts: int = 0
    top_k: int = 0
    expert_ffn: int = 0
    shared_ffn: int = 0
    routed_groups: int = 0
    dense_layers: int = 0
    window: int = 0
    windowed: float = 0.0
    latent: tuple[int, ...] = ()
    mtp_depths: int = 0
    flags: tuple[str, ...] = ()
    softcap: float = 0.0
    beyond: tuple[str, ...] = ()

    @property
    def has_dense_mlp(self) -> bool:
        return not self.experts or self.dense_layers > 0

    @property
    def sparse(self) -> float:
        """The share of layers that have experts, from 0 to 1."""
        return (self.layers - self.dense_layers) / self.layers if self.experts else 0.0

    @property
    def expert_weights(self) -> float:
        """Weights of all routed experts of the mean layer."""
        return self.sparse * self.experts * mlp_weights(self) * self.expert_ffn

    @property
    def shared_weights(self) -> float:
        """Weights of the mean layer that every token passes, with the router and without norms."""
        dense = (1.0 - self.sparse) * mlp_weights(self) * self.ffn
        sparse = self.sparse * (mlp_weights(self) * self.shared_ffn + self.hidden * self.experts)
        return _attention_weights(self) + dense + sparse

    @property
    def projection_weights(self) -> int:
        """Weights of a head's projection, whose input is hidden states and embedded tokens."""
        return 2 * self.hidden**2

    @property
    def head_weights(self) -> float:
        """Weights of a head of multi-token prediction that every token passes."""
        return self.with_head_layers.shared_weights + self.projection_weights

    @property
    def with_head_layers(self) -> Self:
        """The same model if all layers were like those of its multi-token prediction: none is dense."""
        return replace(self, dense_layers=0)

    @property
    def vocabulary_weights(self) -> int:
        """Weights of one vocabulary layer."""
        return self.vocab * self.hidden

    @property
    def parameters(self) -> float:
        """All weights of the model."""
        vocabulary = self.vocabulary_weights * (1 if self.tied else 2)
        positions = self.seq_length * self.hidden if self.learned_positions else 0
        layers = self.layers * (self.shared_weights + self.expert_weights)
        heads = self.mtp_depths * (self.head_weights + self.with_head_layers.expert_weights)
        return layers + heads + vocabulary + positions


def widths_of(model: Decoder) -> tuple[int, int, int, int]:
    """The widths of queries, keys, values and attention's output, over all heads."""
    if not model.latent:
        query, shared = model.heads * model.head_dim, model.groups * model.head_dim
        return query, shared, shared, query
    *_, plain, rotary, value = model.latent
    return (model.heads * (plain + rotary),) * 2 + (model.heads * value,) * 2


def _attention_weights(model: Decoder) -> int:
    query, key, value, output = widths_of(model)
    if not model.latent:
        return model.hidden * (query + key + value + output)
    queries, keys, plain, rotary, head_value = model.latent
    into_queries = queries * (model.hidden + query) if queries else model.hidden * query
    into_keys = model.hidden * (keys + rotary) + keys * model.heads * (plain + head_value)
    return into_queries + into_keys + output * model.hidden


def mlp_weights(model: Decoder) -> int:
    """Weights of an MLP for each unit of its width."""
    return (3 if model.gated else 2) * model.hidden
