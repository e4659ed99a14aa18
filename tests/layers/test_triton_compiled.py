"""What the compiler makes of the Triton kernels for sm_80, sm_90 and sm_100; needs Triton, and no GPU."""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

from megatron_vocabpar.layers.kernels import dispatch
from megatron_vocabpar.layers.numbers import Slopes, empty_softmax
from megatron_vocabpar.layers.terms import LossTerms

from .compiled import Compiled, compile_launches

P, H = 32768, 4096
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
STORED = DTYPES | {"fp8": torch.float8_e4m3fn}
CAPABILITIES = [90, *(pytest.param(capability, marks=pytest.mark.long) for capability in (80, 100))]


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    os.environ["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))


def checked(capability: int, launch) -> Compiled:
    """The one kernel that is launched: no register in memory, no 32-bit offset of a row, nothing fused."""
    (kernel,) = compile_launches(capability, launch)
    assert kernel.count("LDL") == kernel.count("STL") == 0, kernel.resources
    assert kernel.resource("STACK") == kernel.resource("LOCAL") == 0, kernel.resources
    assert kernel.resource("REG") <= 128, kernel.resources
    assert kernel.short_products() == []
    assert not kernel.fuses
    return kernel


def wide(kernel: Compiled) -> tuple[int, int]:
    """Loads and stores of 16 bytes."""
    return kernel.count("LDG.E.128"), kernel.count("STG.E.128")


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize(
    ("dtype", "options", "loads", "stores", "instructions"),
    [
        ("bf16", {}, 12, 4, 16),
        ("fp16", {}, 8, 2, 20),
        ("fp32", {}, 8, 4, 20),
        ("fp8", {}, 8, 1, 19),
        ("bf16", {"terms": LossTerms(softcap=30.0, logit_scale=0.5)}, 6, 2, 56),
        ("fp32", {"terms": LossTerms(softcap=30.0, logit_scale=0.5)}, 4, 2, 60),
        ("bf16", {"terms": LossTerms(softcap=30.0), "given": True}, 2, 1, 56),
        ("bf16", {"given": True}, 4, 2, 15),
        ("fp32", {"given": True}, 4, 4, 15),
        ("bf16", {"kept": False}, 12, 0, 15),
        ("fp16", {"kept": False, "smoothed": True}, 8, 0, 19),
    ],
    ids=str,
)
def test_exponentials(
    capability: int, dtype: str, options: dict, loads: int, stores: int, instructions: int
) -> None:
    """4096 elements by 256 threads: each reads 16 bytes four times in a pass, and writes 16-bit ones twice,
    8-bit ones once. With a softcap it is half of that. Storage without headroom has three passes in its code:
    the first block's, the only one of the whole row, and one for rows whose offset was too small.

    At most ``instructions`` per element in the passes over the whole row that all rows need; they were 40.
    The true ids do not end at a multiple of 16, and fp32 exponentials take the place of their logits.
    """
    if (dtype, capability) == ("fp8", 80):
        pytest.skip("8-bit products need compute capability 8.9")
    options = dict(options)
    logits, targets = torch.empty(2, P), torch.zeros(2, dtype=torch.int64)
    out = logits if dtype == "fp32" else torch.empty(2, P, dtype=STORED[dtype])
    stats = torch.empty(2, 5 if options.pop("smoothed", False) else 4)
    if not options.pop("kept", True):
        out = None
    offset = stats[:, 0] if options.pop("given", False) else None
    kernel = checked(
        capability,
        lambda: dispatch.triton_kernels().exponentials(
            logits, targets, P - 3, offset, dtype=STORED[dtype], out=out, stats=stats, **options
        ),
    )
    assert wide(kernel) == (loads, stores)
    elements = 8 if "terms" in options else 16
    passes = [turn / elements for turn in kernel.loops() if turn > 1]  # the last is the end of the code
    assert sum(passes[:1] if dtype == "bf16" else passes) <= instructions, passes
    assert len(passes) == (1 if offset is not None else 2), passes


@pytest.mark.parametrize("capability", [90, 100])
@pytest.mark.parametrize("options", [{}, {"given": True}, {"kept": False}], ids=str)
def test_the_product_with_its_epilogue(
    capability: int, options: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensor cores and bulk copies, nothing spilled, at most 18 instructions for a logit.

    With a given offset it is one more. The second launch, for rows that need it, can skip its tiles.
    """
    from megatron_vocabpar.layers.kernels import triton_product

    monkeypatch.setattr(triton_product, "tile_options", lambda _: triton_product.TILES[capability // 10])
    monkeypatch.setattr(triton_product, "exponentials", lambda *_, **more: None)  # of the first ids
    x, weight = (torch.empty(size, H, dtype=torch.bfloat16) for size in (256, 1024))
    targets, stats = torch.zeros(256, dtype=torch.int64), torch.empty(256, 4)
    out = torch.empty(256, 1024, dtype=torch.bfloat16) if options.get("kept", True) else None
    offset = stats[:, 0] if "given" in options else None
    kernels = compile_launches(
        capability,
        lambda: triton_product.product_exponentials(x, weight, targets, 1021, offset, out=out, stats=stats),
    )
    names = ["_product_kernel", "_sums_kernel"]
    assert [kernel.name for kernel in kernels] == names * (1 if "given" in options else 2)
    for kernel in kernels:
        assert kernel.count("LDL") == kernel.count("STL") == 0, kernel.resources
        assert kernel.resource("STACK") == kernel.resource("LOCAL") == 0, kernel.resources
        assert kernel.short_products() == []
        assert not kernel.fuses
    tile = triton_product.TILES[capability // 10]
    logits = tile["ROWS"] * tile["IDS"] / (32 * tile["num_warps"])  # of a thread
    for kernel in kernels[::2]:
        assert kernel.count({90: "HGMMA", 100: "UTCHMMA"}[capability]) > 0
        assert kernel.count("UTMALDG.2D") > 0
        assert (kernel.count("UTMASTG.2D") == 0) == (out is None)
    turns = kernels[0].loops()
    a_tile = next(turn for turn in turns if turn > 600)
    assert a_tile / logits <= (19 if "given" in options else 18), turns
    if len(kernels) == 4:
        assert next(turn for turn in kernels[2].loops() if turn > 50) < 150


@pytest.mark.parametrize("columns", [8194, P - 2])
def test_a_shard_that_is_no_multiple_of_16_rows_is_read_one_by_one(columns: int) -> None:
    """Why the vocabulary is padded as it is, and that the counts above can be other ones."""
    logits, targets = torch.empty(2, columns), torch.zeros(2, dtype=torch.int64)
    out = torch.empty(2, columns, dtype=torch.bfloat16)
    kernel = checked(
        90,
        lambda: dispatch.triton_kernels().exponentials(
            logits, targets, columns - 1, dtype=out.dtype, out=out
        ),
    )
    assert wide(kernel) == (0, 0)


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_scale_rows(capability: int, dtype: str) -> None:
    x, scale = torch.empty(2, H, dtype=DTYPES[dtype]), torch.empty(2)
    kernel = checked(capability, lambda: dispatch.triton_kernels().scale_rows(x, scale))
    assert wide(kernel) == ((2, 2) if dtype == "fp32" else (1, 1))


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_lift(capability: int) -> None:
    x, scale = torch.empty(2, H, dtype=torch.float16), torch.empty(2)
    peaks, _ = compile_launches(capability, lambda: dispatch.triton_kernels().lift(x, scale))
    assert peaks.count("LDG.E.128") + peaks.count("LDG.E.64") > 0
    assert peaks.count("STL") == 0


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("values", DTYPES)
@pytest.mark.parametrize("into", ["bf16", "fp32"])
@pytest.mark.parametrize("chosen", [False, True], ids=["IB", "dX, dW"])
def test_scatter_add_rows(capability: int, values: str, into: str, chosen: bool) -> None:
    """dX and dW choose their rows and scale them; the embedding's gradient does neither."""
    rows = torch.zeros(32, dtype=torch.int64)
    options = {"source": rows, "scale": torch.empty(32)} if chosen else {}
    kernel = checked(
        capability,
        lambda: dispatch.triton_kernels().scatter_add_rows_(
            torch.empty(64, H, dtype=DTYPES[into]),
            rows,
            torch.empty(32, H, dtype=DTYPES[values]),
            order=rows,
            **options,
        ),
    )
    assert kernel.count("LDG.E.128") > 0


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("softcap", [False, True])
@pytest.mark.parametrize("lse", [False, True])
def test_merge_and_row_gradient(capability: int, lse: bool, softcap: bool) -> None:
    n, kernels = 256, dispatch.triton_kernels()
    stats, softmax = torch.empty(8, n, 4), empty_softmax(n, torch.float32, torch.device("cpu"))
    checked(capability, lambda: kernels.merge(stats, softmax))
    slopes = Slopes(torch.empty(n), torch.empty(n) if lse else None)
    rest = torch.zeros(32, dtype=torch.int64), torch.empty(n) if softcap else None
    checked(capability, lambda: kernels.row_gradient(softmax, slopes, stats[0, :, 0], *rest))
