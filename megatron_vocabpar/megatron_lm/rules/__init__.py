"""Rules about launch lines: ``check.py`` asks them; ``flags.py`` has single flags, others combinations."""
