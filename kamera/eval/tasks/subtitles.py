"""SubRip subtitles, and those on the screen at given times."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_TIME = r"(\d+):(\d{1,2}):(\d{1,2})[,.](\d{1,3})"
_SPAN = re.compile(rf"\s*{_TIME}\s*-->\s*{_TIME}")
_TAG = re.compile(r"</?[a-zA-Z][^>]*>|\{\\[^}]*\}")


@dataclass(frozen=True)
class Cue:
    """One subtitle: on the screen from ``start`` up to, not including, ``end`` (seconds)."""

    start: float
    end: float
    text: str


def read_srt(path: Path) -> tuple[Cue, ...]:
    """The cues of a ``.srt`` file in file order, their lines joined by spaces, font tags removed.

    Cues without words are left out. Raises ValueError, naming file and line, for a time that cannot
    be read, for text that is not UTF-8 and for a file with words but no cue.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 at byte {error.start}: convert the subtitles to UTF-8") from None
    spans = [i for i, line in enumerate(lines) if "-->" in line]
    if not spans and any(line.strip() for line in lines):
        raise ValueError(f"{path}: no line with '-->': give a SubRip file")
    cues = []
    for i, stop in zip(spans, [*spans, len(lines)][1:], strict=True):
        match = _SPAN.match(lines[i])
        if match is None:
            raise ValueError(f"{path}:{i + 1}: time {lines[i].strip()!r} is not 'h:m:s,ms --> h:m:s,ms'")
        body = lines[i + 1 : stop]
        if stop < len(lines) and body and body[-1].strip().isdigit():
            body = body[:-1]  # the number of the next cue
        words = " ".join(_TAG.sub("", line).strip() for line in body).split()
        if words:
            cues.append(Cue(_seconds(match, 1), _seconds(match, 5), " ".join(words)))
    return tuple(cues)


def on_screen(cues: Sequence[Cue], seconds: Sequence[float]) -> list[str]:
    """Texts of the cues on the screen at any of ``seconds``, in file order, each cue once."""
    return [cue.text for cue in cues if any(cue.start <= time < cue.end for time in seconds)]


def _seconds(match: re.Match[str], group: int) -> float:
    hours, minutes, secs, fraction = (match[group + i] for i in range(4))
    return int(hours) * 3600 + int(minutes) * 60 + int(secs) + int(fraction.ljust(3, "0")) / 1000
