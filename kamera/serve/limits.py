"""What requests may cost a server before they become tokens."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass

from PIL import Image

from kamera.content import Message, media_items
from kamera.errors import InvalidRequest


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Most of what a request brings; more is refused by name.

    ``body``: bytes of its body; ``bodies``: of the bodies of all requests that are not answered yet.
    ``messages``: number of its messages. ``pixels``: those of all its pictures, as their files have them.
    Raises ValueError for one below 1.
    """

    body: int = 32 << 20
    bodies: int = 256 << 20
    messages: int = 10_000
    pixels: int = 400_000_000

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 1:
                raise ValueError(f"limit of {name} is {value}: give 1 or more")

    def check(self, messages: Sequence[Message]) -> None:
        """Raise InvalidRequest for too many messages, or pictures that are too large together."""
        if len(messages) > self.messages:
            raise InvalidRequest(
                f"messages has {len(messages)}, more than {self.messages}: send fewer", "messages"
            )
        sources = [item["image"] for item in media_items(messages)]
        sizes = [Image.open(io.BytesIO(source)).size for source in sources if isinstance(source, bytes)]
        pixels = sum(width * height for width, height in sizes)
        if pixels > self.pixels:
            raise InvalidRequest(
                f"messages has {len(sizes)} pictures of {pixels} pixels, more than {self.pixels}: send "
                "smaller ones, or fewer",
                "messages",
            )
