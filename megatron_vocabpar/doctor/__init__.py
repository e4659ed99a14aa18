"""``vocabpar doctor --gpu``: what a machine with GPUs can be checked for in minutes, check by check.

Read ``checks.py`` (the list), ``check_runs.py`` (how a check is run in processes of its own), then the
checks: ``environment.py``, ``kernels.py``, ``communicators.py``, ``training.py``. Every check takes the
device as an argument, so the tests run the same code on the CPU.
"""
