"""Copies in quarantine: listed, and deleted on demand. A sound file can be moved back by hand."""

from __future__ import annotations

import re
from dataclasses import replace

from kamera.store.info import Quarantined
from kamera.store.tiers import Tiers

REMOTE = "remote/"
"""Prefix of the ``file`` of a copy in a remote."""

_NAME = re.compile(rf"({REMOTE})?[0-9a-f]{{64}}(\.\d{{1,20}}(\.safetensors)?)?")


class Quarantine:
    """The quarantine of one store, that of its remote included: the damaged objects that were set aside."""

    def __init__(self, tiers: Tiers) -> None:
        self._places = {"" if tier is tiers.disk else REMOTE: tier for tier in tiers.tiers_below_memory}

    def copies(self) -> list[Quarantined]:
        """All copies: those of the directory, of all tenants, then this tenant's in the remote."""
        places = self._places.items()
        return [replace(copy, file=place + copy.file) for place, tier in places for copy in tier.copies()]

    def drop(self, name: str) -> int:
        """Delete one copy (by its ``file``) or all of the object ``name``; return their number."""
        if not _NAME.fullmatch(name):
            raise ValueError(f"{name!r} is neither an object's name nor that of a copy in quarantine")
        files = [copy.file for copy in self.copies() if name in (copy.file, copy.name)]
        for file in files:
            own = file.removeprefix(REMOTE)
            self._places[file.removesuffix(own)].delete_copy(own)
        return len(files)
