"""The native CPU kernel: builds ``step.cpp`` on first use and loads it.

Importing this module builds nothing. ``problem()`` does, once a process, and says what is wrong if it cannot.
"""

import ctypes
import functools
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

SOURCE = Path(__file__).with_name("step.cpp")
FLAGS = ("-O3", "-std=c++17", "-shared", "-fPIC", "-fopenmp", "-ffp-contract=off", "-fno-math-errno")
ISA_FLAGS = {
    "AVX-512": ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma", "-mf16c"),
    "AVX2": ("-mavx2", "-mfma", "-mf16c"),
    "plain": (),
}


class BuildError(Exception):
    """The library could not be built; the message is a short phrase."""


def isa() -> str:
    """The vector instructions to build for: "AVX-512", "AVX2" or "plain"."""
    capability = torch.backends.cpu.get_cpu_capability()
    return {"AVX512": "AVX-512", "AVX2": "AVX2"}.get(capability, "plain")


def _compiler() -> list[str]:
    """$CXX, or the first C++ compiler on the path."""
    for command in (os.environ.get("CXX", ""), "c++", "g++", "clang++"):
        words = shlex.split(command)
        if words and shutil.which(words[0]):
            return words
    raise BuildError("no C++ compiler was found")


def _run(command: list[str]) -> str:
    """The command's output; BuildError with its first error line if it fails."""
    name = Path(command[0]).name
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    except OSError as error:
        raise BuildError(f"{name} failed: {error.strerror}") from error
    if done.returncode:
        lines = done.stderr.splitlines() or [f"exit code {done.returncode}"]
        raise BuildError(f"{name} failed: {next((line for line in lines if 'error' in line), lines[0])}")
    return done.stdout


def _command(isa: str) -> list[str]:
    return [*_compiler(), *FLAGS, *ISA_FLAGS[isa], str(SOURCE)]


def compile_library(isa: str, out: Path) -> None:
    """Build for ``isa`` ("AVX-512", "AVX2" or "plain") as ``out``, which appears whole or not at all."""
    descriptor, unfinished = tempfile.mkstemp(suffix=".so", dir=out.parent)
    os.close(descriptor)
    try:
        _run([*_command(isa), "-o", unfinished])
        os.replace(unfinished, out)
    finally:
        Path(unfinished).unlink(missing_ok=True)


def _cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fastgnl"


def _library_name(isa: str) -> str:
    """A name that changes with the source, the flags and the compiler."""
    identity = _run([*_compiler(), "--version"])
    text = "\0".join([SOURCE.read_text(encoding="utf-8"), *_command(isa), identity])
    return f"step-{isa}-{hashlib.sha256(text.encode()).hexdigest()[:16]}.so"


def _built() -> Path:
    """The library for this machine, built if it is not in the cache."""
    name = _library_name(isa())
    cached = _cache_folder() / name
    if cached.exists():
        return cached
    if os.environ.get("RANK", "0") == "0":
        print("building the native kernel, once on this machine: some ten seconds", file=sys.stderr)
    try:
        cached.parent.mkdir(parents=True, exist_ok=True)
        compile_library(isa(), cached)
        return cached
    except OSError:  # the cache cannot be written
        private = Path(tempfile.mkdtemp(prefix="fastgnl-")) / name
        compile_library(isa(), private)
        return private


def load(path: Path) -> ctypes.CDLL:
    """The library with its functions' types declared."""
    library = ctypes.CDLL(str(path))
    library.fastgnl_check.argtypes = [ctypes.c_char_p, ctypes.POINTER(ctypes.c_int64)]
    library.fastgnl_check.restype = ctypes.c_int
    for phase in (library.fastgnl_column_sums, library.fastgnl_rows, library.fastgnl_finish):
        phase.argtypes = [ctypes.c_char_p]
        phase.restype = None
    return library


@functools.cache
def _library() -> ctypes.CDLL | str:
    """The loaded library, or why there is none."""
    try:
        return load(_built())
    except BuildError as error:
        return str(error)
    except OSError as error:
        return f"the built library did not load: {error}"


def problem() -> str | None:
    """None if the kernel is built and loaded, else why not in a short phrase."""
    library = _library()
    return library if isinstance(library, str) else None


@functools.cache
def library() -> ctypes.CDLL:
    """The loaded library."""
    found = _library()
    if isinstance(found, str):
        raise RuntimeError(found)
    return found
