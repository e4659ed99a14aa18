"""A checkpoint says whose buckets hold its optimizer state, if they are not stock's, and others refuse it."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_vocabpar.megatron_lm import optimizer_buckets
from megatron_vocabpar.megatron_lm.flag_config import FlagConfig
from megatron_vocabpar.megatron_lm.optimizer_buckets import (
    buckets_of,
    compared,
    marked,
    metadata_with_buckets,
    state_of_own_buckets,
)

KIND = "distrib_optim_sharding_type"
BY_BUCKET = ("dp_reshardable", "dp_zero_gather_scatter", "fully_sharded_bucket_space")
BY_PARAMETER = ("fully_reshardable", "fully_sharded_model_space", "fsdp_dtensor")


def own(method: str = "vocab-2", family: str = "1f1b", p: int = 2, t: int = 1, chunks: int = 1) -> str:
    return buckets_of(FlagConfig(enabled=True, method=method, family=family), p, t, chunks)


STOCK = own("baseline")
OTHERS = {
    "stock": STOCK,
    "partitioned": own(),
    "more stages": own(p=4),
    "tensor parallel": own(t=2),
    "chunks": own(family="interleaved", chunks=2),
    "V": own(family="v-half", chunks=2),
    "whole in a V": own("baseline", "v-half", chunks=2),
}
SAME = [
    (own("vocab-1"), own("vocab-2")),
    (own("naive"), own("vocab-2", "zb-h1")),
    (own("vocab-2", "auto"), own()),
    (own("vocab-2", "search", chunks=2), own(family="v-zb", chunks=2)),
    (own("baseline", "interleaved", chunks=2), STOCK),
    (own("redis", "zb-h1"), STOCK),
]
"""Methods and families whose buckets hold the same."""


@pytest.mark.parametrize("kind", BY_BUCKET)
def test_other_buckets_are_refused(kind: str) -> None:
    saved = {name: marked({KIND: kind}, buckets) for name, buckets in OTHERS.items()}
    assert saved["stock"] == {KIND: kind}  # as stock reads it
    for writer, metadata in saved.items():
        for reader, buckets in OTHERS.items():
            if writer == reader:
                assert compared(metadata, buckets)[KIND] == kind
                continue
            with pytest.raises(ValueError, match=rf"by bucket \({kind}\)") as refused:
                compared(metadata, buckets)
            said = str(refused.value)
            assert (OTHERS[writer] or "stock") in said.partition("This is")[0]
            assert (OTHERS[reader] or "stock") in said.partition("This is")[2]
            assert "--no-load-optim or --finetune" in said


def test_stock_reads_whose_they_are_and_the_remedy() -> None:
    """It knows no kind of this name, and says the name."""
    for kind, remedy in zip(
        BY_BUCKET, ("--dist-ckpt-optim-fully-reshardable", "--ckpt-fully-parallel-save"), strict=False
    ):
        name = marked({KIND: kind}, own())[KIND]
        assert name.startswith(f"{kind} by megatron_vocabpar with vocab-2: partitioned vocabulary layers, ")
        assert name.endswith(f"to load it elsewhere, save it with {remedy}")


@pytest.mark.parametrize(("one", "other"), SAME)
def test_methods_with_the_same_buckets_go_on_from_each_other(one: str, other: str) -> None:
    for writer, reader in ((one, other), (other, one)):
        assert compared(marked({KIND: BY_BUCKET[0]}, writer), reader)[KIND] == BY_BUCKET[0]


@pytest.mark.parametrize("metadata", [{}, *({KIND: kind} for kind in BY_PARAMETER)])
def test_state_by_parameter_belongs_to_all(metadata: dict[str, str]) -> None:
    for buckets in OTHERS.values():
        assert marked(metadata, buckets) == compared(metadata, buckets) == metadata


def test_megatrons_functions_hand_on_what_stock_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where one optimizer hands the metadata to another, which has it compared already."""
    config = FlagConfig(enabled=True, method="vocab-2")
    monkeypatch.setattr(optimizer_buckets, "_own", lambda _: own())
    build = metadata_with_buckets(lambda args: {KIND: args, "other": 1}, config)

    def inner(model: dict[str, Any], is_loading: bool = False, metadata: Any = None) -> Any:
        return model, is_loading, metadata and {key: metadata[key] for key in (KIND, "other")}

    one = state_of_own_buckets(inner, config)
    several = state_of_own_buckets(one, config)
    for state in (one, several):
        expected = ({}, True, {KIND: "dp_reshardable", "other": 1})
        assert state({}, True, metadata=build("dp_reshardable")) == expected
        assert state({}) == ({}, False, None)
        with pytest.raises(ValueError, match="saved by stock Megatron"):
            state({}, True, metadata={KIND: "dp_reshardable"})
