"""Functions with the names and positional arguments that ROLL calls: swap one import.

``roll`` names the files that it replaces, and the commit whose signatures it follows. Those of other
frameworks are a few lines each, in ``examples/losses_compat.py``.
"""
