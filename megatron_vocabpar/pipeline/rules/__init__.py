"""What is refused, and what is warned of: rows of one kind, which doors and constructors ask.

``rule.py`` has the row and how rows are asked, ``facts.py`` what they look at. Tables of what the pipeline
itself cannot do are here, by subject; those of launch lines are in ``megatron_lm/rules/``. Standard library
only.
"""
