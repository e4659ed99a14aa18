"""These tests need the stand-in, which only ``make cuda-emulated`` builds and starts."""

import os

collect_ignore_glob = ["test_*.py"]
if os.environ.get("EMULATED_GPUS") == "1":
    collect_ignore_glob.clear()
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = (
        "8"  # with one, as other tests have it, streams wait for each other
    )
