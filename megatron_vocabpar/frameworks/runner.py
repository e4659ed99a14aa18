"""The forward-backward function of frameworks: their steps are made Megatron's, which our schedules run.

Next: ``replaced_functions.py``, how frameworks get it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from megatron.core.utils import unwrap_model

from megatron_vocabpar.frameworks.steps import BegunStep, as_megatron, begin_step
from megatron_vocabpar.megatron_lm.capture import capture_order_of
from megatron_vocabpar.megatron_lm.first_plan import first_request
from megatron_vocabpar.megatron_lm.flag_config import FlagConfig
from megatron_vocabpar.pipeline import compat
from megatron_vocabpar.pipeline.forward_backward import ForwardBackward, vocab_groups
from megatron_vocabpar.pipeline.model.stage_model import PartitionedModel, check_output_layer
from megatron_vocabpar.pipeline.options import VocabOptions
from megatron_vocabpar.pipeline.recording import StandIn
from megatron_vocabpar.pipeline.tuning.measured_plan import Plans, WriteOrder
from megatron_vocabpar.runtime.comm import broadcast


class StepRunner:
    """A forward-backward function for steps of frameworks; its first call makes groups and streams.

    Args:
        config: of ``VOCAB_PARALLEL_FLAGS``.
    """

    def __init__(self, config: FlagConfig) -> None:
        self._config = config
        self._run: ForwardBackward | None = None

    def __call__(self, stock: Callable[..., list[Any]], /, **arguments: Any) -> list[Any]:
        """megatron-core's arguments and results; ``stock`` is its function, for models that are not ours."""
        model = arguments["model"]
        chunks = model if isinstance(model, list) else [model]
        shards = unwrap_model(chunks[0])
        if not isinstance(shards, PartitionedModel):
            return stock(**arguments)
        check_output_layer(shards)
        if self._run is None:
            self._run = self._build(shards, arguments["num_microbatches"], len(chunks))
        steps = self._begin(arguments, chunks, shards)
        options = self._options(self._run, steps, arguments.get("forward_only", False))
        forward_step = arguments["forward_step_func"]

        def megatron_step(data_iterator: Any, model: Any) -> Any:
            if isinstance(model, StandIn) and model.post_process:
                return as_megatron(steps.popleft(), model)
            return forward_step(data_iterator, model)

        arguments |= {"forward_step_func": megatron_step}
        return self._run(**compat.call_arguments(arguments), options=options)

    def capture_order(self, num_microbatches: int) -> list[int]:
        """The order in which layers are captured, as ``ForwardBackward.capture_order``.

        Raises:
            ValueError: before the first iteration, or as there.
        """
        return capture_order_of(self._run, num_microbatches)

    def _build(self, model: PartitionedModel, m: int, chunks: int) -> ForwardBackward:
        config = self._config
        groups = vocab_groups(channels=config.options.channels)
        request, _ = first_request(config, config.open_schedules(groups.pipeline, chunks), m, None)
        return ForwardBackward(
            request.method_name,
            groups,
            model.output_weight.device,
            options=config.options,
            make_plan=Plans(request, WriteOrder()),
        )

    def _begin(
        self, arguments: dict[str, Any], chunks: list[torch.nn.Module], shards: PartitionedModel
    ) -> deque[BegunStep]:
        """The steps of all microbatches, on the rank of the loss stage."""
        last: Any = unwrap_model(chunks[-1])
        if not last.post_process:
            return deque()
        iterators = arguments["data_iterator"]
        iterator = iterators[-1] if isinstance(iterators, list) else iterators
        width = shards.shard.range.vocab_size // shards.config.tensor_model_parallel_size
        device = shards.output_weight.device
        return deque(
            begin_step(arguments["forward_step_func"], iterator, chunks[-1], width, device)
            for _ in range(arguments["num_microbatches"])
        )

    def _options(self, run: ForwardBackward, steps: deque[BegunStep], forward_only: bool) -> VocabOptions:
        """This call's options on all ranks: the temperature and the entropies that the steps ask for."""
        groups, options = run.groups, self._config.options
        requests = {
            (request.temperature, request.entropy, request.entropy_gradient and not forward_only)
            for request in (step.request for step in steps)
        }
        if len(requests) > 1:
            raise ValueError(
                f"temperature, entropy and its gradient {sorted(requests)} in one iteration; use one of each"
            )
        shared = torch.tensor(next(iter(requests), (1.0, 0.0, 0.0)), dtype=torch.float64, device=run.device)
        broadcast(groups, [shared], [groups.members_of(groups.pipeline - 1)[0]])
        temperature, entropy, gradient = shared.tolist()
        return replace(
            options,
            logit_scale=options.logit_scale / temperature,
            metrics=("entropy-gradient",) if gradient else ("entropy",) if entropy else (),
        )
