"""The result as one JSON document, and how tables and plots look things up in it."""

from __future__ import annotations

import json
import math
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from kamera.trust import Estimate
from lab.paper.draw import RANK
from lab.paper.run import Findings
from lab.paper.tally import MULTI

Document = dict[str, Any]
INTERVALS = ("accuracy", "kl", "eta", "flip_recover", "agreement")
"""What a row gives as [mean, low, high]; null where there is nothing to measure it on."""

_LIBRARIES = ("torch", "transformers", "numpy", "matplotlib")
_DIGITS = 5
_TOP = Path(__file__).resolve().parents[2]


def document(
    findings: Sequence[Findings],
    *,
    command: str,
    items: int,
    seed: int,
    jobs: int,
    seconds: float,
    dtype: str = "float32",
    device: str = "cpu",
    data: str | None = None,
) -> Document:
    """Everything measured, and what it was measured with. Only finite numbers and null.

    ``data`` is the folder of pictures where it was not the testbed's world.
    """
    from kamera import __version__

    return {
        "command": command,
        "commit": commit(),
        "kamera": __version__,
        "versions": {"python": platform.python_version()} | {n: _version(n) for n in _LIBRARIES},
        "machine": {
            "processor": _processor(),
            "cores": os.cpu_count(),
            "jobs": jobs,
            "threads of a job": 1,
            "device": device,
        },
        "items": items,
        "seed": seed,
        "rank": RANK,
        "dtype": dtype,
        **({} if data is None else {"data": data}),
        "seconds": round(seconds, 1),
        "families": {f.family: _family(f) for f in findings},
    }


def write(result: Document, path: Path) -> None:
    """One row a line, so that the file can be read and compared."""
    parts: dict[str, str] = {}
    families = {}
    for name, family in result["families"].items():
        lists = {part: f"<{name} {part}>" for part in ("rows", "numbers")}
        for part, marker in lists.items():
            lines = ",\n".join(f"    {json.dumps(row, ensure_ascii=False)}" for row in family[part])
            parts[json.dumps(marker)] = f"[\n{lines}\n   ]"
        families[name] = {**family, **lists}
    text = json.dumps({**result, "families": families}, indent=1, ensure_ascii=False, allow_nan=False)
    for marker, lines in parts.items():
        text = text.replace(marker, lines)
    path.write_text(text + "\n", encoding="utf-8")


@dataclass(frozen=True)
class View:
    """One family's part of a document."""

    name: str
    family: Mapping[str, Any]

    def rows(self, section: str, kind: str = MULTI) -> list[Mapping[str, Any]]:
        """All rows of a section for one kind of question."""
        return [r for r in self.family["rows"] if r["section"] == section and r["kind"] == kind]

    def row(self, section: str, arm: str, kind: str = MULTI, /, **setting: str | int) -> Mapping[str, Any]:
        """The one row of an arm in one setting. Raises KeyError where it was not measured."""
        for row in self.rows(section, kind):
            if row["arm"] == arm and row["setting"] == setting:
                return row
        raise KeyError(f"{self.name}: no {section} {arm} {kind} {setting}")

    def mean(self, section: str, arm: str, what: str, kind: str = MULTI, /, **setting: str | int) -> float:
        """The mean of one of `INTERVALS`, or a price; nan where there was nothing to measure it on."""
        value = self.row(section, arm, kind, **setting)[what]
        value = value[0] if isinstance(value, list) else value
        return math.nan if value is None else float(value)

    def numbers(self, section: str, name: str) -> list[tuple[Mapping[str, Any], list[float]]]:
        """Setting and [mean, low, high] of a measured number."""
        return [
            (n["setting"], n["value"])
            for n in self.family["numbers"]
            if n["section"] == section and n["name"] == name and n["n"]
        ]


def views(result: Document) -> list[View]:
    """The families of a document, in the order they were asked for."""
    return [View(name, family) for name, family in result["families"].items()]


def commit(top: Path = _TOP) -> str:
    """The commit a checkout stands at, and whether the package was changed since; else ``unknown``."""
    if not (top / ".git").exists():
        return "unknown"

    def git(*arguments: str) -> str:
        done = subprocess.run(
            ["git", "-C", str(top), *arguments], capture_output=True, text=True, check=True, timeout=20
        )
        return done.stdout.strip()

    try:
        changed = git("status", "--porcelain", "--", "kamera")
        return git("rev-parse", "--short", "HEAD") + (" with local changes" if changed else "")
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def _family(findings: Findings) -> Document:
    facts = {
        "model": findings.model,
        "fingerprint": findings.fingerprint,
        "layers": findings.layers,
        "channels": list(findings.channels),
        "chunk tokens": findings.chunk_tokens,
        "chunk bytes": findings.chunk_bytes,
        "episodes": findings.episodes,
        "seconds": round(findings.seconds, 1),
    }
    return {
        **facts,
        "rows": [plain(vars(row)) for row in findings.rows],
        "numbers": [plain(vars(number)) for number in findings.numbers],
    }


def plain(fields: Mapping[str, Any]) -> Document:
    """The fields of a row or number as JSON has them: intervals as [mean, low, high], or null."""
    found: Document = {}
    for name, value in fields.items():
        if isinstance(value, Estimate):
            bounds = [_rounded(v) for v in (value.mean, value.low, value.high)]
            found[name] = None if None in bounds else bounds
        else:
            found[name] = _rounded(value) if isinstance(value, float) else value
    return found


def _rounded(value: float) -> float | None:
    return float(f"{value:.{_DIGITS}g}") if math.isfinite(value) else None


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _version(library: str) -> str | None:
    try:
        return version(library)
    except PackageNotFoundError:
        return None
