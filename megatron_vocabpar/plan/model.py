"""A model as the planner needs it: sizes, and what follows from them for one token.

Layers are taken to be alike: where some differ (leading dense layers of a mixture of experts, sliding
windows), each counts as the mean. A head of multi-token prediction has such a layer, a projection of hidden
states beside embedded tokens, and the output layer's work once more; its weights are those of a layer with
experts, where there are any (DeepSeek-V3, README_WEIGHTS.md: 11.5 B in its head).

Source: for operations ``schedule/times/flops.py``; for activations Korthikanti et al., Reducing Activation
Recomputation (2022), section 4.1, with attention that keeps no scores.
Next: ``read_config.py`` and ``read_arguments.py``, where they come from; ``job.py``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron_vocabpar.schedule.times.flops import STEP, attention_flops, product_flops

_HALF = 2  # bytes of an element in 16 bits


@dataclass(frozen=True)
class Model:
    """A decoder.

    Attributes:
        name, source: what it is, and where the sizes are from.
        vocab, hidden, layers, seq_length: V, H, L, s.
        heads, groups, head_dim: of attention; ``groups`` share keys and values.
        ffn: width of a dense MLP.
        gated: whether the MLP has a gate, three products instead of two.
        tied: whether both vocabulary layers share one weight.
        dropout: whether masks are kept for the backward pass.
        learned_positions: whether there is a weight for positions.
        experts, top_k, expert_ffn, shared_ffn: of a mixture of experts; 0 where there is none.
        routed_groups: groups of experts that a token's experts are of at most; 0 where any may be.
        dense_layers: how many of the layers have a dense MLP though others have experts.
        window, windowed: tokens that a windowed layer sees, and the share of layers that are windowed.
        latent: widths of latent attention: query and key-value compression, and the three parts of a head
            (without and with rotary position, value); empty for ordinary attention.
        mtp_depths: heads of multi-token prediction beside the first.
        flags: Megatron's flags that make the model and change nothing that is counted here.
        softcap: the largest logit, where a tanh bounds them.
        beyond: what of the model no flag of Megatron's says.
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
    def expert_weights(self) -> float:
        """Weights of all routed experts of the mean layer."""
        return _sparse(self) * self.experts * _mlp(self) * self.expert_ffn

    @property
    def shared_weights(self) -> float:
        """Weights of the mean layer that every token passes, the router among them; norms are left out."""
        dense = (1.0 - _sparse(self)) * _mlp(self) * self.ffn
        sparse = _sparse(self) * (_mlp(self) * self.shared_ffn + self.hidden * self.experts)
        return _attention_weights(self) + dense + sparse

    @property
    def matmul_flops(self) -> float:
        """Operations of the mean layer's products with weights, forward, one token."""
        return product_flops(self.shared_weights) + self.expert_flops

    @property
    def expert_flops(self) -> float:
        """Operations of the mean layer's products with weights of routed experts, forward, one token."""
        return product_flops(_sparse(self) * self.top_k * _mlp(self) * self.expert_ffn)

    @property
    def repeated_flops(self) -> float:
        """Operations of the mean layer that selective recomputation runs again, one token: dense MLPs, and
        latent attention's products into the heads."""
        weights = (1.0 - _sparse(self)) * _mlp(self) * self.ffn
        if self.latent:
            queries, keys, plain, _, value = self.latent
            weights += queries * _widths(self)[0] + keys * self.heads * (plain + value)
        return product_flops(weights)

    @property
    def exchanged_width(self) -> float:
        """Elements of a token that the mean layer sends to experts, and gets back, forward."""
        return _sparse(self) * self.top_k * self.hidden

    @property
    def key_width(self) -> int:
        """Elements of a token that attention of other tokens reads."""
        return sum(_widths(self)[1:3]) if not self.latent else self.latent[1] + self.latent[3]

    @property
    def attention_flops(self) -> float:
        """Operations of the mean layer's scores and their use, forward, one token: the whole square."""
        query, _, _, output = _widths(self)
        seen = min(self.seq_length, 2 * self.window) if self.window else self.seq_length
        mean = (1.0 - self.windowed) * self.seq_length + self.windowed * seen
        return attention_flops(mean, query + output)

    @property
    def output_flops(self) -> float:
        """Operations of the output layer, forward, one token."""
        return product_flops(self.vocabulary_weights)

    @property
    def step_flops(self) -> float:
        """Operations of forward and backward, one token; what MFU counts."""
        layer = self.matmul_flops + self.attention_flops
        head = layer + product_flops(self.projection_weights) + self.output_flops
        return STEP * (self.layers * layer + self.output_flops + self.mtp_depths * head)

    @property
    def projection_weights(self) -> int:
        """Weights of a head's projection, from hidden states beside embedded tokens."""
        return 2 * self.hidden**2

    @property
    def head_weights(self) -> float:
        """Weights of a head of multi-token prediction that every token passes."""
        return self.with_head_layers.shared_weights + self.projection_weights

    @property
    def with_head_layers(self) -> Model:
        """The same model with all layers as the heads of multi-token prediction have them."""
        return replace(self, dense_layers=0)

    @property
    def vocabulary_weights(self) -> int:
        """Weights of one vocabulary layer."""
        return self.vocab * self.hidden

    @property
    def parameters(self) -> float:
        """Of the whole model."""
        vocabulary = self.vocabulary_weights * (1 if self.tied else 2)
        positions = self.seq_length * self.hidden if self.learned_positions else 0
        layers = self.layers * (self.shared_weights + self.expert_weights)
        heads = self.mtp_depths * (self.head_weights + self.with_head_layers.expert_weights)
        return layers + heads + vocabulary + positions

    @property
    def activation_bytes(self) -> float:
        """Bytes that the mean layer keeps of one token from forward to backward."""
        attention = sum(_widths(self)) + 4 * self.hidden  # and what enters both norms, attention and MLP
        per_width = 3 if self.gated else 2
        dense = (1.0 - _sparse(self)) * per_width * self.ffn
        routed = self.top_k * (per_width * self.expert_ffn + 2 * self.hidden)
        sparse = _sparse(self) * (routed + per_width * self.shared_ffn)
        masks = 2 * self.hidden if self.dropout else 0
        return _HALF * (attention + dense + sparse) + masks

    @property
    def selective_bytes(self) -> float:
        """The same where norms, activation functions of experts, dense MLPs and latent attention's products
        into the heads run again (``--recompute-modules layernorm moe_act mlp mla_up_proj``)."""
        attention = 2 * self.hidden + (
            sum(self.latent[:2]) + self.latent[3] + _widths(self)[3] if self.latent else sum(_widths(self))
        )
        kept = 2 if self.gated else 1
        routed = self.top_k * (kept * self.expert_ffn + 2 * self.hidden) + kept * self.shared_ffn
        masks = 2 * self.hidden if self.dropout else 0
        return _HALF * (attention + _sparse(self) * routed) + masks


def _widths(model: Model) -> tuple[int, int, int, int]:
    """Of queries, keys, values and attention's output, all heads."""
    if not model.latent:
        query, shared = model.heads * model.head_dim, model.groups * model.head_dim
        return query, shared, shared, query
    *_, plain, rotary, value = model.latent
    return (model.heads * (plain + rotary),) * 2 + (model.heads * value,) * 2


def _attention_weights(model: Model) -> int:
    query, key, value, output = _widths(model)
    if not model.latent:
        return model.hidden * (query + key + value + output)
    queries, keys, plain, rotary, head_value = model.latent
    into_queries = queries * (model.hidden + query) if queries else model.hidden * query
    into_keys = model.hidden * (keys + rotary) + keys * model.heads * (plain + head_value)
    return into_queries + into_keys + output * model.hidden


def _sparse(model: Model) -> float:
    """The share of layers that have experts."""
    return (model.layers - model.dense_layers) / model.layers if model.experts else 0.0


def _mlp(model: Model) -> int:
    """Weights of an MLP over its width."""
    return (3 if model.gated else 2) * model.hidden
