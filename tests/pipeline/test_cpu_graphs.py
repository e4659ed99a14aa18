"""The stand-in for CUDA graphs: memory that a capture frees, and flags that a replay reads."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from tests.pipeline.cpu_graphs import Capture, Graph, Pool
from tests.transformer_engine.dtypes import DType
from tests.transformer_engine.quantized import quantize


def test_what_is_freed_in_a_capture_is_taken_by_what_is_captured_next() -> None:
    pool, graph, inputs = Pool(), Graph(), torch.ones(4)
    with Capture(graph, pool):
        freed = inputs + 1
        kept = freed * 3
        freed.untyped_storage().resize_(0)
        taken = kept + 5
    assert taken.data_ptr() == freed.data_ptr()
    inputs.fill_(2)
    graph.replay()
    assert kept.tolist() == [9] * 4
    assert taken.tolist() == [14] * 4


def test_who_reads_what_a_capture_has_freed_gets_nan() -> None:
    pool, graph, inputs = Pool(), Graph(), torch.ones(4)
    with Capture(graph, pool):
        freed = inputs + 1
        freed.untyped_storage().resize_(0)
        late = freed[:2].clone()
    graph.replay()
    assert late.isnan().all()


def test_outside_a_capture_storages_are_resized_as_ever() -> None:
    tensor = torch.ones(4)
    with Capture(Graph(), Pool()):
        tensor.untyped_storage().resize_(0)
    assert tensor.untyped_storage().nbytes() == 0


def test_a_replay_reads_whether_weights_in_8_bits_stay_as_they_are() -> None:
    """As Transformer Engine captures it: in 8 bits anew in the first microbatch of an iteration alone."""
    kind = type("Float8CurrentScalingQuantizer", (SimpleNamespace,), {})
    quantizer = kind(
        dtype=DType.kFloat8E4M3, with_amax_reduction=False, amax_epsilon=0.0, force_pow_2_scales=False
    )
    weight, skip = torch.tensor([[1.0, 2.0]]), torch.zeros(1)
    cached = SimpleNamespace(
        _data=torch.zeros(1, 2, dtype=torch.uint8), _transpose=None, _scale_inv=torch.zeros(1)
    )
    graph = Graph()
    with Capture(graph, Pool()):
        quantize(weight, quantizer, cached, noop=skip)
    for value, skips, scale in ((4.0, 0.0, 4 / 448), (8.0, 1.0, 4 / 448), (8.0, 0.0, 8 / 448)):
        weight[0, 1] = value
        skip.fill_(skips)
        graph.replay()
        torch.testing.assert_close(cached._scale_inv, torch.tensor([scale]))
