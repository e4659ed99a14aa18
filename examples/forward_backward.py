"""``ForwardBackward`` in a megatron-core program of one's own: ``torchrun --nproc-per-node 2`` this file.

A GPT over a pipeline of as many stages as there are processes, on the CPU over gloo. What differs from a
program without vocabulary parallelism stands between the two marks.
"""

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn

from megatron_vocabpar import ForwardBackward, VocabParallelGPTModel, megatron_on_cpu, vocab_groups

VOCAB, LENGTH, MICROBATCH, MICROBATCHES, STEPS = 64, 16, 4, 4, 20


def batches() -> Iterator[dict[str, Tensor]]:
    """Sequences in which each id is the last plus 3; the same on every rank."""
    draw = torch.Generator().manual_seed(2)
    while True:
        first = torch.randint(0, VOCAB, (MICROBATCH, 1), generator=draw)
        ids = (first + 3 * torch.arange(LENGTH + 1)) % VOCAB
        yield {"input_ids": ids[:, :-1], "labels": ids[:, 1:]}


def forward_step(data: Iterator[dict[str, Tensor]], model: nn.Module) -> tuple[Tensor, Callable]:
    """As in any megatron-core program."""
    batch = next(data)
    mask = torch.triu(torch.ones(LENGTH, LENGTH, dtype=torch.bool), 1)[None, None]
    positions = torch.arange(LENGTH).expand(MICROBATCH, LENGTH)
    return model(batch["input_ids"], positions, mask, labels=batch["labels"]), mean_loss


def mean_loss(losses: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    loss = losses.float().mean()
    return loss, {"lm loss": loss.detach()}


def transformer_config(stages: int) -> TransformerConfig:
    return TransformerConfig(
        num_layers=2 * stages,
        hidden_size=64,
        num_attention_heads=4,
        pipeline_model_parallel_size=stages,
        pipeline_dtype=torch.float32,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
    )


def main() -> None:
    stages, device = dist.get_world_size(), torch.device("cpu")
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=stages)
    model_parallel_cuda_manual_seed(1)
    config = transformer_config(stages)
    first = parallel_state.is_pipeline_first_stage()
    last = parallel_state.is_pipeline_last_stage()
    # from here
    model = VocabParallelGPTModel(
        config, get_gpt_layer_local_spec(), VOCAB, LENGTH, pre_process=first, post_process=last
    )
    model = DistributedDataParallel(config, DistributedDataParallelConfig(), model)  # as before
    forward_backward = ForwardBackward("vocab-2", vocab_groups(), device)
    # to here
    config.finalize_model_grads_func = finalize_model_grads
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=3e-3), [model])
    data = batches()
    for step in range(1, STEPS + 1):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        reported = forward_backward(
            forward_step_func=forward_step,
            data_iterator=data,
            model=[model],
            num_microbatches=MICROBATCHES,
            seq_length=LENGTH,
            micro_batch_size=MICROBATCH,
        )
        optimizer.step()
        if last and step % 5 == 0:
            loss = torch.stack([report["lm loss"] for report in reported]).mean()
            print(f"step {step} loss {loss:.4f}", flush=True)
    forward_backward.close()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    with megatron_on_cpu():
        main()
    dist.destroy_process_group()
