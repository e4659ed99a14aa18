"""A plugin for ms-swift, to copy: ``megatron sft --external_plugins ms_swift_plugin.py``.

It opens the door, has ms-swift's arguments judged as Megatron's, and changes DPO, whose step calls two
models: its ``forward_step`` runs the reference model and the policy side by side and hands both hidden states
from stage to stage. Here the reference comes first, for all microbatches of an iteration and without
gradients: the policy's step then calls one model. Read at ms-swift 4.6.0 with mcore-bridge 1.6.5.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial, wraps
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.models import gpt
from megatron.core.pipeline_parallel import schedules

import megatron_vocabpar.frameworks.door  # noqa: F401  opens the door, where VOCAB_PARALLEL_FLAGS are read
from megatron_vocabpar.frameworks.settings import judge, unread
from megatron_vocabpar.megatron_lm.bindings import Binding
from megatron_vocabpar.megatron_lm.flag_config import FlagConfig
from megatron_vocabpar.megatron_lm.patch import installed
from megatron_vocabpar.pipeline.rules.rule import Rule

_FIELDS = """
    model_type padding_free train_dataloader_shuffle dataloader_num_workers dataloader_pin_memory
    dataloader_persistent_workers dataloader_prefetch_factor dataloader_multiprocessing_context
    group_by_length num_train_epochs manual_gc_steps output_dir save_steps save_total_limit save_strategy
    save_safetensors save_missing_weights max_shard_size metric_for_best_model greater_is_better ddp_timeout
    ddp_backend nccl_comm_warmup report_to logging_steps eval_steps callbacks swanlab_project
    swanlab_exp_name bridge_backend model ref_model use_hf hub_token check_model torch_dtype enable_dft_loss
    enable_channel_loss task_type vit_gradient_checkpointing merge_lora
"""
_READ = frozenset(_FIELDS.split())
"""Fields of its own arguments that no argument of Megatron has, and that were read."""

RULES = (
    Rule(
        "task_type or rlhf_type",
        lambda f: f.settings.task_type != "causal_lm" or f.settings.rlhf_type not in (None, "dpo"),
        "only the losses of megatron pt, sft and rlhf --rlhf_type dpo have been read",
        "train without vocabulary parallelism",
    ),
    Rule(
        "model: a class of its own",
        lambda f: f.is_set("own_model"),
        "only mcore_bridge's GPTModel is partitioned, not its subclasses, vision models and hybrids",
        "train without vocabulary parallelism",
    ),
    Rule(
        "tuner_type",
        lambda f: f.settings.tuner_type != "full",
        "adapters of mcore_bridge have not been read",
        "use --tuner_type full",
    ),
    Rule(
        "mtp_num_layers",
        lambda f: bool(f.mtp_num_layers),
        "mcore_bridge computes its loss in a forward of its own, which needs logits",
        "leave it out",
    ),
)
"""What ms-swift has and Megatron's arguments have not."""


def partitioned(_: FlagConfig, original: type) -> type:
    """mcore_bridge's model: its constructor and forward first, then ours, then Megatron's.

    It derives from Megatron's class as it was; in a class of both, ``super()`` of its methods is ours.
    """
    return type(original.__name__, (original, gpt.GPTModel), {})


def checking_arguments(config: FlagConfig, original: Callable[..., None]) -> Callable[..., None]:
    """ms-swift's start of Megatron's process groups, which first refuses what we cannot run."""

    @wraps(original)
    def init_distributed(args: Any) -> None:
        meta = args.megatron_model_meta
        own_model = meta is None or meta.is_multimodal or meta.loader.model_cls is not None
        settings = SimpleNamespace(**vars(args), own_model=own_model)
        owner = next(base for base in type(args).__mro__ if base.__name__ == "MegatronArguments")
        its_own = [field for field in dataclasses.fields(owner) if field.name in owner.__annotations__]
        judge(settings, config, unread(args, its_own, _READ), RULES)
        original(args)

    return init_distributed


def reference_first(_: FlagConfig, original: Callable[..., Any]) -> Callable[..., Any]:
    """ms-swift's iterator of an iteration: for DPO of pairs, a batch and the reference's token losses."""

    @wraps(original)
    def replace_data_iterator(trainer: Any, data_iterator: Any) -> Any:
        data_iterator = original(trainer, data_iterator)
        if trainer.args.rlhf_type != "dpo":
            return data_iterator
        trainer.forward_step = partial(_policy_step, trainer)
        count = trainer.args.num_microbatches
        several = isinstance(data_iterator, list)
        batches = [
            [next(each) for _ in range(count)] for each in (data_iterator if several else [data_iterator])
        ]
        iterators = [iter(of_a_chunk) for of_a_chunk in batches]

        def reference_step(iterator: Any, model: Any) -> Any:
            losses = model(**_batch(trainer, next(iterator), model))
            return losses, lambda losses: (losses.sum(), {"losses": losses})

        run = schedules.get_forward_backward_func()
        with torch.no_grad(), trainer.null_ref_context() as models:
            found = run(
                forward_step_func=reference_step,
                data_iterator=iterators if several else iterators[0],
                model=models,
                num_microbatches=count,
                seq_length=trainer.args.seq_length,
                micro_batch_size=trainer.args.micro_batch_size,
                forward_only=True,
            )
        losses = [report["losses"] for report in found] or [None] * count
        pairs = [zip(of_a_chunk, losses, strict=True) for of_a_chunk in batches]
        return pairs if several else pairs[0]

    return replace_data_iterator


def _policy_step(trainer: Any, data_iterator: Any, model: Any) -> Any:
    """DPO's step with the policy alone."""
    batch, reference = next(data_iterator)
    data = _batch(trainer, batch, model)

    def loss_func(losses: torch.Tensor) -> Any:
        both = torch.cat([reference, losses])
        return trainer.loss_func(both, labels=data["labels"], packed_seq_params=data.get("packed_seq_params"))

    return model(**data), loss_func


def _batch(trainer: Any, batch: dict[str, Any], model: Any) -> dict[str, Any]:
    """The model's arguments; preparing changes a batch, so it gets a copy."""
    chunk = model.vp_stage if hasattr(model, "vp_stage") else model.module.vp_stage
    data: dict[str, Any] = trainer.get_batch(iter([dict(batch)]), chunk)
    data.pop("loss_scale", None)
    return data


OF_SWIFT: dict[Binding, Callable[[FlagConfig, Any], Any]] = {
    Binding(
        "mcore_bridge.model.gpt_model",
        "GPTModel",
        ("mcore_bridge.model",),
        "derives from Megatron's; now from ours",
    ): partitioned,
    Binding(
        "swift.megatron.arguments.megatron_args",
        "MegatronArguments._init_distributed",
        (),
        "refuses what cannot be run, before Megatron's process groups start",
    ): checking_arguments,
    Binding(
        "swift.megatron.trainers.base",
        "BaseMegatronTrainer._replace_data_iterator",
        (),
        "runs DPO's reference model before each iteration",
    ): reference_first,
}
"""Names of ms-swift and mcore_bridge, and what makes our objects of them."""

patch = installed()
assert patch is not None, "the door has just been opened"
for binding, make in OF_SWIFT.items():
    patch.replace_when_imported(binding, partial(make, patch.config))
