"""Where a figure was measured, and with which commit."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

_TOP = Path(__file__).resolve().parents[1]


def circumstances(device: torch.device | str = "cpu") -> dict[str, Any]:
    """Commit, processor, cores, threads, versions, and the GPU where it is one."""
    command = ["git", "-C", str(_TOP), "describe", "--always", "--dirty"]
    commit = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    where = torch.device(device)
    return {
        "commit": commit or "unknown",
        "processor": names[0] if names else platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "transformers", "numpy")},
        **({"gpu": torch.cuda.get_device_name(where)} if where.type == "cuda" else {}),
    }
