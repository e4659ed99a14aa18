"""One thread per process: the machines that run the tests are small, and fork wants no threads.

Hypothesis draws the same few examples in every run; ``--hypothesis-profile long`` draws many and others.
"""

import os

from hypothesis import settings

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")

settings.register_profile("default", max_examples=40, deadline=None, derandomize=True)
settings.register_profile("long", max_examples=400, deadline=None)
settings.load_profile("default")
