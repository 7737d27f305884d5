"""Windows of anybody's pictures: the same tables on any model, without the testbed's world.

A folder of pictures gives the pools, ``questions.txt`` in it (one a line) the questions; a picture's caption
may lie beside it as ``NAME.txt``, and is then its text twin. Nobody knows the answers, so what is right is
what the re-prefill says: *accuracy* is agreement with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from kamera.errors import TaskDataError
from lab.paper.draw import PER_WINDOW, POOL, Stage
from lab.paper.trial import Asked

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")
QUESTIONS = (
    "What does the last picture show?",
    "What do the first picture and the last one have in common?",
    "What has changed from the first picture to the last one?",
    "Which object of the last picture is in an earlier picture, too?",
    "Which picture is most like the last one: the first, the second or the third?",
    "Is the last picture brighter or darker than the one before it?",
    "Which colour is most common in all pictures?",
    "How many of the pictures show a person?",
    "Which text can be read in the pictures?",
    "What would the next picture show?",
    "Were all pictures taken in the same place?",
    "Which of the pictures does not belong to the others?",
)
"""Asked where the folder has no ``questions.txt``."""


@dataclass(frozen=True)
class Pictures:
    """Files of pictures in the order of their names, and the questions asked of every window."""

    files: tuple[Path, ...]
    questions: tuple[str, ...]

    @classmethod
    def read(cls, folder: Path) -> Pictures:
        """Everything below a folder. Raises TaskDataError, naming what is missing."""
        if not folder.is_dir():
            raise TaskDataError(f"no folder {str(folder)!r}: give one with at least {POOL} pictures")
        files = sorted(path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES)
        if len(files) < POOL:
            raise TaskDataError(
                f"{str(folder)!r} holds {len(files)} pictures ({', '.join(SUFFIXES)}): a window is chosen "
                f"from {POOL}"
            )
        asked = folder / "questions.txt"
        lines = asked.read_text(encoding="utf-8").splitlines() if asked.is_file() else list(QUESTIONS)
        questions = tuple(line.strip() for line in lines if line.strip())
        if not questions:
            raise TaskDataError(f"{str(asked)!r} asks nothing: one question a line")
        return cls(tuple(files), questions)


@dataclass(eq=False)
class PictureStage(Stage):
    """One pool: `POOL` pictures of ``source``, drawn by the seed and the index."""

    source: Pictures | None = None

    @cached_property
    def pool(self) -> tuple[Path, ...]:
        """The pictures of this pool."""
        assert self.source is not None, "a stage of pictures has them"
        files = self.source.files
        return tuple(files[i] for i in self.rng(0).permutation(len(files))[:POOL])

    def content(self, frame: int) -> list[dict[str, Any]]:
        """The picture, and a line that ends it."""
        return [{"type": "image", "image": str(self.pool[frame])}, {"type": "text", "text": "\n"}]

    def twin(self, frame: int) -> list[dict[str, Any]] | None:
        """The caption beside the picture; None without one."""
        path = self.pool[frame].with_suffix(".txt")
        if not path.is_file():
            return None
        return [{"type": "text", "text": path.read_text(encoding="utf-8").strip() + "\n"}]

    def questions(self, order: Sequence[int], most: int = PER_WINDOW) -> list[Asked]:
        """The same questions of every window."""
        assert self.source is not None, "a stage of pictures has them"
        return [Asked(text) for text in self.source.questions[:most]]
