"""The compiled CPU kernel: built once per machine, if a C compiler is present.

Installation builds nothing and requires nothing: without a working compiler, or with ``KAMERA_NATIVE=0`` in
the environment, there is no library and the torch implementation runs.
"""

from __future__ import annotations

import atexit
import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

_SOURCE = Path(__file__).with_name("serve.c")
_TUNED = {
    "x86_64": ["-march=native", "-mprefer-vector-width=512"],
    "aarch64": ["-mcpu=native"],
    "arm64": ["-mcpu=native"],
}
_SECONDS = 60

_log = logging.getLogger(__name__)


class LaunchStruct(ctypes.Structure):
    """``struct launch`` of serve.c."""

    _fields_ = [
        (name, ctypes.c_int64)
        for names in (
            ("table", "lines", "heads", "tokens", "dim", "start", "pairs", "interleaved", "cos", "sin"),
            ("source_kind", "target_kind", "s_head", "s_token", "y_head", "y_token", "g_head", "g_token"),
            ("token_group", "feature_group", "largest"),
        )
        for name in names
    ]


@cache
def native_library() -> ctypes.CDLL | None:
    """The kernel, or None if it cannot be built. The first call on a machine builds it (one second)."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None or os.name != "posix" or os.environ.get("KAMERA_NATIVE") == "0":
        return None
    try:
        built = ctypes.CDLL(str(_build(compiler)))
    except (OSError, subprocess.SubprocessError) as error:
        detail = getattr(error, "stderr", None) or error
        _log.info("no compiled CPU kernel, torch serves instead: %s", detail)
        return None
    built.kamera_serve.argtypes = [ctypes.POINTER(LaunchStruct), ctypes.c_int64]
    built.kamera_serve.restype = ctypes.c_int
    built.kamera_half.restype = ctypes.c_int
    return built


def _build(compiler: str) -> Path:
    """The shared library for this source, compiler and processor, from the user's cache or built now."""
    tuned = _TUNED.get(platform.machine(), [])
    flags = ["-O3", *tuned, "-ffp-contract=off", "-fno-strict-aliasing", "-fno-math-errno"]
    version = _run([compiler, "--version"])
    named = "\0".join((_SOURCE.read_text(), *flags, compiler, version, _processor()))
    path = _cache() / f"{hashlib.sha256(named.encode()).hexdigest()[:32]}.so"
    if not path.exists():
        part = path.with_suffix(f".{os.getpid()}.part")  # another process may build the same
        try:
            _run([compiler, *flags, "-shared", "-fPIC", "-pthread", "-o", str(part), str(_SOURCE)])
            os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)
    return path


def _run(command: list[str]) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=_SECONDS).stdout


def _cache() -> Path:
    """A directory that only this user can write to; a temporary one if the home has none."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    path = Path(home) / "kamera" / "kernels"
    try:
        if path.is_absolute():
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            held = path.stat()
            if held.st_uid == os.getuid() and not held.st_mode & 0o022 and os.access(path, os.W_OK):
                return path
    except OSError:
        pass
    own = tempfile.mkdtemp(prefix="kamera-kernels-")
    atexit.register(shutil.rmtree, own, ignore_errors=True)
    return Path(own)


def _processor() -> str:
    """The processor the library is compiled for; another machine with this home may lack its instructions."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    return "\n".join(sorted({x for x in lines if x.startswith(("model name", "flags", "Features"))}))
