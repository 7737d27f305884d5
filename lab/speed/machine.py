"""Where and with what a figure was measured, and how fast that machine copies."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from lab.speed.timing import Arm

_TOP = Path(__file__).resolve().parents[2]


def commit(top: Path | None = None) -> str:
    """What ``git describe`` calls a checkout (None: this one; ``-dirty`` with changes), or ``unknown``.

    An installed package may lie inside somebody else's checkout, whose commit says nothing of it.
    """
    top = top or _TOP
    if not (top / ".git").exists():
        return "unknown"
    command = ["git", "-C", str(top), "describe", "--always", "--dirty"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.strip()


def machine(device: torch.device | str = "cpu") -> dict[str, Any]:
    """Processor, cores, memory (GiB), system, versions; the GPU's name and memory where it is one."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    facts: dict[str, Any] = {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory GiB": round(memory, 1),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    for package in ("transformers", "triton"):
        try:
            facts[package] = version(package)
        except PackageNotFoundError:
            continue
    where = torch.device(device)
    if where.type == "cuda":
        held = torch.cuda.get_device_properties(where)
        facts["gpu"] = held.name
        facts["gpu memory GiB"] = round(held.total_memory / 2**30, 1)
        facts["cuda"] = torch.version.cuda
    return facts


def copy_arm(name: str, moved: int, device: torch.device | str) -> Arm:
    """A plain copy that reads ``moved / 2`` bytes and writes as many.

    Measured among the arms that move ``moved`` bytes, it says what this machine's memory would let them
    have: same size, hence same caches, same threads, same minute.
    """
    count = max(1, moved // 2)
    source = torch.ones(
        count, dtype=torch.uint8, device=device
    )  # zeros might be one page, read over and over
    into = torch.zeros_like(source)
    return Arm(name, lambda: into.copy_(source))


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
