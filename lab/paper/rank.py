"""One rank of an experiment: ``torchrun ... -m lab.paper.rank MODULE script arguments``.

It runs the module's ``main``, and ends when torchrun ends, even if torchrun is killed. torchrun puts each
rank into a new session, so otherwise a killed torchrun would leave its ranks behind, with the memory of their
GPUs.
"""

from __future__ import annotations

import importlib
import sys

from megatron_vocabpar.parent import follow_parent

if __name__ == "__main__":
    follow_parent()
    importlib.import_module(sys.argv[1]).main(sys.argv[2:])
