"""The sizes of a decoder, and how many weights they make.

A layer is made of parts, each of one kind of ``pattern.SYMBOLS``: a GPT's of attention and an MLP, a hybrid
model's of what its pattern says. All counts are of the mean layer. A GPT's layers count as that one, even if
some differ (leading dense layers of a mixture of experts, sliding windows). A hybrid model's differ, so that
each stage of it is a model of its own layers (``stages``).

A head of multi-token prediction has a layer, a projection of hidden states and embedded tokens, and the
output layer's work once more. If the model has experts, the head's layer has them, too (DeepSeek-V3,
README_WEIGHTS.md: 11.5 B weights in its head).

Next: ``model.py``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

from megatron_vocabpar.plan.pattern import ATTENTION, layers_in

MOST_LAYERS = 4096
"""Layers of a model that are counted one by one; the deepest that is published has 126."""


@dataclass(frozen=True)
class Decoder:
    """A decoder.

    Attributes:
        name, source: the model's name, and where the sizes are from.
        vocab, hidden, layers, seq_length: V, H, L, s; L counts a pattern's layers.
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
        pattern: the layers of a hybrid model, without bars and heads; empty for a GPT.
        head: the layers of a head; by default attention, and experts or an MLP.
        mamba: heads of a Mamba layer, width of a head, groups, width of the state.
        delta: heads of keys of a gated delta net, their width, heads of values, their width.
        indexer: heads of sparse attention's indexer, their width, tokens that it chooses.
        output_gate: attention's output has a gate, as wide as its queries.
        expert_hidden: the width of experts' inputs, if a projection makes it another than H; else 0.
        softcap: the bound of a tanh on logits; 0: none.
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
    pattern: str = ""
    head: str = ""
    mamba: tuple[int, ...] = ()
    delta: tuple[int, ...] = ()
    indexer: tuple[int, ...] = ()
    output_gate: bool = False
    expert_hidden: int = 0
    softcap: float = 0.0

    @cached_property
    def parts(self) -> Mapping[str, float]:
        """How many parts of each kind the mean layer has."""
        if self.pattern:
            layers = layers_in(self.pattern)
            return {part: count / len(layers) for part, count in Counter("".join(layers)).items()}
        sparse = (self.layers - self.dense_layers) / self.layers if self.experts else 0.0
        return {"*": 1.0, "-": 1.0 - sparse, "E": sparse}

    def share(self, kinds: str) -> float:
        """How many parts of these kinds the mean layer has: 0.5 for ``*`` in ``M*``."""
        return sum(number for part, number in self.parts.items() if part in kinds)

    @cached_property
    def sparse(self) -> float:
        """The share of layers that have experts, from 0 to 1."""
        return self.share("E")

    @cached_property
    def expert_weights(self) -> float:
        """Weights of all routed experts of the mean layer."""
        return self.sparse * self.experts * self.weights_of_an_expert

    @property
    def weights_of_an_expert(self) -> int:
        return mlp_weights(self) // self.hidden * (self.expert_hidden or self.hidden) * self.expert_ffn

    @cached_property
    def shared_weights(self) -> float:
        """Weights of the mean layer that every token passes, with the router and without norms."""
        return sum(number * self._weights_of(part) for part, number in self.parts.items())

    def _weights_of(self, part: str) -> int:
        if part in ATTENTION:
            return _attention_weights(self, part)
        if part == "-":
            return mlp_weights(self) * self.ffn
        if part == "E":
            narrowed = 2 * self.hidden * self.expert_hidden
            return mlp_weights(self) * self.shared_ffn + self.hidden * self.experts + narrowed
        inputs, *_, output = scan_widths(self, part)
        return self.hidden * (inputs + output)

    def like(self, layer: str) -> Self:
        """The same model if all of its layers had these parts."""
        return replace(self, pattern=f"[{layer}]", layers=1)

    @property
    def written_pattern(self) -> str:
        """Megatron's pattern without bars, with heads."""
        return self.pattern + f"/{self._head_layer}" * self.mtp_depths

    @cached_property
    def kinds(self) -> list[tuple[float, Self]]:
        """Each kind of layer: its share, and a model of such layers; of a GPT the mean layer alone."""
        if not self.pattern:
            return [(1.0, self)]
        layers = layers_in(self.pattern)
        return [(count / len(layers), self.like(kind)) for kind, count in Counter(layers).items()]

    def stages(self, counts: Sequence[int]) -> list[tuple[int, Self]]:
        """For each stage, its number of layers and a model with layers as they are there.

        A GPT's dense layers come first: of DeepSeek-V3's 61 layers on 16 stages the first one has all three.
        """
        if not self.pattern and self.experts and self.dense_layers:
            sparse, dense, stages = self.with_head_layers, self.dense_layers, []
            for count in counts:
                if dense and count:
                    of_stage = min(count, dense)
                    stages.append((count, self._with_dense(count, of_stage)))
                    dense -= of_stage
                else:
                    stages.append((count, sparse))
            return stages
        if not self.pattern:
            return [(count, self) for count in counts]
        layers, stages = layers_in(self.pattern), []
        for count in counts:
            here, layers = layers[:count], layers[count:]
            stage = replace(self, pattern="".join(f"[{one}]" for one in here), layers=count) if here else self
            stages.append((count, stage))
        return stages

    def _with_dense(self, layers: int, dense: int) -> Self:
        """The same model with so many layers, of which some are dense; a search asks for few, but often."""
        known = self._mixed.get((layers, dense))
        if known is None:
            known = self._mixed[layers, dense] = replace(self, layers=layers, dense_layers=dense)
        return known

    @cached_property
    def _mixed(self) -> dict[tuple[int, int], Self]:
        return {}

    @property
    def projection_weights(self) -> int:
        """Weights of a head's projection, whose input is hidden states and embedded tokens."""
        return 2 * self.hidden**2

    @property
    def head_weights(self) -> float:
        """Weights of a head of multi-token prediction that every token passes."""
        return self.with_head_layers.shared_weights + self.projection_weights

    @cached_property
    def with_head_layers(self) -> Self:
        """The same model if all layers were like those of its multi-token prediction: none is dense."""
        if not self.pattern:
            return replace(self, dense_layers=0)
        return self.like(self._head_layer)

    @property
    def _head_layer(self) -> str:
        attention = next((part for part in self.parts if part in ATTENTION), "*")
        return self.head or attention + ("E" if self.experts else "-")

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


def scan_widths(model: Decoder, part: str) -> tuple[int, int, int]:
    """The widths of a scan's input projection, of its convolution's result if it is kept, and of its output.

    Mamba's kernel runs the convolution again in the backward pass.
    """
    if part == "M":
        heads, width, groups, state = model.mamba
        return heads * (2 * width + 1) + 2 * groups * state, 0, heads * width
    keys, key_width, values, value_width = model.delta
    key, value = keys * key_width, values * value_width
    return 2 * (key + value + values), 2 * key + value, value


def _attention_weights(model: Decoder, part: str) -> int:
    query, key, value, output = widths_of(model)
    if not model.latent:
        return model.hidden * ((1 + model.output_gate) * query + key + value + output)
    queries, keys, plain, rotary, head_value = model.latent
    into_queries = queries * (model.hidden + query) if queries else model.hidden * query
    into_keys = model.hidden * (keys + rotary) + keys * model.heads * (plain + head_value)
    heads, width, _ = model.indexer if part == "D" else (0, 0, 0)
    indexer = (queries or model.hidden) * heads * width + model.hidden * (width + heads)
    return into_queries + into_keys + output * model.hidden + indexer


def mlp_weights(model: Decoder) -> int:
    """Weights of an MLP for each unit of its width."""
    return (3 if model.gated else 2) * model.hidden


def check_layers(count: int) -> None:
    """Refuse a number of layers that is too large to count them one by one, by ValueError."""
    if count > MOST_LAYERS:
        raise ValueError(
            f"{count:,} layers: a plan counts at most {MOST_LAYERS:,}; give the model's own number"
        )
