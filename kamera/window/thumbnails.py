"""Small pictures of chunks, for people who look at events."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence

from PIL import Image

from kamera.window.slots import Slot

SIDE = 88
"""Longest side in pixels."""


def thumbnails(
    pictures: Mapping[str, Image.Image], after: Sequence[Slot], before: Sequence[Slot]
) -> dict[str, bytes]:
    """JPEG files of those ``pictures``, by chunk id, whose chunks came between ``before`` and ``after``."""
    known = {slot.chunk_id for slot in before}
    wanted = {slot.chunk_id for slot in after} - known
    made = {name: thumbnail(picture) for name, picture in pictures.items() if name in wanted}
    return {name: data for name, data in made.items() if data}


def thumbnail(picture: Image.Image) -> bytes:
    """A picture as a small JPEG file, which stays as it is; nothing of one that was closed meanwhile."""
    try:
        small, file = picture.convert("RGB"), io.BytesIO()
        small.thumbnail((SIDE, SIDE))
        small.save(file, "JPEG", quality=72)
    except (OSError, ValueError):
        return b""
    return file.getvalue()
