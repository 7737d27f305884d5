"""Save and load a session: its document, PNG files named by their content, and a saved window.

The document (`kamera.sessions.document`) is published last, by one rename, and names everything else by
digest. A process that is killed before the rename leaves the old session. What was answered is never
replaced by a session that does not go on from it: a save compares the changes that made both.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from PIL import Image

from kamera.content import (
    Clip,
    Rendered,
    Segment,
    kind_of,
    load_clip,
    load_image,
    media_item,
    tool_schema,
)
from kamera.engines import Engine
from kamera.errors import CorruptChunk, IncompatibleChunk, SessionConflict, StoreError
from kamera.files import ASIDE
from kamera.sessions.document import (
    FILE,
    VERSION,
    Document,
    is_document,
    publish,
    read_document,
    sealed,
    window_name,
)
from kamera.sessions.layout import Layout
from kamera.sessions.modes import worth_to_others
from kamera.store import ChunkStore, Folder
from kamera.trust import ReusePolicy
from kamera.window import KameraWindow, well_formed

if TYPE_CHECKING:
    from kamera.sessions.anchors import Anchors
    from kamera.sessions.chat import ChatSession
    from kamera.sessions.showing import State

_MEDIA, _WINDOW = "media", "window-"
_PICTURE = re.compile(r"[0-9a-f]{64}\.png")


def save_session(
    path: Path,
    session: ChatSession,
    anchors: Anchors,
    state: State,
    name: str | None = None,
    *,
    apart: bool = False,
) -> None:
    """Write ``state`` of ``session`` to the directory ``path``, whose lock is held; ``name`` is its pool id.

    Raises SessionConflict, and writes nothing, if the session saved there has gone on without this one:
    changes of its own came after those that both share. ``apart``: also if they share none.
    """
    files: dict[str, bytes] = {}
    window = state.window
    document: Document = {
        "version": VERSION,
        "id": name,
        "fingerprint": session.backbone.fingerprint,
        "tenant": session.store.tenant,
        "mode": session.mode,
        "uncached": session.uncached,
        "tools": None if session.tools is None else [tool_schema(tool) for tool in session.tools],
        "policy": None if anchors.policy is None else anchors.policy.to_info(),
        "max_tokens": anchors.max_tokens,
        "messages": [_put_message(m, files) for m in state.messages],
        "turn": state.turn,
        "changes": list(state.changes),
        "last": state.last,
        "ids": None if state.ids is None else state.ids.tolist(),
        "layout": None if state.layout is None else _put_layout(state.layout),
        "window": None if window is None else {"folder": window_name(), "sha256": ""},
        "guarantee": None if window is None else worth_to_others(window),
        "minimum": None if window is None else window.policy.minimum,
    }
    sealed(document, session.store)  # raises before anything is written
    try:
        _check_ours(path)
        _check_order(path, state, name, apart)
        (path / _MEDIA).mkdir(exist_ok=True)
        for file, content in files.items():
            if not (path / _MEDIA / file).exists():
                publish(path / _MEDIA, file, content)
        if window is not None:
            document["window"]["sha256"] = window.save(path / document["window"]["folder"])
        publish(path, FILE, sealed(document, session.store))
        _clear(path, None if window is None else document["window"]["folder"], set(files))
    except OSError as error:
        raise StoreError(f"the session cannot be saved at {str(path)!r}: {error}") from None


def load_session(
    path: Path,
    backbone: Engine,
    store: ChunkStore,
    name: str | None = None,
    *,
    messages_only: bool = False,
) -> tuple[dict[str, Any], State, ReusePolicy | None, int | None]:
    """Settings of the session saved at ``path``, its state, its reuse policy and its limit of tokens.

    ``name`` is the id it must have. ``messages_only``: the state has neither window nor layout, so that the
    next turn renders all of it.
    """
    from kamera.sessions.showing import State

    where = path / FILE
    document = read_document(path, store, name)
    for field, here in (("fingerprint", backbone.fingerprint), ("tenant", store.tenant)):
        if document[field] != here:
            raise IncompatibleChunk(
                f"the session at {str(path)!r} is of {field} {document[field][:12]!r}, this is "
                f"{here[:12]!r}: load it with the model and the tenant that made it"
            )
    with well_formed(where):
        messages = tuple(_get_message(m, path / _MEDIA) for m in document["messages"])
        ids = None if document["ids"] is None else torch.tensor(document["ids"], dtype=torch.int64)
        layout = None if document["layout"] is None else layout_of(document["layout"])
        settings = {name: document[name] for name in ("mode", "uncached", "tools")}
        policy = None if document["policy"] is None else ReusePolicy(**document["policy"])
    window = None
    if messages_only:
        ids = layout = None
    elif document["window"] is not None:
        assert layout is not None
        held = document["window"]
        window = KameraWindow.load(path / held["folder"], backbone, store, digest=held["sha256"])
        lengths = [
            layout.prompt.segments[b - 1].stop - layout.prompt.segments[a].start for a, b in layout.runs
        ]
        if lengths != [slot.length for slot in window.slots]:
            raise CorruptChunk(f"{str(where)!r} and its window are of different sessions")
    changes = tuple(document["changes"])
    state = State(messages, document["turn"], ids, layout, window, changes=changes, last=document["last"])
    return settings, state, policy, document["max_tokens"]


# -- messages ----------------------------------------------------------------------------------


def _put_message(message: Mapping[str, Any], files: dict[str, bytes]) -> dict[str, Any]:
    content = message.get("content")
    if isinstance(content, Sequence) and not isinstance(content, str):
        content = [_item_to_json(item, files) for item in content]
    out = {**message, "content": content} if "content" in message else dict(message)
    try:
        json.dumps(out, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"a {message.get('role')} message cannot be saved: {error}; use JSON values only"
        ) from None
    return out


def _item_to_json(item: Any, files: dict[str, bytes]) -> Any:
    kind = kind_of(item)
    if kind is None or kind == "text":
        return item
    item = media_item(item, kind)
    if kind == "image":
        return {"type": "image", "kamera": {"file": _put_picture(load_image(item), files)}}
    held = item.get("video")
    clip = held if isinstance(held, Clip) else load_clip(item)
    frames = [_put_picture(frame, files) for frame in clip.frames]
    numbers = {
        "indices": [int(i) for i in clip.indices],
        "seconds": [float(s) for s in clip.seconds],
        "fps": float(clip.fps),
        "total_frames": int(clip.total_frames),
    }
    return {"type": "video", "kamera": {"frames": frames, **numbers}}


def _put_picture(picture: Image.Image, files: dict[str, bytes]) -> str:
    into = io.BytesIO()
    picture.save(into, "PNG", compress_level=3)
    data = into.getvalue()
    name = f"{hashlib.sha256(data).hexdigest()}.png"
    files[name] = data
    return name


def _get_message(message: dict[str, Any], media: Path) -> dict[str, Any]:
    content = message.get("content")
    if isinstance(content, list):
        return {**message, "content": [_item_from_json(item, media) for item in content]}
    return message


def _item_from_json(item: Any, media: Path) -> Any:
    if not isinstance(item, dict) or item.get("type") not in ("image", "video"):
        return item
    held = item["kamera"]
    if item["type"] == "image":
        return {"type": "image", "image": _get_picture(held["file"], media)}
    frames = tuple(_get_picture(name, media) for name in held["frames"])
    indices, seconds = tuple(held["indices"]), tuple(held["seconds"])
    return {"type": "video", "video": Clip(frames, indices, seconds, held["fps"], held["total_frames"])}


def _get_picture(name: str, media: Path) -> Image.Image:
    where = media / name
    if not _PICTURE.fullmatch(name):
        raise ValueError(f"{name!r} is no picture's digest")
    try:
        with Folder.at(media) as folder:
            data, _ = folder.read(name)
    except OSError as error:
        raise CorruptChunk(f"a picture of the session is missing: {error}") from None
    if f"{hashlib.sha256(data).hexdigest()}.png" != name:
        raise CorruptChunk(f"{str(where)!r} is damaged: its digest does not match")
    return load_image(data)


# -- prompts -----------------------------------------------------------------------------------


def _put_layout(layout: Layout) -> dict[str, Any]:
    prompt = layout.prompt
    return {
        "ids": prompt.ids.tolist(),
        "segments": [asdict(segment) for segment in prompt.segments],
        "stable": prompt.stable,
        "turns": prompt.turns,
        "tags": prompt.tags,
        "cuts": dict(prompt.cuts),
        "runs": layout.runs,
    }


def layout_of(held: dict[str, Any]) -> Layout:
    """The layout that a document holds. Raises ValueError, TypeError or LookupError for none."""
    segments = tuple(Segment(**{**s, "messages": _span(s["messages"])}) for s in held["segments"])
    ids = torch.tensor(held["ids"], dtype=torch.int64)
    turns, tags, runs = (tuple(map(_span, held[name])) for name in ("turns", "tags", "runs"))
    stops = [0, *(segment.stop for segment in segments)]
    if [segment.start for segment in segments] != stops[:-1] or held["stable"] != stops[-1]:
        raise ValueError("the segments of a prompt follow one another")
    if not all(0 <= first < last <= len(segments) for first, last in runs) or stops[-1] > len(ids):
        raise ValueError("a window's runs are segments of its prompt")
    if not all(isinstance(segment.id, str) for segment in segments):
        raise TypeError("a segment has an id")
    cuts = {name: _numbers(borders) for name, borders in held["cuts"].items()}
    return Layout(Rendered(ids, segments, held["stable"], turns, tags, cuts=cuts), runs)


def _span(held: Sequence[int]) -> tuple[int, int]:
    first, last = _numbers(held)
    return first, last


def _numbers(held: Sequence[int]) -> tuple[int, ...]:
    if not all(type(number) is int for number in held):
        raise TypeError("spans and borders are whole numbers")
    return tuple(held)


# -- files -------------------------------------------------------------------------------------


def _check_ours(path: Path) -> None:
    """Raise StoreError unless the directory is empty or holds a session, which may be replaced."""
    with Folder.at(path) as folder:
        names = folder.names()
        if not names or is_document(folder):
            return
    if all(n == _MEDIA or n.startswith((_WINDOW, ASIDE)) for n in names):
        return  # a save that was killed before it published
    other = FILE if FILE in names else names[0]
    raise StoreError(f"{str(path)!r} is not a saved session: it holds {other!r}; give a new directory")


def _check_order(path: Path, state: State, name: str | None, apart: bool) -> None:
    """Raise SessionConflict if the session saved there has gone on without ``state``.

    What is damaged or displaced is no session. Raises StoreVersionError for one of another format.
    """
    try:
        there = read_document(path, name=name)
    except (CorruptChunk, StoreError):
        return
    changes = there["changes"]
    if not changes or changes[-1] in state.changes:
        return
    if apart or set(changes) & set(state.changes):
        raise SessionConflict(
            f"the session at {str(path)!r} was continued elsewhere: {there['turn']} answers are there, "
            f"{state.turn} others here; load it again, or save this branch in another directory"
        )


def _clear(path: Path, window: str | None, media: set[str]) -> None:
    """Remove files that the published session does not name."""
    for entry in os.listdir(path):
        if entry.startswith(_WINDOW) and entry != window:
            shutil.rmtree(path / entry, ignore_errors=True)
    for name in os.listdir(path / _MEDIA):
        if name not in media:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path / _MEDIA / name)
