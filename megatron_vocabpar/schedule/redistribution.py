"""Redis and Megatron's splits: transformer layers moved away from the stages that hold the vocabulary layers.

The paper's second baseline (section 6.2) counts floating-point operations and makes the longest stage as
short as whole layers allow. Where the output layer alone outweighs an average stage, nothing helps: the last
stage has no layer left and the others wait for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


def layer_flops(hidden: int, seq_length: int) -> int:
    """Operations of one transformer layer, forward and backward, per token (Table 4, over ``b s``)."""
    return hidden * (72 * hidden + 12 * seq_length)


def output_flops(hidden: int, vocab_size: int) -> int:
    """Operations of the output layer, forward and backward, per token (Table 4)."""
    return 6 * hidden * vocab_size


def input_flops(hidden: int) -> int:
    """Operations of the input layer, forward and backward, per token (Table 4)."""
    return 3 * hidden


def redistribute(
    layers: int,
    p: int,
    first_stage_work: float,
    last_stage_work: float,
    layer_work: float,
    most: Sequence[int] | None = None,
) -> tuple[int, ...]:
    """Transformer layers of each stage that make the longest stage shortest.

    Args:
        layers: transformer layers of the model.
        p: pipeline stages.
        first_stage_work, last_stage_work: what the input and the output layer add, in any unit.
        layer_work: one transformer layer, in the same unit.
        most: for each stage, the most layers that its memory holds (``StageMemory.most_layers``).

    Returns:
        Layers per stage; the last stage may have none. Ties go to earlier stages.

    Raises:
        ValueError: if there are fewer layers than stages to fill, or they don't fit into memory.
    """
    room = [layers] * p if most is None else list(most)
    if sum(room) < layers or min(room[:-1], default=1) < 1:
        raise ValueError(
            f"{layers} layers don't fit: the {p} stages have memory for {' '.join(map(str, room))}; use more "
            "stages or smaller microbatches"
        )
    if p > 1 and layers < p - 1:
        raise ValueError(f"{layers} layers cannot fill the first {p - 1} of {p} stages; use fewer stages")
    counts = [1] * (p - 1) + [0] if p > 1 else [0]
    loads = [count * layer_work for count in counts]
    loads[0] += first_stage_work
    loads[-1] += last_stage_work
    for _ in range(layers - sum(counts)):
        stage = min((s for s in range(p) if counts[s] < room[s]), key=lambda s: (loads[s], s))
        counts[stage] += 1
        loads[stage] += layer_work
    return tuple(counts)


@dataclass(frozen=True)
class StageMemory:
    """What a stage of 1F1B has to hold, in any one unit (say MiB).

    Attributes:
        limit: of one rank.
        layer: one transformer layer's weights, gradients and optimizer state.
        activations: of one layer and one microbatch.
        first, last: what the input and the output layer take on their stages, besides.
    """

    limit: float
    layer: float
    activations: float
    first: float = 0.0
    last: float = 0.0

    def most_layers(self, p: int, m: int) -> tuple[int, ...]:
        """For each stage the most layers that fit: stage s of p holds activations of min(p - s, m)."""
        besides = [0.0] * p
        besides[0] += self.first
        besides[-1] += self.last
        return tuple(
            max(0, int((self.limit - besides[stage]) // (self.layer + self.activations * min(p - stage, m))))
            for stage in range(p)
        )


def redistribute_by_flops(
    layers: int, p: int, hidden: int, seq_length: int, vocab_size: int
) -> tuple[int, ...]:
    """``redistribute`` with the operation counts of Table 4, as in section 6.2."""
    return redistribute(
        layers,
        p,
        input_flops(hidden),
        output_flops(hidden, vocab_size),
        layer_flops(hidden, seq_length),
    )


def with_final_stage(layers: int, p: int, final_stage_layers: int) -> tuple[int, ...]:
    """``final_stage_layers`` on the last stage, the others as even as whole layers allow, longer ones first.

    Raises:
        ValueError: if the other stages would have no layer.
    """
    rest = layers - final_stage_layers
    if final_stage_layers < 0 or p < 2 or rest < p - 1:
        raise ValueError(
            f"{final_stage_layers} layers on the last of {p} stages leave {rest} for the other {p - 1}; "
            f"choose 0 to {max(0, layers - p + 1)} with at least two stages"
        )
    share, longer = divmod(rest, p - 1)
    return (*(share + (stage < longer) for stage in range(p - 1)), final_stage_layers)


def megatron_split(
    layers: int,
    p: int,
    *,
    first: int | None = None,
    last: int | None = None,
    account_for_embedding: bool = False,
    account_for_loss: bool = False,
) -> tuple[int, ...]:
    """Layers of each stage as Megatron's own flags split them, to be compared with.

    Args:
        layers: transformer layers of the model.
        p: pipeline stages.
        first, last: ``--decoder-first-pipeline-num-layers`` and ``--decoder-last-pipeline-num-layers``.
        account_for_embedding, account_for_loss: ``--account-for-embedding-in-pipeline-split`` and
            ``--account-for-loss-in-pipeline-split``: the layer counts as one more transformer layer.

    Raises:
        ValueError: if the layers cannot be split evenly so, as Megatron would say too.
    """
    if account_for_embedding or account_for_loss:
        if first is not None or last is not None:
            raise ValueError(
                "either the vocabulary layers count as layers, or the ends have their own number; give one"
            )
        share, left = divmod(layers + account_for_embedding + account_for_loss, p)
        counts = [share] * p
        counts[0] -= account_for_embedding
        counts[-1] -= account_for_loss
    else:
        middle = [stage for stage in range(p) if not (stage == 0 and first) and not (stage == p - 1 and last)]
        rest = layers - (first or 0) - (last or 0)
        share, left = divmod(rest, len(middle)) if middle else (0, rest)
        counts = [share] * p
        counts[0] = first or counts[0]
        counts[-1] = last or counts[-1]
    if left or min(counts) < 0:
        raise ValueError(
            f"{layers} layers cannot be split evenly over {p} stages with these ends; change them"
        )
    return tuple(counts)
