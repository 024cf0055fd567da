"""Work done ahead of its use."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def prefetched(
    executor: Executor, function: Callable[[Item], Result], items: Iterable[Item], depth: int
) -> Iterator[Result]:
    """``map(function, items)`` in the executor, in order, with at most ``depth`` results not yet taken."""
    waiting: deque[Future[Result]] = deque()
    try:
        for item in items:
            waiting.append(executor.submit(function, item))
            if len(waiting) >= depth:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        for future in waiting:
            future.cancel()
