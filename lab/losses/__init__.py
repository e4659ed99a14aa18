"""Our losses beside the frameworks' own functions: ``python -m lab losses``."""
