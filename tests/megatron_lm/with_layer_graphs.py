"""The checkout's ``pretrain_gpt.py`` with Transformer Engine's CUDA graphs of layers on the CPU.

Megatron and Transformer Engine capture and replay them by their own code, over the stand-in of
``tests/pipeline/cpu_graphs.py``.
Megatron makes its static inputs in 16 bits; here they have the precision of the model,
which is 32 bits with ``--overlap-moe-expert-parallel-comm`` too.
"""

from __future__ import annotations

import runpy
import sys
from typing import Any

from megatron.core.transformer import cuda_graphs
from megatron.core.transformer.module import GraphableMegatronModule

from megatron_vocabpar.megatron_lm.flags import OVERLAP
from tests.megatron_lm.script_name import script_of
from tests.megatron_lm.with_fp32_plans import plans_in_float32
from tests.pipeline.cpu_graphs import engine_graphs_on_cpu, handed_on_apart

STOCKS_ORDER = "--captured-in-stocks-order"
"""Plants a fault: graphs are captured in the order of Megatron's schedule, whatever runs."""

_static_inputs = GraphableMegatronModule.get_layer_static_inputs


def in_the_models_precision(layer: Any, seq_length: int, micro_batch_size: int) -> dict[str, Any]:
    inputs = _static_inputs(layer, seq_length, micro_batch_size)
    hidden = inputs["hidden_states"].detach().to(layer.config.params_dtype)
    return inputs | {"hidden_states": hidden.requires_grad_()}


if __name__ == "__main__":
    GraphableMegatronModule.get_layer_static_inputs = in_the_models_precision
    if STOCKS_ORDER in sys.argv:
        sys.argv.remove(STOCKS_ORDER)
        replaced: Any = cuda_graphs.convert_schedule_table_to_order
        cuda_graphs.convert_schedule_table_to_order = replaced.__wrapped__
    if OVERLAP in sys.argv:
        plans_in_float32()
    with engine_graphs_on_cpu(), handed_on_apart():
        runpy.run_module(script_of(sys.argv), run_name="__main__")
