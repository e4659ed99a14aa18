"""The same call under other frameworks' names: ``torchrun --nproc-per-node 2 examples/losses_compat.py``.

Each line of imports below replaces one in a training script of that framework; arguments stay as they are.
"""

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_vocabpar.losses.compat.nemo_rl import from_parallel_logits_to_logprobs
from megatron_vocabpar.losses.compat.roll import vocab_parallel_logprobs
from megatron_vocabpar.losses.compat.slime import calculate_log_probs_and_entropy
from megatron_vocabpar.losses.compat.verl import vocab_parallel_entropy, vocab_parallel_log_probs_from_logits

dist.init_process_group("gloo")
parallel_state.initialize_model_parallel(tensor_model_parallel_size=dist.get_world_size())
group, rank, size = dist.group.WORLD, dist.get_rank(), dist.get_world_size()

torch.manual_seed(0)
logits, tokens = torch.randn(1, 5, 16), torch.randint(0, 16, (1, 5))
rows = 16 // size
start, stop = rank * rows, (rank + 1) * rows
shard = logits[..., start:stop].contiguous()

roll = vocab_parallel_logprobs(shard, tokens)
verl = vocab_parallel_log_probs_from_logits(shard, tokens), vocab_parallel_entropy(shard[0])
slime, entropy = calculate_log_probs_and_entropy(shard[0], tokens[0], group, with_entropy=True)
nemo = from_parallel_logits_to_logprobs(shard, tokens, start, stop, group)  # of the next tokens
expected = torch.log_softmax(logits, dim=-1)
wanted = expected.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
shifted = expected[:, :-1].gather(-1, tokens[:, 1:].unsqueeze(-1)).squeeze(-1)
differences = {
    "ROLL": roll - wanted,
    "verl": verl[0] - wanted,
    "slime": slime.squeeze(-1) - wanted[0],
    "NeMo-RL": nemo - shifted,
    "entropy": verl[1] - entropy,
}
if rank == 0:
    for name, difference in differences.items():
        print(f"{name:<8} largest difference {float(difference.abs().max()):.0e}")
dist.destroy_process_group()
