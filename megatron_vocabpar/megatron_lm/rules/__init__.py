"""Rules about launch lines: ``check.py`` asks them, ``layouts.py`` has those on placed layers.

All others are in ``flags.py``.
"""
