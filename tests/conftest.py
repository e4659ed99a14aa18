"""One thread per process: the machines that run the tests are small, and fork wants no threads.

A shell that starts the tests in the background has Ctrl-C ignored, and whatever they start inherits
that: here Ctrl-C is what it is in the foreground.

Hypothesis draws the same few examples in every run; ``--hypothesis-profile long`` draws many and others.
"""

import os
import signal

from hypothesis import settings

signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")

settings.register_profile("default", max_examples=40, deadline=None, derandomize=True)
settings.register_profile("long", max_examples=400, deadline=None)
settings.load_profile("default")
