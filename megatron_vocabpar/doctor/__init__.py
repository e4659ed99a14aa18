"""``vocabpar doctor --gpu``: checks of a machine with GPUs, which take minutes.

Read ``checks.py`` (the list), ``check_runs.py`` (how a check is run in processes of its own), then the
checks: ``environment.py``, ``kernels.py``, ``communicators.py``, ``training.py``. Every check takes the
device as an argument, so the tests run the same code on the CPU.
"""
