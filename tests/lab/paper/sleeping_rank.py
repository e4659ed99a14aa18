"""A rank that says when it has started, and sleeps."""

from __future__ import annotations

import time


def main(_: list[str]) -> None:
    print(flush=True)
    time.sleep(1000)
