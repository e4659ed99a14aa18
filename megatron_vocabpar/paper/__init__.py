"""The paper's experiments and tables: run again, simulated, and beside what was published.

``published.py`` holds what the paper says. ``simulated.py`` and ``figures.py`` put the simulator beside it
(``vocabpar paper``). ``experiments.py`` is where running the trainings again begins (``vocabpar artifact``).
"""
