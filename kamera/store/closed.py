"""Stand-in for the tiers of a closed store."""

from __future__ import annotations

from typing import NoReturn

from kamera.errors import StoreClosed


class Closed:
    """Raises `StoreClosed` on access to any attribute of the tiers."""

    def __init__(self, url: str) -> None:
        self._url = url

    def __getattr__(self, name: str) -> NoReturn:
        raise StoreClosed(f"the store {self._url!r} is closed: open it again with ChunkStore.open")
