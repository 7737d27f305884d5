"""Where and with what a figure was measured."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any

_TOP = Path(__file__).resolve().parents[1]


def commit() -> str:
    """What ``git describe`` calls the checkout (``-dirty`` with local changes), or ``unknown``."""
    command = ["git", "-C", str(_TOP), "describe", "--always", "--dirty"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.strip()


def machine() -> dict[str, Any]:
    """Processor, cores, memory (GiB), system, and the versions that matter here."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory GiB": round(memory, 1),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": version("torch"),
    }


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
