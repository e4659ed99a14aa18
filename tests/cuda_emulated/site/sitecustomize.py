"""Python imports this by itself: it installs the stand-in as soon as torch has been imported."""

import importlib.util
import os
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType


class _AfterTorch:
    """A finder that finds torch once, and has ``emulation`` installed when it has been loaded."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec("torch")
        load = spec.loader.exec_module

        def load_and_install(module: ModuleType) -> None:
            load(module)
            import emulation

            emulation.install()

        spec.loader.exec_module = load_and_install
        return spec


if os.environ.get("EMULATED_GPUS") == "1":
    sys.meta_path.insert(0, _AfterTorch())
    if os.environ.get("EMULATED_TRITON") != "1":
        # The package looks for Triton so; a compiled kernel would do nothing. Megatron-LM imports it.
        _find = importlib.util.find_spec
        importlib.util.find_spec = lambda name, package=None: (
            None if name == "triton" else _find(name, package)
        )
