"""Run an unchanged Megatron-LM script with our flags.

    torchrun --nproc-per-node 8 -m megatron_vocabpar.launch pretrain_gpt.py --enable-vocab-parallel ...

The script runs as ``__main__``, with its folder first on the path, as if Python had been given it. Next:
``adaptor.py``.
"""

from __future__ import annotations

import importlib
import runpy
import sys
from pathlib import Path


def main(argv: list[str]) -> None:
    """Run the script ``argv[0]`` with the arguments ``argv[1:]``; a SystemExit with 2 if it is not a file."""
    if not argv or not Path(argv[0]).is_file():
        print(
            f"megatron_vocabpar.launch: error: {argv[0] if argv else 'no script'}: not a file; give the path "
            "of Megatron-LM's pretrain_gpt.py, then its arguments",
            file=sys.stderr,
        )
        sys.exit(2)
    script = Path(argv[0]).resolve()
    sys.argv = [str(script), *argv[1:]]
    sys.path.insert(0, str(script.parent))
    importlib.import_module("megatron_vocabpar.adaptor")
    runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
