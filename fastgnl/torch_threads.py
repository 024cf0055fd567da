"""FFCV sets torch's number of threads to its own, when it is imported and whenever it works."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def torch_threads_kept() -> Iterator[None]:
    """Put torch's number of threads back at the end."""
    before = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(before)
