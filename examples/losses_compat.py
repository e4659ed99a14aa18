"""Functions that verl, slime and NeMo-RL call, in a few lines each: copy them, and change one import.

``torchrun --nproc-per-node 2 examples/losses_compat.py`` compares them with the whole vocabulary. Names,
positional arguments, result shapes and gradients are those of verl at b178a3cd5, slime at 624b824a8 and
NeMo-RL at 7ea279abf. Statistics are always fp32, no argument is written to, and chunks are chosen by size.
ROLL's functions are in the package, as ``megatron_vocabpar.losses.compat.roll``.
"""

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_vocabpar.losses import (
    LazyLogits,
    vocab_argmax,
    vocab_entropy,
    vocab_logprobs,
    vocab_logprobs_and_entropy,
)
from megatron_vocabpar.losses.compat.roll import vocab_parallel_logprobs
from megatron_vocabpar.losses.tensor_parallel import gather_sequence

# Of verl, in verl/utils/megatron/tensor_parallel.py and verl/utils/kernel/linear_cross_entropy.py.


def vocab_parallel_entropy(vocab_parallel_logits):
    group = parallel_state.get_tensor_model_parallel_group()
    return vocab_entropy(vocab_parallel_logits, group=group, keep_exponentials=True)


def vocab_parallel_log_probs_from_logits(logits, labels):
    group = parallel_state.get_tensor_model_parallel_group()
    return vocab_logprobs(logits, labels, group=group, keep_exponentials=True)


def linear_cross_entropy(hidden, weight, labels, temperature=1.0, reduction="none", dist_process_group=None):
    assert reduction == "none"
    logits = LazyLogits(hidden.flatten(0, -2), weight)
    return vocab_logprobs_and_entropy(
        logits, labels.flatten(), temperature=temperature, group=dist_process_group
    )


# Of slime, in slime/utils/ppo_utils.py.


def calculate_log_probs_and_entropy(logits, tokens, tp_group, with_entropy=False, chunk_size=-1):
    if with_entropy:
        logprobs, entropy = vocab_logprobs_and_entropy(logits, tokens, group=tp_group, keep_exponentials=True)
    else:
        logprobs, entropy = vocab_logprobs(logits, tokens, group=tp_group, keep_exponentials=True), None
    return logprobs.unsqueeze(-1), entropy


# Of NeMo-RL, in nemo_rl/distributed/model_utils.py, which shifts the ids itself.


def from_parallel_logits_to_logprobs(
    logits, target, start, stop, tp_group, inference_only=False, chunk_size=None
):
    following, options = target.roll(-1, dims=-1), {"inference_only": inference_only}
    return vocab_logprobs(logits, following, group=tp_group, keep_exponentials=True, **options)[:, :-1]


def from_parallel_hidden_states_to_logprobs(
    hidden, weight, gather_output, target, start, stop, tp_group, inference_only=False, chunk_size=None
):
    logits = LazyLogits(gather_sequence(hidden, tp_group).transpose(0, 1), weight)
    following, options = target.roll(-1, dims=-1), {"inference_only": inference_only}
    return vocab_logprobs(logits, following, group=tp_group, rows_per_chunk=chunk_size, **options)[:, :-1]


def vocab_parallel_argmax(logits, *, tp_group=None):
    return vocab_argmax(logits, group=tp_group)


def main():
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=dist.get_world_size())
    group, rank, size = dist.group.WORLD, dist.get_rank(), dist.get_world_size()

    torch.manual_seed(0)
    logits, tokens = torch.randn(1, 5, 16), torch.randint(0, 16, (1, 5))
    rows = 16 // size
    start, stop = rank * rows, (rank + 1) * rows
    shard = logits[..., start:stop].contiguous()

    verl = vocab_parallel_log_probs_from_logits(shard, tokens), vocab_parallel_entropy(shard[0])
    slime, entropy = calculate_log_probs_and_entropy(shard[0], tokens[0], group, with_entropy=True)
    nemo = from_parallel_logits_to_logprobs(shard, tokens, start, stop, group)  # of the next tokens
    expected = torch.log_softmax(logits, dim=-1)
    wanted = expected.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    shifted = expected[:, :-1].gather(-1, tokens[:, 1:].unsqueeze(-1)).squeeze(-1)
    differences = {
        "ROLL": vocab_parallel_logprobs(shard, tokens) - wanted,
        "verl": verl[0] - wanted,
        "slime": slime.squeeze(-1) - wanted[0],
        "NeMo-RL": nemo - shifted,
        "entropy": verl[1] - entropy,
    }
    if rank == 0:
        for name, difference in differences.items():
            print(f"{name:<8} largest difference {float(difference.abs().max()):.0e}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
