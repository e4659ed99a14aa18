"""Our ``losses.compat`` beside the frameworks' own functions: ``python -m lab losses``."""
