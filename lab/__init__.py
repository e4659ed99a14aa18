"""What measures and proves: the paper's experiments, benchmarks, tables of the documentation; not installed.

From the root of a clone: ``python -m lab``. A folder for each large subject: ``paper`` (its results,
simulated and run again), ``kernels``, ``losses``; a module for each small one. Next: ``verbs/``, one a verb.
"""
