"""What stands in the place of a closed store's tiers."""

from __future__ import annotations

from typing import NoReturn

from kamera.errors import StoreClosed


class Closed:
    """Refuses whatever is asked of it. Raises StoreClosed."""

    def __init__(self, url: str) -> None:
        self._url = url

    def __getattr__(self, name: str) -> NoReturn:
        raise StoreClosed(f"the store {self._url!r} is closed: open it again with ChunkStore.open")
