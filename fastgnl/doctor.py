"""What is installed, which backends work here, and what would speed this machine up."""

import os
import platform
import shutil
import time
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

import torch

from fastgnl.image_file import ffcv_problem
from fastgnl.kernels import backends, cpu
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


def step_ms(backend: str, device: str, rows: int = 128, classes: int = 10) -> float:
    """Median time of one objective step with backward, to show that a backend works."""
    objective = GNLObjective(rows, classes, backend=backend).to(device)
    labels, index = torch.arange(rows, device=device) % classes, torch.arange(rows, device=device)
    times = []
    for _ in range(12):
        z, t = (torch.randn(rows, classes, device=device, requires_grad=True) for _ in range(2))
        start = time.perf_counter()
        objective(z, t, labels, index).loss.backward()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return 1000 * sorted(times)[len(times) // 2]


def backend_lines() -> list[str]:
    """Which backend ``auto`` takes here, why, and how long each that works takes."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    chosen, obstacle = backends.choose(device)
    why = {
        "triton": "tensors on a GPU take the Triton kernels",
        "cpu": f"tensors on the CPU take the native kernel, built for {cpu.isa()}",
        "reference": f"{obstacle}, so plain PyTorch runs",
    }[chosen]
    lines = [f"objective backend: {chosen} ({why})"]
    for name, where in (("triton", "cuda"), ("cpu", "cpu"), ("reference", device)):
        problem = "no GPU is visible to torch" if where not in ("cpu", device) else backends.problem(name, where)
        works = f"works, {step_ms(name, where):.2f} ms a step of 128 rows and 10 classes" if problem is None else None
        lines.append(f"  {name}: {works or f'not here, {problem}'}")
    return lines


def loader_line() -> str:
    """Which reader decodes the images of .beton files here."""
    problem = ffcv_problem()
    if problem is None:
        return "image loader: ffcv (decodes in compiled threads; the first epoch of a run compiles for some seconds)"
    return f"image loader: built-in ({problem})"


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
        found.append("no C++ compiler: neither the native kernel nor ffcv can be built")
    return found


def run() -> None:
    """Print it all."""
    print(f"Python {platform.python_version()}, {platform.system()} {platform.machine()}, {os.cpu_count()} cores")
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    print(f"GPUs: {', '.join(gpus) if gpus else 'none'}\n")
    rows = [(name, installed(name) or "missing", use) for name, use in PACKAGES.items()]
    print(text_table(("package", "version", "for"), rows))
    print()
    for line in backend_lines():
        print(line)
    print(loader_line())
    suggestions = advice()
    print("\nWhat would speed this machine up:" if suggestions else "\nNothing to add.")
    for line in suggestions:
        print(f"- {line}")
