"""One thread per process: the machines that run the tests are small, and fork wants no threads.

A shell that starts the tests in the background has Ctrl-C ignored, and whatever they start inherits
that: here Ctrl-C is what it is in the foreground.

The working directory is an empty folder, and must be empty after every test: what a run of ``vocabpar`` has
left where the tests are started is no part of them.

Hypothesis draws the same few examples in every run; ``--hypothesis-profile long`` draws many and others.
"""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis.configuration import set_hypothesis_home_dir

signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")

settings.register_profile("default", max_examples=40, deadline=None, derandomize=True)
settings.register_profile("long", max_examples=400, deadline=None)
settings.load_profile("default")
ROOT = Path(__file__).parents[1]
set_hypothesis_home_dir(ROOT / ".hypothesis")
# Processes that tests start import ``tests.train.fake_worker`` and others from wherever they are.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))


@pytest.fixture(scope="session")
def empty_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("empty")


@pytest.fixture(autouse=True)
def _nothing_here(empty_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(empty_folder)
    yield
    assert os.listdir(empty_folder) == [], "the test wrote into the working directory"
