"""These tests need the stand-in, which only ``make cuda-emulated`` builds and starts."""

import os

import pytest

collect_ignore_glob = ["test_*.py"]
if os.environ.get("EMULATED_GPUS") == "1":
    collect_ignore_glob.clear()
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = (
        "8"  # with one, as other tests have it, streams wait for each other
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What uses a GPU in this process comes last: a fork of it could not use one any more."""
    items.sort(key=lambda item: item.path.name == "test_emulation.py")
