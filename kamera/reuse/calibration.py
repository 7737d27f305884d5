"""Calibrations: a sweep's thresholds for approximate segments, bound to one backbone and kept in a file."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from kamera.engines import Engine
from kamera.errors import CertificateMismatch
from kamera.ops import PatchBudget
from kamera.window import MeasuredFile, grounds_of, library_versions

FILE = MeasuredFile("calibration", 1, "calibrate again")


@dataclass(frozen=True)
class Point:
    """One threshold of the curve of acceptance against drift.

    ``accepted`` is the share of trials whose probe reaches ``threshold``. Of those, ``mean`` and ``worst``
    are KL divergences to the re-prefill's next token in nats, ``agreement`` the share of equal tokens; all
    three are None if none is accepted.
    """

    threshold: float
    accepted: float
    mean: float | None
    worst: float | None
    agreement: float | None


@dataclass(frozen=True)
class Calibration:
    """Thresholds of one backbone, under one set of library versions.

    ``windows[i]`` is the left context in tokens that must be equal for the KV of the first ``i + 1`` layers
    to be reused with a drift of at most ``bound`` nats in every trial; None: no tested length was enough.
    ``threshold`` is the least cosine of the probe among trials that the guard lets pass; None: there is none,
    nothing approximate is served. ``curve`` is that of the probe alone over all trials. ``trials`` are the
    compared pairs, ``created`` is UTC, ISO 8601.
    """

    fingerprint: str
    model: str
    dtype: str
    vocabulary: str
    position_limit: int | None
    versions: dict[str, str]
    bound: float
    windows: tuple[int | None, ...]
    threshold: float | None
    curve: tuple[Point, ...]
    trials: int
    created: str

    def difference(self, backbone: Engine) -> str | None:
        """The first difference from the measured backbone and libraries, in one line; None if none."""
        grounds = grounds_of(backbone, PatchBudget(1))
        for name in ("fingerprint", "dtype", "vocabulary", "position_limit"):
            then, now = getattr(self, name), getattr(grounds, name)
            if then != now:
                return f"its {name} is {_short(then)}, this backbone's is {_short(now)}"
        running = library_versions()
        for name in running | self.versions:
            then, now = self.versions.get(name), running.get(name)
            if then != now:
                return f"it was measured with {name} {then}, this is {name} {now}"
        return None

    def check(self, backbone: Engine) -> None:
        """Raise CertificateMismatch for another backbone than the measured one."""
        why = self.difference(backbone)
        if why is not None:
            raise CertificateMismatch(
                f"the calibration of {self.model} does not serve here: {why}; calibrate this backbone, or "
                "leave it out"
            )

    def depth(self, matched: int) -> int:
        """Number of first layers that may be reused behind ``matched`` equal tokens of left context."""
        deepest = 0
        for layers, least in enumerate(self.windows, start=1):
            if least is not None and matched >= least:
                deepest = layers
        return deepest

    def guard(self, matched: int) -> str | None:
        """The reason not to reuse the KV of all layers behind ``matched`` equal tokens; None if it may be."""
        if self.threshold is None:
            return "the calibration found no threshold that bounds the drift"
        depth, layers = self.depth(matched), len(self.windows)
        if depth == layers:
            return None
        least = self.windows[-1]
        needed = "no tested left context is enough" if least is None else f"{least} are needed"
        return f"{matched} equal tokens of left context reach {depth} of {layers} layers: {needed}"

    def refuses(self, cosine: float) -> str | None:
        """The reason to refuse a segment whose probe found ``cosine``; None if it is accepted."""
        if self.threshold is not None and cosine >= self.threshold:
            return None
        least = "no threshold" if self.threshold is None else f"{self.threshold:.4f}"
        return f"the probe found a cosine of {cosine:.4f}, the threshold is {least}"

    # -- in a file -----------------------------------------------------------------------------

    @property
    def file_name(self) -> str:
        """File name in a directory: a new calibration of one backbone replaces the last."""
        return f"reuse-{self.fingerprint[:16]}.json"

    def write(self, folder: str | os.PathLike[str]) -> Path:
        """Write it into a directory (created if missing), atomically; returns the file.

        Raises StoreError if the operating system refuses.
        """
        return FILE.write(Path(folder) / self.file_name, asdict(self))

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Calibration:
        """Read a calibration. Raises InvalidCertificate for a missing, damaged or edited file."""
        content = FILE.read(path)
        try:
            return _built(content)
        except (AttributeError, TypeError, ValueError) as error:
            raise FILE.invalid(repr(str(path)), str(error)) from None


def calibration_of(given: Calibration | str | os.PathLike[str]) -> Calibration:
    """A calibration, read if its file is given."""
    return given if isinstance(given, Calibration) else Calibration.read(given)


def _built(content: Any) -> Calibration:
    names = {f.name for f in fields(Calibration)}
    if not isinstance(content, dict) or set(content) != names:
        raise ValueError(f"its fields are not {', '.join(sorted(names))}")
    if not content["windows"]:
        raise ValueError("it has no layer")
    found = dict(content)
    found["windows"] = tuple(None if w is None else int(w) for w in found["windows"])
    found["curve"] = tuple(Point(**point) for point in found["curve"])
    return Calibration(**found)


def _short(value: object) -> str:
    return repr(value[:12] if isinstance(value, str) else value)
