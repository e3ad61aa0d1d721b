"""A disk that takes no more than some bytes a file, as a full one takes part of what is written."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator


@contextlib.contextmanager
def room(most: int) -> Iterator[None]:
    """Files of this process end at ``most`` bytes: what is longer is cut, then refused (EFBIG)."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
