"""Many runs, two at a time, each noted in a file when it ends: what is noted there is not run again."""

import json
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context, parent_process
from pathlib import Path
from threading import Thread
from typing import Any

from common import COMMIT
from tqdm import tqdm

Row = dict[str, Any]


def _end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _worker() -> None:
    """One thread; and no worker goes on with its run when the benchmark was killed."""
    import torch

    torch.set_num_threads(1)
    Thread(target=_end_with_parent, daemon=True).start()


def noted(found: Path) -> list[Row]:
    """The lines of a file; the last may have been cut off by a kill."""
    rows = []
    for line in found.read_text().splitlines() if found.exists() else []:
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue
    return rows


def carried_out(
    plans: Sequence[Any], work: Callable[[Any], Row], found: Path, jobs: int, run: bool = True
) -> list[Row]:
    """The row of every plan (a named tuple), in order: ``plan._asdict() | work(plan)`` with the commit, or what was
    noted of it before. Where nothing is to be ``run``, only what was noted.

    ``work`` is a function of a module; it runs in a process of its own, on one thread."""
    kind = type(plans[0])
    known = {kind(*(row.get(name) for name in kind._fields)): row for row in noted(found)}
    left = [plan for plan in plans if plan not in known] if run else []
    found.parent.mkdir(parents=True, exist_ok=True)
    if left and found.exists() and not found.read_bytes().endswith(b"\n"):
        found.write_text("".join(f"{json.dumps(row)}\n" for row in known.values()))
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with ProcessPoolExecutor(jobs, get_context("spawn"), _worker) as pool:
        waiting = {pool.submit(work, plan): plan for plan in left}
        bar = tqdm(as_completed(waiting), total=len(waiting), unit="run", disable=not waiting)
        for done in bar:
            plan = waiting[done]
            row = known[plan] = plan._asdict() | done.result() | {"commit": COMMIT}
            with found.open("a") as file:
                file.write(json.dumps(row) + "\n")
            bar.set_postfix_str(" ".join(map(str, plan)) + (f" {row['last']:.1f}" if "last" in row else " failed"))
    return [known[plan] for plan in plans if plan in known]
