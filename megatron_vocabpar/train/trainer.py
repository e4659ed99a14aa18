"""The training loop of ``vocabpar train``, on one rank.

1. Build model, optimizer and data as Megatron does, over the default process group.
2. For every step: call the forward-backward function, step the optimizer, write a line of metrics.
3. At every ``eval_interval`` evaluate, with the same forward-backward function.
4. At the end save a checkpoint, the schedule as a picture, and the measured timeline of the last step.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import __version__ as megatron_version
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from megatron_vocabpar.pipeline.forward_backward import Callbacks, ForwardBackward, vocab_groups
from megatron_vocabpar.runtime.agreement import agree, program_digest, versions
from megatron_vocabpar.runtime.streams import held_memory_mib, peak_memory_mib, queue_to_device
from megatron_vocabpar.runtime.timeline import Timeline, gather_trace
from megatron_vocabpar.schedule.draw.pictures import write_pictures
from megatron_vocabpar.schedule.serialize import plan_from_json
from megatron_vocabpar.train import output
from megatron_vocabpar.train.config import TrainConfig
from megatron_vocabpar.train.core_on_cpu import megatron_on
from megatron_vocabpar.train.datasets import build_datasets, microbatches
from megatron_vocabpar.train.metrics import Metrics
from megatron_vocabpar.train.prepare import DataFiles
from megatron_vocabpar.train.state import build, load_checkpoint, save_checkpoint

_START = timedelta(minutes=10)  # in which all ranks have started


def train(config: TrainConfig, device: torch.device) -> None:
    """Train one method in the default process group.

    Args:
        config: its ``output`` is the method's folder, with ``data.json`` and ``schedule.json`` in it.
    """
    with megatron_on(device):
        parallel_state.initialize_model_parallel(config.tp, config.pp)
        torch.manual_seed(config.seed)
        model_parallel_cuda_manual_seed(config.seed)
        _Trainer(config, device).train()
        parallel_state.destroy_model_parallel()


def loss_func(loss_mask: torch.Tensor | None, losses: torch.Tensor) -> tuple[Any, ...]:
    """Sum a microbatch's losses over the tokens that count, as Megatron does.

    Args:
        losses: [b, s], per token.

    Returns:
        The sum, the number of tokens, and both as the report that is averaged over microbatches.
    """
    assert loss_mask is not None
    mask = loss_mask.reshape(-1)
    total = (losses.float().reshape(-1) * mask).sum()
    tokens = mask.sum().to(torch.int)
    return total, tokens, {"lm loss": torch.stack([total.detach().clone(), tokens.float()])}


def forward_step(device: torch.device, data_iterator: Iterator[Any] | None, model: Any) -> tuple[Any, Any]:
    """Run a stage on the next microbatch, as Megatron does; stages that read no data have no iterator."""
    batch: dict[str, Any] = {}
    if data_iterator is not None:
        batch = {k: v if v is None else queue_to_device(v, device) for k, v in next(data_iterator).items()}
    inputs = (batch.get(name) for name in ("tokens", "position_ids", "attention_mask"))
    losses = model(*inputs, labels=batch.get("labels"))
    return losses, partial(loss_func, batch.get("loss_mask"))


class _Trainer:
    def __init__(self, config: TrainConfig, device: torch.device) -> None:
        self.config = config
        self.device = device
        self.folder = Path(config.output)
        self.timeline = Timeline(device)
        self.plan = plan_from_json((self.folder / output.SCHEDULE_DATA_FILE).read_text())
        self._compare_ranks()
        self.forward_backward = ForwardBackward(
            config.method,
            vocab_groups(),
            device,
            make_plan={self.plan.schedule.m: self.plan}.__getitem__,
            callbacks=Callbacks(timeline=self.timeline),
        )
        self.placement = self.plan.schedule.placement
        self.held_before_mib = held_memory_mib(device)
        self.state = build(config, self.placement, device)
        files = DataFiles.from_json((self.folder / output.DATA_FILE).read_text())
        self.train_data, self.valid_data = build_datasets(config, files)

    def _compare_ranks(self) -> None:
        options = {f"--{name.replace('_', '-')}": value for name, value in asdict(self.config).items()}
        digest = {"digest of the plan": program_digest(self.plan.program)}
        libraries = versions() | {"megatron-core": megatron_version}
        agree("configuration and versions", options | libraries | digest, _START)

    def train(self) -> None:
        """Train to the last step, and write metrics, checkpoints and the pictures of the last step."""
        config, first_step = self.config, 0
        if config.resume:
            latest = output.checkpoint_folder(self.folder, output.steps_done(self.folder))
            first_step = load_checkpoint(latest, self.state)
        batches = self._batches(self.train_data, first_step)
        with Metrics(config, self.folder / output.METRICS_FILE, first_step, dist.get_rank() == 0) as metrics:
            for step in range(first_step, config.steps):
                last = step == config.steps - 1
                if last:
                    self.timeline.start()
                measured = self._step(batches, step)
                spans = self.timeline.stop() if last else []
                if config.eval_interval and (step + 1) % config.eval_interval == 0:
                    measured["eval_loss"] = self._evaluate()
                metrics.add({"step": step + 1, **measured})
                at_interval = config.save_interval and (step + 1) % config.save_interval == 0
                if config.save and (last or at_interval):
                    save_checkpoint(output.checkpoint_folder(self.folder, step + 1), self.state, step + 1)
                if last and (trace := gather_trace(spans)) is not None:
                    write_pictures(self.folder, self.plan, trace)
        self.forward_backward.close()

    def _batches(self, dataset: Any, step: int) -> list[Iterator[Any] | None]:
        """The data of each chunk; only the first stage and that of the loss load any."""
        rank = parallel_state.get_pipeline_model_parallel_rank()
        replica = parallel_state.get_data_parallel_rank()
        ends = (0, self.placement.loss_stage)
        return [
            microbatches(dataset, self.config, step, replica)
            if self.placement.stage_of(rank, chunk) in ends
            else None
            for chunk in range(self.placement.chunks)
        ]

    def _step(self, batches: list[Iterator[Any] | None], step: int) -> dict[str, Any]:
        start = time.perf_counter()
        optimizer = self.state.optimizer
        learning_rate = optimizer.param_groups[0]["lr"]
        for chunk in self.state.chunks:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        reports = self._run(batches, forward_only=False)
        loss = _mean_loss(reports, self.device)
        if not math.isfinite(loss):  # before the optimizer would spoil all weights
            raise ArithmeticError(f"loss {loss} at step {step + 1}; give a smaller --lr or a longer --warmup")
        _, grad_norm, _ = optimizer.step()
        self.state.scheduler.step(increment=1)
        seconds = time.perf_counter() - start
        return {
            "loss": loss,
            "grad_norm": float(grad_norm),
            "lr": learning_rate,
            "tokens_per_s": self.config.tokens_per_step / seconds,
            "iteration_ms": seconds * 1e3,
            "peak_memory_mib": _peak_memory_mib(self.device, self.held_before_mib),
        }

    def _evaluate(self) -> float | None:
        """Mean loss of the first ``eval_iters`` steps' worth of the evaluation data."""
        if self.valid_data is None:
            return None
        batches = self._batches(self.valid_data, 0)
        runs = [self._run(batches, forward_only=True) for _ in range(self.config.eval_iters)]
        return _mean_loss([report for reports in runs for report in reports], self.device)

    def _run(self, batches: list[Iterator[Any] | None], forward_only: bool) -> list[Any]:
        return self.forward_backward(
            forward_step_func=partial(forward_step, self.device),
            data_iterator=batches,
            model=self.state.chunks,
            num_microbatches=self.config.microbatches,
            seq_length=self.config.seq_length,
            micro_batch_size=self.config.micro_batch_size,
            forward_only=forward_only,
        )


def _mean_loss(reports: list[Any], device: torch.device) -> float:
    """Loss per token, summed over the first tensor-parallel rank of the last stage of each replica."""
    sums = torch.zeros(2, dtype=torch.float64, device=device)
    if reports and parallel_state.get_tensor_model_parallel_rank() == 0:
        sums += torch.stack([report["lm loss"] for report in reports]).double().sum(0)
    dist.all_reduce(sums)
    total, tokens = sums.tolist()
    return total / max(tokens, 1.0)


def _peak_memory_mib(device: torch.device, before_mib: float) -> list[float]:
    """The largest peak of each pipeline rank in MiB, less ``before_mib``, held before the model was built."""
    ranks = parallel_state.get_pipeline_model_parallel_world_size()
    peaks = torch.zeros(ranks, dtype=torch.float64, device=device)
    peaks[parallel_state.get_pipeline_model_parallel_rank()] = peak_memory_mib(device) - before_mib
    dist.all_reduce(peaks, dist.ReduceOp.MAX)
    return [round(peak, 1) for peak in peaks.tolist()]
