"""Other people's code beside ours. From the root of a clone: ``python -m benchmarks.losses``."""
