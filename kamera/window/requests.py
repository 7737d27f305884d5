"""Requests to a window, as data: `KameraWindow.plan` plans them, and operations are made of them.

A request is given with contents in any form and with slots. It is planned with names alone: contents are
`Newcomer`\\ s then, slots are their indices, so a plan holds no content and can be written down.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from kamera.content import Chunk, Content
from kamera.trust import ArchiveRule, OnLeave
from kamera.window.state import Slot

MIN_SCORE = 0.9
"""Default cosine below which `KameraWindow.recall` accepts no look-alike."""


@dataclass(frozen=True)
class Newcomer:
    """A chunk that is to come: its id, its tokens, the number of its vision encodes, and `Facts.heads`.

    ``takes`` as `kamera.window.heads.Takes`.
    """

    chunk_id: str
    length: int
    encodes: int = 0
    heads: tuple[tuple[str, int], ...] = ()
    takes: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Append:
    """See `KameraWindow.append`."""

    content: Content | Chunk | Newcomer
    archive: ArchiveRule | None = None


@dataclass(frozen=True, eq=False)
class Lookalike:
    """A recall by likeness to a picture.

    See `KameraWindow.recall`. It looks into the store, and is planned as the `Recall` of what it finds.
    """

    like: Content | Chunk
    min_score: float = MIN_SCORE
    move: bool = False


@dataclass(frozen=True)
class Recall:
    """See `KameraWindow.recall`."""

    chunk: str | Slot | Chunk | Newcomer
    move: bool = False


@dataclass(frozen=True)
class Slide:
    """See `KameraWindow.slide`."""

    n: int = 1


@dataclass(frozen=True)
class Evict:
    """See `KameraWindow.evict`."""

    slot: Slot | int


@dataclass(frozen=True)
class Reorder:
    """See `KameraWindow.reorder`."""

    permutation: Sequence[int]


@dataclass(frozen=True)
class Arrange:
    """Make the window hold these slots of its own and these new chunks, in this order.

    A `Recall` names a stored chunk by its id. Slots that are not named leave. Chunks in front of the first
    change stay as they are. Behind it, ``on_leave`` "keep" keeps the KV of the chunks that stay, re-rotated
    to its new place: they are survivors, or ``near`` behind a new chunk that they never attended to. "repair"
    and "exact" are those of `ReusePolicy.on_leave`; a window with a minimum of "exact" always prefills them.
    Chunks are encoded once; a text that begins as one of the window, or as a stored one ``among`` others, is
    prefilled from where they differ. Raises WindowFull, and the errors of `KameraWindow.append`. ``order``
    names slots by themselves, or when it is planned by index.

    ``archive=False`` is for the segments of a conversation, which nobody recalls by their ids: what leaves is
    not archived, and texts of fewer than `GLUE` tokens are glue: prefilled with their neighbours, and nothing
    is formed of them. A policy that forms "always" does so all the same, but for patches if it serves none.

    ``recurring`` are ids of chunks that come again behind others than before, of which copies can be served:
    the canonical of one that is prefilled here is made in the background, if the policy forms on a miss.
    """

    order: Sequence[Slot | Content | Chunk | Recall] | tuple[int | Newcomer, ...]
    on_leave: OnLeave = "repair"
    among: Sequence[Chunk] = ()
    operation: Literal["arrange", "assemble", "insert", "replace"] = "arrange"
    archive: bool = True
    recurring: tuple[str, ...] = ()


@dataclass(frozen=True)
class Condition:
    """See `KameraWindow.condition`."""

    slot: Slot | int
    on: bool


@dataclass(frozen=True)
class Without:
    """The window as if the chunk at ``index`` had never been there, for `KameraWindow.is_load_bearing`."""

    index: int


Edit = Append | Recall | Slide | Evict | Reorder | Arrange | Condition
"""What users ask for."""

Request = Edit | Without
