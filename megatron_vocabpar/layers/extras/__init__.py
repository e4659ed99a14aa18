"""Further numbers of every token; ``extra.py`` first."""
