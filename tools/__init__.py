"""Tools for developers. From the root of a clone: ``python -m tools.drift``."""
