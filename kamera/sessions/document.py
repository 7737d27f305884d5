"""The document of a saved session: one sealed file over all that belongs to the session.

Its fields are declared once (`Document`), and JSON is read and written by them; the store signs it. It names
its window's file and its pictures by their digests. So no file of another session, and no folder under
another id, passes for a part of this one. No pickle.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import cattrs
import torch
from cattrs.gen import make_dict_structure_fn, make_dict_unstructure_fn, override

from kamera import files
from kamera.content import Rendered
from kamera.edits import PolicyName
from kamera.errors import CorruptChunk, ForeignObject
from kamera.sessions.layout import Layout
from kamera.sessions.modes import SessionMode, tools_digest
from kamera.store import ChunkStore, signature
from kamera.trust import Guarantee, ReusePolicy
from kamera.window import Saved, SealedFile, refuse_malformed

MEDIA = "media"
"""The folder of its pictures."""

SESSION = SealedFile("session", 2, (MEDIA, f"window-{'[0-9a-f]' * 16}"))
"""The file of a saved session, which is published last, beside its pictures and its window."""

WINDOW_FOLDER = re.compile(r"window-[0-9a-f]{16}")
"""The name of a folder of a window of one."""


@dataclass(frozen=True, eq=False)
class SavedWindow:
    """A session's window, saved in ``folder``; ``sha256`` is the digest of its file, ``layout`` its prompt's.

    ``guarantee`` is the weakest in it as other conversations see it, ``minimum`` the least that is served.
    """

    folder: str
    sha256: str
    guarantee: Guarantee
    minimum: Guarantee
    layout: Layout

    def __post_init__(self) -> None:
        prompt, runs = self.layout.prompt, self.layout.runs
        stops = [0, *(segment.stop for segment in prompt.segments)]
        if not WINDOW_FOLDER.fullmatch(self.folder):
            raise ValueError(f"{self.folder!r} is no window's folder")
        if [segment.start for segment in prompt.segments] != stops[:-1] or prompt.stable != stops[-1]:
            raise ValueError("the segments of a prompt follow one another")
        if stops[-1] > prompt.num_tokens or not all(0 <= a < b < len(stops) for a, b in runs):
            raise ValueError("a window's runs are segments of its prompt")


@dataclass(frozen=True)
class SavedTurn:
    """A `PastTurn` that the session may go on from, its messages by their indices in what was said."""

    previous_id: str | None
    system: tuple[int, ...]
    messages: tuple[int, ...]
    has_left: bool


@dataclass(frozen=True, eq=False)
class Document:
    """A saved session; ``id`` is the one in its pool. Media in what was ``said`` are names of files.

    ``said`` are all messages of its history and of its ``turns``, each once; ``messages`` are the history's,
    by their indices there. ``fingerprint`` and ``tenant`` are those of its model and store, ``policy`` and
    ``max_tokens`` those of its windows; the others are fields of `Manner` and `State`.
    """

    id: str | None
    fingerprint: str
    tenant: str
    mode: SessionMode
    uncached: bool
    edit_policy: PolicyName | None
    tools: list[dict[str, Any]] | None
    policy: ReusePolicy | None
    max_tokens: int | None
    said: list[dict[str, Any]]
    messages: tuple[int, ...]
    turns: dict[str, SavedTurn]
    turn: int
    changes: tuple[str, ...]
    last: str | None
    ids: torch.Tensor | None
    window: SavedWindow | None

    def __post_init__(self) -> None:
        if not all(isinstance(message["role"], str) for message in self.said):
            raise TypeError("messages have roles")
        turns = self.turns.values()
        histories = [self.messages, *(turn.system for turn in turns), *(turn.messages for turn in turns)]
        if not all(0 <= i < len(self.said) for history in histories for i in history):
            raise ValueError("a message is none that was said")
        if not all(turn.previous_id in (None, *self.turns) for turn in turns):
            raise ValueError("a turn goes on from one that is not there")

    @cached_property
    def kind(self) -> str:
        """The digest of its tools."""
        return tools_digest(self.tools)

    def to_json(self) -> dict[str, Any]:
        """The JSON value that is signed."""
        return {"version": SESSION.version, **_converter().unstructure(self)}


def sign_document(document: Mapping[str, Any], store: ChunkStore) -> Saved:
    """A document's JSON value with the store's signature. Raises ValueError for one that JSON cannot hold."""
    try:
        name = hashlib.sha256(_text(document)).hexdigest()
    except (TypeError, ValueError) as error:
        raise ValueError(f"the session cannot be saved: {error}") from None
    return Saved({**document, "signature": signature(store, name)}, {})


def read_document(path: Path, store: ChunkStore | None = None, name: str | None = None) -> Document:
    """The document saved in the directory ``path``; with a ``store`` its signature is verified, too.

    ``name`` is the id it must have. Raises StoreError if there is none or no file in its place, CorruptChunk
    for a damaged, malformed or displaced one, ForeignObject for one that was not written with the store's
    secret, StoreVersionError for one of another format.
    """
    where, (json_value, tensors) = path / SESSION.name, SESSION.read(path)
    with refuse_malformed(where):
        if tensors:  # nothing signs them
            raise ValueError("a session has no tensors")
        mark = json_value.pop("signature")
        document = _parse_document({k: value for k, value in json_value.items() if k != "version"})
        if _text(document.to_json()) != _text(json_value):  # a value of another type, or an entry of no field
            raise ValueError("this version writes another document")
    if name is not None and document.id != name:
        raise CorruptChunk(
            f"{str(where)!r} is the session {document.id!r}, not {name!r}: it was copied there, remove it"
        )
    ours = store is not None and store.tenant == document.tenant  # else refused by its tenant
    if ours and store is not None and sign_document(json_value, store).document["signature"] != mark:
        raise ForeignObject(
            f"{str(where)!r} was not written under this store's secret: open the store with the one it had"
        )
    return document


@contextlib.contextmanager
def lock_folder(path: Path) -> Iterator[None]:
    """Hold the lock of the directory at ``path``, made if it is not there. Raises OSError."""
    while True:
        path.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as locks:
            try:
                old_stat = os.stat(path)
                locks.enter_context(files.lock_path(path))
                new_stat = os.stat(path)
            except FileNotFoundError:  # removed meanwhile
                continue
            if (old_stat.st_dev, old_stat.st_ino) == (new_stat.st_dev, new_stat.st_ino):
                yield
                return


def _text(document: Mapping[str, Any]) -> bytes:
    # not sorted: a template writes the keys of tools and arguments in their order
    return json.dumps(document, allow_nan=False).encode()


def _parse_document(json_value: Any) -> Document:
    try:
        return _converter().structure(json_value, Document)
    except cattrs.errors.CattrsError as error:
        raise ValueError(str(error)) from None


@cache
def _converter() -> cattrs.Converter:
    converter = cattrs.Converter(detailed_validation=False)
    converter.register_unstructure_hook(ReusePolicy, ReusePolicy.to_info)
    converter.register_structure_hook(ReusePolicy, lambda info, _: ReusePolicy(**info))
    converter.register_unstructure_hook(torch.Tensor, torch.Tensor.tolist)
    converter.register_structure_hook(torch.Tensor, lambda ids, _: torch.tensor(ids, dtype=torch.int64))
    pixels: Any = dict.fromkeys(("media", "types"), override(omit=True))  # a layout's prompt has none
    converter.register_unstructure_hook(Rendered, make_dict_unstructure_fn(Rendered, converter, **pixels))
    converter.register_structure_hook(Rendered, make_dict_structure_fn(Rendered, converter, **pixels))
    return converter
