"""The stand-in computes what the CPU does, where it was told to, and sees what a GPU would do wrong."""

from __future__ import annotations

import time
from functools import partial

import pytest
import torch

CUDA = torch.device("cuda", 0)


def behind_slow_work() -> torch.cuda.Event:
    """An event of a stream that takes far longer than the host takes to queue what follows."""
    import emulation  # which torch's import has brought

    stream = torch.cuda.Stream()
    emulation.queue(stream, partial(time.sleep, 0.5))
    return stream.record_event()


def test_operations_and_gradients_are_the_cpus() -> None:
    x, w = torch.randn(5, 4), torch.randn(4, 3)

    def gradients(device: str) -> list[torch.Tensor]:
        leaves = [x.to(device).requires_grad_(), w.to(device).requires_grad_()]
        (leaves[0] @ leaves[1]).softmax(1).square().sum().backward()
        return [leaf.grad.cpu() for leaf in leaves]

    for ours, theirs in zip(gradients("cuda"), gradients("cpu"), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(
    "make", [lambda x: x.t(), lambda x: x[:, ::2], lambda x: x.expand(2, 3, 4), lambda x: x]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_copies_both_ways(make, dtype: torch.dtype) -> None:
    x = make(torch.arange(12).view(3, 4))
    assert torch.equal(x.to(CUDA, dtype).cpu(), x.to(dtype))
    assert torch.equal(make(torch.arange(12, device=CUDA).view(3, 4)).to("cpu", dtype), x.to(dtype))
    target = torch.empty(x.shape, dtype=dtype, device=CUDA)
    assert torch.equal(target.copy_(x).cpu(), x.to(dtype))


def test_what_depends_on_values() -> None:
    x = torch.tensor([0.0, 2.0, 0.0, 3.0], device=CUDA)
    assert x.nonzero().flatten().tolist() == [1, 3]
    assert x[x > 1].tolist() == [2.0, 3.0]
    assert torch.unique(x).tolist() == [0.0, 2.0, 3.0]
    assert float(x.sum()) == 5.0


def test_a_number_fills_where_a_mask_says() -> None:
    x = torch.tensor([1.0, 2.0, 3.0], device=CUDA)
    x[x > 1] = 0.0
    assert x.tolist() == [1.0, 0.0, 0.0]
    x[x < 1] = torch.tensor([5.0, 6.0], device=CUDA)
    assert x.tolist() == [1.0, 5.0, 6.0]


def test_products_in_float32_of_16_bit_operands() -> None:
    a, b = torch.randn(4, 8).bfloat16(), torch.randn(8, 4).bfloat16()
    exact = a.float() @ b.float()
    product = torch.mm(a.to(CUDA), b.to(CUDA), out_dtype=torch.float32)
    total = torch.addmm(product, a.to(CUDA), b.to(CUDA), out_dtype=torch.float32)
    torch.testing.assert_close(product.cpu(), exact)
    torch.testing.assert_close(total.cpu(), 2 * exact)


def test_a_side_stream_that_does_not_wait_reads_what_is_there() -> None:
    """With the wait it reads what was written; without it, NaN, as the first stream is held up."""
    side, found = torch.cuda.Stream(), []
    for waits in (True, False):
        x = torch.empty(1000, device=CUDA)
        torch.cuda.synchronize()
        torch.cuda.current_stream().wait_event(behind_slow_work())
        x.fill_(1.0)
        if waits:
            side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            total = x.sum()
        torch.cuda.synchronize()
        found.append(bool(total.isfinite()))
    assert found == [True, False]


def test_memory_that_another_stream_still_reads_is_spoilt() -> None:
    side = torch.cuda.Stream()
    x = torch.ones(1000, device=CUDA)
    side.wait_stream(torch.cuda.current_stream())
    side.wait_event(behind_slow_work())
    with torch.cuda.stream(side):
        total = x.sum()
    del x  # neither recorded on the stream, nor held
    torch.empty(1000, device=CUDA)  # takes the memory
    torch.cuda.synchronize()
    assert not total.isfinite()


@pytest.mark.parametrize(("beside", "longest"), [(True, 1), (False, 2)])
def test_events_tell_what_runs_beside_what(beside: bool, longest: int) -> None:
    """Two streams take the time of one product, one stream that of two, whatever the host is busy with."""
    a = torch.ones(600, 600, device=CUDA)
    main, other = torch.cuda.current_stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    other.wait_event(start)
    with torch.cuda.stream(other if beside else main):
        a @ a
    a @ a
    main.wait_stream(other)
    end.record()
    torch.cuda.synchronize()
    product_ms = 2 * 600**3 / 60e12 * 1e3 + 0.002
    assert start.elapsed_time(end) == pytest.approx(longest * product_ms, rel=1e-3)


def test_what_the_host_waited_for_is_over_before_what_it_queues_then() -> None:
    a, other = torch.ones(600, 600, device=CUDA), torch.cuda.Stream()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    a @ a
    torch.cuda.current_stream().synchronize()
    with torch.cuda.stream(other):
        end.record()
    torch.cuda.synchronize()
    assert start.elapsed_time(end) > 0.007


def test_a_full_device_is_told() -> None:
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(1 << 40, dtype=torch.uint8, device=CUDA)
    torch.empty(1, device=CUDA)


def test_devices_are_not_mixed() -> None:
    x = torch.ones(2, 2, device=CUDA)
    with pytest.raises(RuntimeError, match="same device"):
        x @ torch.ones(2, 2)
    with pytest.raises(RuntimeError, match="same device"):
        x + torch.ones(2, 2, device="cuda:1")
