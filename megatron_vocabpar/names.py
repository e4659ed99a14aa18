"""Suggests the known name that an unknown one was meant for."""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import get_close_matches


def nearest(name: str, known: Iterable[str]) -> str:
    """``; did you mean 'llama-3.1-8b'?`` for ``llama3-8b``, or nothing; signs and case do not count."""
    plain = {re.sub(r"[^a-z0-9]", "", one.lower()): one for one in known}
    matches = get_close_matches(re.sub(r"[^a-z0-9]", "", name.lower()), plain, 1)
    return f"; did you mean {plain[matches[0]]!r}?" if matches else ""
