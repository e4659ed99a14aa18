"""GRPO through a vocabulary-parallel pipeline of four CPU processes: ``python examples/grpo.py``, in minutes.

A tiny GPT learns to add: the prompt is ``a + b =``, the answer two digits, the reward the share of digits
that are right. Samples, the old policy's and the reference's log-probabilities and the updates all come from
the same pipeline, forward only or with gradients. The first steps are those of one unsharded stock
GPTModel: the same program on one process, without any of our code, runs at the end and is compared.

Source of the loss: Shao et al. (2024), DeepSeekMath, equations 3 and 4.
"""

import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn

from megatron_vocabpar import (
    ForwardBackward,
    VocabParallelGPTModel,
    initialise_weights,
    megatron_on_cpu,
    vocab_groups,
)

STAGES, STEPS, COMPARED = 4, 40, 3
PROMPTS, GROUP, UPDATES, MICROBATCHES, ANSWER = 16, 8, 2, 4, 2
CLIP, KL, LEARNING_RATE = 0.2, 0.01, 3e-3
LARGEST = 4  # of the numbers that are added
PLUS, EQUALS, VOCAB = 10, 11, 12  # after the digits


def prompts(draw: torch.Generator) -> tuple[Tensor, Tensor]:
    """``[R, 4]`` ids of PROMPTS sums, each GROUP times, and ``[R, 2]`` the digits of their results."""
    a, b = torch.randint(0, LARGEST + 1, (2, PROMPTS), generator=draw)
    ids = torch.stack([a, torch.full_like(a, PLUS), b, torch.full_like(a, EQUALS)], 1)
    digits = torch.stack([(a + b) // 10, (a + b) % 10], 1)
    return ids.repeat_interleave(GROUP, 0), digits.repeat_interleave(GROUP, 0)


def call(model: nn.Module, ids: Tensor, labels: Tensor) -> Tensor:
    """The losses ``[b, s]``; a label of -100 costs no work in the output layer; its loss means nothing."""
    b, s = ids.shape
    mask = torch.triu(torch.ones(s, s, dtype=torch.bool), 1)[None, None]
    return model(ids, torch.arange(s).expand(b, s), mask, labels=labels)


def data_step(data: Iterator[tuple[Tensor, Tensor]], model: nn.Module) -> tuple[Tensor, Callable]:
    """What Megatron calls where the log-probabilities are the result."""
    return call(model, *next(data)), lambda losses, non_loss_data: -losses.float().clone()


def loss_step(data: Iterator[tuple[Tensor, ...]], model: nn.Module) -> tuple[Tensor, Callable]:
    """And where they are trained."""
    ids, labels, *fields = next(data)

    def loss_func(losses: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        old, reference, advantages = fields
        logp, mask = -losses.float(), labels >= 0
        ratio = (logp - old).exp()
        gain = torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)
        kl = (reference - logp).exp() - (reference - logp) - 1
        loss = ((KL * kl - gain) * mask).sum() / mask.sum()
        return loss, {"loss": loss.detach(), "kl": ((kl * mask).sum() / mask.sum()).detach()}

    return call(model, ids, labels), loss_func


class Trainer:
    """The policy, its reference and their pipeline, on one rank of it."""

    def __init__(self, stages: int) -> None:
        self.config = TransformerConfig(
            num_layers=STAGES,
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
        self.run: Callable[..., list[Any]] = (
            get_forward_backward_func()
            if stages == 1
            else ForwardBackward("vocab-2", vocab_groups(), torch.device("cpu"))
        )
        self.policy, self.reference = self._model(stages), self._model(stages)
        self.config.finalize_model_grads_func = finalize_model_grads
        self.optimizer = get_megatron_optimizer(OptimizerConfig(lr=LEARNING_RATE), [self.policy])
        self.draw = torch.Generator().manual_seed(5)

    def _model(self, stages: int) -> DistributedDataParallel:
        build = GPTModel if stages == 1 else VocabParallelGPTModel
        model = build(
            self.config,
            get_gpt_layer_local_spec(),
            VOCAB,
            4 + ANSWER,
            pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(),
        )
        initialise_weights(model, 1)
        return DistributedDataParallel(self.config, DistributedDataParallelConfig(), model)

    def _iterate(self, step: Callable, model: nn.Module, tensors: tuple[Tensor, ...], **options: Any) -> list:
        rows, length = tensors[0].shape
        microbatches = zip(*(tensor.chunk(MICROBATCHES) for tensor in tensors), strict=True)
        return self.run(
            forward_step_func=step,
            data_iterator=microbatches,
            model=[model],
            num_microbatches=MICROBATCHES,
            seq_length=length,
            micro_batch_size=rows // MICROBATCHES,
            **options,
        )

    def log_probabilities(self, model: nn.Module, ids: Tensor, labels: Tensor) -> Tensor:
        """``[R, s]`` of the labels, on every rank."""
        with torch.no_grad():
            found = self._iterate(
                data_step, model, (ids, labels), forward_only=True, collect_non_loss_data=True
            )
        return shared(torch.cat(found) if found else torch.empty(ids.shape))

    def sampled(self, ids: Tensor) -> Tensor:
        """The rows with one more token, drawn from the policy: as many labels as there are ids."""
        candidates = torch.full((len(ids), VOCAB, ids.shape[1]), -100)
        candidates[:, :, -1] = torch.arange(VOCAB)
        logp = self.log_probabilities(self.policy, ids.repeat_interleave(VOCAB, 0), candidates.flatten(0, 1))
        below = logp[:, -1].view(-1, VOCAB).exp().cumsum(1) < torch.rand(len(ids), 1, generator=self.draw)
        return torch.cat([ids, below.sum(1, keepdim=True).clamp(max=VOCAB - 1)], 1)

    def step(self) -> dict[str, float]:
        """Answers to some prompts, and the updates that they give; means over all answers."""
        ids, digits = prompts(self.draw)
        for _ in range(ANSWER):
            ids = self.sampled(ids)
        rewards = (ids[:, -ANSWER:] == digits).float().mean(1)
        groups = rewards.view(-1, GROUP)
        spread = groups.std(1, keepdim=True, unbiased=False) + 1e-4
        advantages = ((groups - groups.mean(1, keepdim=True)) / spread).view(-1, 1)
        labels = torch.full_like(ids[:, 1:], -100)
        labels[:, -ANSWER:] = ids[:, -ANSWER:]
        ids = ids[:, :-1].contiguous()
        old = self.log_probabilities(self.policy, ids, labels)
        reference = self.log_probabilities(self.reference, ids, labels)
        said: dict[str, float] = {"reward": float(rewards.mean())}
        for update in range(UPDATES):
            self.policy.zero_grad_buffer()
            self.optimizer.zero_grad()
            reports = self._iterate(loss_step, self.policy, (ids, labels, old, reference, advantages))
            _, said[f"gradient {update}"], _ = self.optimizer.step()
            for name in ("loss", "kl"):
                mean = torch.tensor([float(report[name]) for report in reports] or [0.0]).mean()
                said[f"{name} {update}"] = float(shared(mean))
        return said


def shared(tensor: Tensor) -> Tensor:
    """What the last rank has."""
    dist.broadcast(tensor, dist.get_world_size() - 1)
    return tensor


def work(rank: int, stages: int, steps: int, folder: str) -> None:
    """One process of a pipeline; the last one writes what was seen, a dict a step."""
    torch.set_num_threads(1)
    rendezvous = f"file://{folder}/store-{stages}"
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=stages)
    with megatron_on_cpu():
        parallel_state.initialize_model_parallel(pipeline_model_parallel_size=stages)
        model_parallel_cuda_manual_seed(1)
        trainer, history = Trainer(stages), []
        for step in range(1, steps + 1):
            history.append(trainer.step())
            if rank == stages - 1 and step % 10 == 0:
                reward = sum(said["reward"] for said in history[-10:]) / 10
                print(f"step {step} reward {reward:.3f} kl {history[-1]['kl 1']:.3f}", flush=True)
        if rank == stages - 1:
            torch.save(history, f"{folder}/history-{stages}")
    dist.destroy_process_group()


def main(steps: int = STEPS) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for stages, count in ((STAGES, steps), (1, COMPARED)):
            torch.multiprocessing.spawn(work, (stages, count, folder), nprocs=stages)
        found, expected = (torch.load(Path(folder) / f"history-{n}") for n in (STAGES, 1))
    for step, (ours, theirs) in enumerate(zip(found[:COMPARED], expected, strict=True), 1):
        error = max(abs(ours[name] - theirs[name]) / max(1.0, abs(theirs[name])) for name in theirs)
        print(f"step {step}: {len(theirs)} numbers equal the unsharded model's to {error:.1e}")
        assert error <= 1e-5, (ours, theirs)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
