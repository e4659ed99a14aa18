"""The paper's experiments and tables: run again, simulated, and compared with the published results.

``published.py`` holds the paper's results. ``simulated.py`` and ``figures.py`` compare the simulator with
them (``python -m lab paper``). To see how the trainings are run again (``python -m lab artifact``), start
with ``experiments.py``.
"""
