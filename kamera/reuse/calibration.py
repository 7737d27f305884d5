"""Calibrations: a sweep's thresholds for approximate segments, bound to one backbone and kept in a file."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from kamera.content import Chunk
from kamera.engines import Engine
from kamera.errors import CertificateMismatch, InvalidCertificate
from kamera.ops import PatchBudget
from kamera.reuse.limits import upper_limit
from kamera.trust import MeasuredFile
from kamera.window import grounds_of, library_versions

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
class HeldOut:
    """What a calibration does on cases that it was not fitted to.

    Of ``cases`` it accepts at least one segment in ``accepted``; of these ``violations`` have one that drifts
    beyond the bound, and ``flips`` one with another next token. Segments of one case are not independent, so
    cases are counted.
    """

    cases: int
    accepted: int
    violations: int
    flips: int

    @property
    def violation_limit(self) -> float:
        """Upper limit of the share of accepted cases beyond the bound, at 95 % (`upper_limit`)."""
        return upper_limit(self.violations, self.accepted)

    @property
    def flip_limit(self) -> float:
        """The same of those with another next token."""
        return upper_limit(self.flips, self.accepted)


@dataclass
class Calibration:
    """Thresholds of one backbone, under one set of library versions.

    ``windows[i]`` is the left context in tokens that must be equal for the KV of the first ``i + 1`` layers
    to be reused with a drift of at most ``bound`` nats in every trial; None: no tested length was enough.
    ``threshold`` is the least cosine of the probe among trials that the guard lets pass; None: there is none,
    nothing approximate is served, and ``refusal`` says why. ``curve`` is that of the probe alone. Thresholds
    are fitted to one half of the cases, on ``trials`` pairs; ``tested`` is the other half, and ``replaced``
    are those cases of it in which one piece of the left context was replaced by another of its kind.

    ``scope`` are the modalities that were measured ("text behind media"), ``sources`` the labels of the
    segments (of messages: their roles). ``created`` is UTC, ISO 8601. Only `withdraw` changes a calibration.
    ``path`` is the file it was read from or last written to.
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
    tested: HeldOut
    replaced: HeldOut
    refusal: str
    scope: tuple[str, ...]
    sources: tuple[str, ...]
    created: str
    withdrawn: str = ""
    path: Path | None = field(default=None, compare=False, repr=False)

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

    def withdraw(self, reason: str) -> None:
        """Let nothing approximate be served by it any more, here and by whoever reads its file from now on.

        Raises StoreError if the file cannot be written; here it is withdrawn all the same.
        """
        self.withdrawn = " ".join(reason.split()) or "no reason was given"
        if self.path is not None:
            FILE.write(self.path, self._content)

    def outside(self, chunk: Chunk, before: Iterable[str]) -> str | None:
        """The reason that a segment is of no kind that was measured; None if it is.

        ``before`` are the modalities of its left context. A copy may be trusted as far as others of its kind
        were: behind text nothing is known of what a picture binds.
        """
        kinds = [kind(modality(chunk), other) for other in sorted(set(before))]
        if unknown := [name for name in kinds if name not in self.scope]:
            return f"the calibration is of {', '.join(self.scope) or 'nothing'}, and this is {unknown[0]}"
        if chunk.label not in self.sources:
            known = ", ".join(repr(source) for source in self.sources)
            return f"the calibration is of segments from {known}, and this is from {chunk.label!r}"
        return None

    def depth(self, matched: int) -> int:
        """Number of first layers that may be reused behind ``matched`` equal tokens of left context."""
        deepest = 0
        for layers, least in enumerate(self.windows, start=1):
            if least is not None and matched >= least:
                deepest = layers
        return deepest

    def guard(self, matched: int) -> str | None:
        """The reason not to reuse the KV of all layers behind ``matched`` equal tokens; None if it may be."""
        if self.withdrawn:
            return f"the calibration was withdrawn: {self.withdrawn}"
        if self.threshold is None:
            return f"the calibration found no threshold that bounds the drift: {self.refusal}"
        depth, layers = self.depth(matched), len(self.windows)
        if depth == layers:
            return None
        least = self.windows[-1]
        needed = "no tested left context is enough" if least is None else f"{least} are needed"
        return f"{matched} equal tokens of left context reach {depth} of {layers} layers: {needed}"

    def refuses(self, cosine: float) -> str | None:
        """The reason to refuse a segment whose probe found ``cosine``; None if it is accepted."""
        if self.withdrawn:
            return f"the calibration was withdrawn: {self.withdrawn}"
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
        self.path = FILE.write(Path(folder) / self.file_name, self._content)
        return self.path

    @property
    def _content(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if name != "path"}

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Calibration:
        """Read a calibration. Raises InvalidCertificate for a missing, damaged, edited or withdrawn one."""
        content = FILE.read(path)
        try:
            found = _built(content, Path(path))
        except (AttributeError, TypeError, ValueError) as error:
            raise FILE.invalid(repr(str(path)), str(error)) from None
        if found.withdrawn:
            raise InvalidCertificate(
                f"the calibration {str(path)!r} was withdrawn: {found.withdrawn}; {FILE.remedy}, or leave it "
                "out"
            )
        return found


def calibration_of(given: Calibration | str | os.PathLike[str]) -> Calibration:
    """A calibration, read if its file is given."""
    return given if isinstance(given, Calibration) else Calibration.read(given)


def kind(segment: str, before: str) -> str:
    """The name of segments of one modality behind another."""
    return f"{segment} behind {before}"


def modality(chunk: Chunk) -> str:
    """``"media"`` for a chunk with pictures or a video, else ``"text"``."""
    return "media" if chunk.has_media else "text"


def _built(content: Any, path: Path) -> Calibration:
    names = {f.name for f in fields(Calibration)} - {"path"}
    if not isinstance(content, dict) or set(content) != names:
        raise ValueError(f"its fields are not {', '.join(sorted(names))}")
    if not content["windows"]:
        raise ValueError("it has no layer")
    found = dict(content)
    found["windows"] = tuple(None if w is None else int(w) for w in found["windows"])
    found["curve"] = tuple(Point(**point) for point in found["curve"])
    found["tested"], found["replaced"] = (HeldOut(**found[name]) for name in ("tested", "replaced"))
    found["scope"], found["sources"] = (tuple(map(str, found[name])) for name in ("scope", "sources"))
    return Calibration(**found, path=path)


def _short(value: object) -> str:
    return repr(value[:12] if isinstance(value, str) else value)
