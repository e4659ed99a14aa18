"""One thread per process: the machines that run the tests are small, and fork wants no threads.

A shell that starts the tests in the background has Ctrl-C ignored, and whatever they start inherits
that: here Ctrl-C is what it is in the foreground.

The working directory is an empty folder, and must be empty after every test: what a run of ``vocabpar`` has
left where the tests are started is no part of them.

A file that imports a library which is not installed is skipped and names it, so that a GPU image without
megatron-core or Hypothesis runs what it can. Hypothesis draws the same few examples in every run;
``--hypothesis-profile long`` draws many and others.
"""

import gc
import importlib.util
import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests import left_out

gc.disable()  # until all tests are collected: a fifth of that time
signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
os.environ.pop("COLUMNS", None)  # pytest-xdist sets it; output is as wide as a file's

ROOT = Path(__file__).parents[1]
if importlib.util.find_spec("hypothesis"):
    from hypothesis import settings
    from hypothesis.configuration import set_hypothesis_home_dir

    settings.register_profile("default", max_examples=40, deadline=None, derandomize=True)
    settings.register_profile("long", max_examples=400, deadline=None)
    settings.load_profile("default")
    set_hypothesis_home_dir(ROOT / ".hypothesis")
# Processes that tests start import functions of the tests from wherever they are.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))


@pytest.fixture(scope="session")
def empty_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("empty")


@pytest.fixture(autouse=True)
def _nothing_here(empty_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(empty_folder)
    yield
    assert os.listdir(empty_folder) == [], "the test wrote into the working directory"


def pytest_configure(config: pytest.Config) -> None:
    if not importlib.util.find_spec("pytest_timeout"):
        config.addinivalue_line("markers", "timeout: kept by pytest-timeout, which is not installed")


class FileWithLibraries(pytest.Module):
    """A test file that is skipped where a library that it imports is not installed."""

    def _getobj(self) -> Any:
        try:
            return super()._getobj()
        except self.CollectError as error:
            missing = getattr(error.__cause__, "name", None) or ""
            library = missing.partition(".")[0]
            if not isinstance(error.__cause__, ModuleNotFoundError) or importlib.util.find_spec(library):
                raise
            pytest.skip(f"needs {library}, which is not installed", allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module:
    return FileWithLibraries.from_parent(parent, path=module_path)


def pytest_collection_finish() -> None:
    gc.freeze()  # what has been imported stays: no collection looks through it
    gc.enable()


_SLOW = pytest.StashKey[int]()
_IN_WORKER = "left_out_as_slow"  # of pytest-xdist, whose workers alone know it; each of them chooses alike


def pytest_deselected(items: Sequence[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("slow") or item.get_closest_marker("long"):
            item.config.stash[_SLOW] = item.config.stash.get(_SLOW, 0) + 1


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput[_IN_WORKER] = session.config.stash.get(_SLOW, 0)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    node.config.stash[_SLOW] = getattr(node, "workeroutput", {}).get(_IN_WORKER, 0)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> Iterator[None]:
    """Say in one line, after all others, what was left out, and why."""
    yield
    skipped = terminalreporter.stats.get("skipped", ())
    reasons = [report.longrepr[2] for report in skipped if isinstance(report.longrepr, tuple)]
    if told := left_out.line(reasons, config.stash.get(_SLOW, 0)):
        terminalreporter.write_line(told)
