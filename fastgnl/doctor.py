"""What is installed, which backends work here, and what would speed this machine up."""

import os
import platform
import shutil
import time
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

import torch

from fastgnl.objective import GNLObjective
from fastgnl.report import text_table

PACKAGES = {
    "torch": "everything",
    "triton": "GPU kernels",
    "ffcv": "fast loading of image files",
    "deepspeed": "ZeRO sharding of optimizer state",
    "transformers": "text encoders",
}
HEADERS_COMMAND = "apt-get install libopencv-dev libturbojpeg0-dev pkg-config && pip install 'fastgnl[ffcv]'"


def installed(package: str) -> str | None:
    """The version of a package, or None. It is not imported: some take seconds."""
    if find_spec(package) is None:
        return None
    try:
        return version(package)
    except PackageNotFoundError:
        return "present, version unknown"


def reference_step_ms(rows: int = 128, classes: int = 10) -> float:
    """Median time of one objective step with backward, to show that the reference backend works."""
    objective = GNLObjective(rows, classes)
    labels, index = torch.arange(rows) % classes, torch.arange(rows)
    times = []
    for _ in range(12):
        z, t = (torch.randn(rows, classes, requires_grad=True) for _ in range(2))
        start = time.perf_counter()
        objective(z, t, labels, index).loss.backward()
        times.append(time.perf_counter() - start)
    return 1000 * sorted(times)[len(times) // 2]


def advice() -> list[str]:
    """What would speed this machine up, most useful first."""
    found = []
    if not torch.cuda.is_available():
        found.append("no GPU is visible to torch: networks of ImageNet size want one")
    if torch.get_num_threads() < (os.cpu_count() or 1):
        found.append(f"torch uses {torch.get_num_threads()} of {os.cpu_count()} cores: unset OMP_NUM_THREADS")
    if installed("ffcv") is None:
        found.append(f"ffcv is missing, for image files: {HEADERS_COMMAND}")
    if shutil.which("c++") is None and shutil.which("g++") is None:
        found.append("no C++ compiler: ffcv cannot be built")
    return found


def run() -> None:
    """Print it all."""
    print(f"Python {platform.python_version()}, {platform.system()} {platform.machine()}, {os.cpu_count()} cores")
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    print(f"GPUs: {', '.join(gpus) if gpus else 'none'}\n")
    rows = [(name, installed(name) or "missing", use) for name, use in PACKAGES.items()]
    print(text_table(("package", "version", "for"), rows))
    print(
        "\nobjective backend: reference (plain PyTorch), works, "
        f"{reference_step_ms():.2f} ms a step of 128 rows and 10 classes"
    )
    print("loader: built-in, samples in memory (FFCV is not used yet)")
    suggestions = advice()
    print("\nWhat would speed this machine up:" if suggestions else "\nNothing to add.")
    for line in suggestions:
        print(f"- {line}")
