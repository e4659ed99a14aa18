"""``vocabpar doctor --gpu``: what a machine with GPUs can be checked for in minutes, check by check.

Read ``checks.py`` (the list), ``runner.py`` (how one is run so that it can't take the others with it), then
the checks: ``surroundings.py``, ``kernels.py``, ``communicators.py``, ``training.py``. Every check takes the
device as an argument, so the tests run the same code on the CPU.
"""
