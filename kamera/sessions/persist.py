"""Save and load a session: one JSON file, PNG files named by their content, and a saved window.

``session.json`` is published last, by one rename, and names everything else: the pictures by their SHA-256,
the window by its directory. A process that is killed before the rename leaves the old session. No pickle.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import secrets
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
from kamera.engines.hf import Backbone
from kamera.errors import CorruptChunk, IncompatibleChunk, StoreError, StoreVersionError
from kamera.sessions.layout import Layout
from kamera.sessions.timers import Timer
from kamera.store import ChunkStore
from kamera.window import KameraWindow, ReusePolicy

if TYPE_CHECKING:
    from kamera.sessions.anchors import Anchors
    from kamera.sessions.chat import ChatSession
    from kamera.sessions.showing import State

VERSION = 1
"""The only format of a saved session that is written and read."""

FILE = "session.json"
_MEDIA, _WINDOW, _ASIDE = "media", "window-", ".session-"


def save_session(
    path: Path, session: ChatSession, anchors: Anchors, state: State, name: str | None = None
) -> None:
    """Write ``state`` of ``session`` to the directory ``path``; ``name`` is its id in a pool."""
    files: dict[str, bytes] = {}
    document: dict[str, Any] = {
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
        "timers": [asdict(timer) for timer in state.timers],
        "ids": None if state.ids is None else state.ids.tolist(),
        "layout": None if state.layout is None else _put_layout(state.layout),
        "window": None if state.window is None else f"{_WINDOW}{secrets.token_hex(8)}",
        "guarantee": None if state.window is None else state.window.guarantee,
        "minimum": None if state.window is None else state.window.policy.minimum,
    }
    data = _sealed(document)
    try:
        path.mkdir(parents=True, exist_ok=True)
        _check_ours(path)
        (path / _MEDIA).mkdir(exist_ok=True)
        for name, content in files.items():
            if not (path / _MEDIA / name).exists():
                _publish(path / _MEDIA, name, content)
        if state.window is not None:
            state.window.save(path / document["window"])
        _publish(path, FILE, data)
        _clear(path, document["window"], set(files))
    except OSError as error:
        raise StoreError(f"the session cannot be saved at {str(path)!r}: {error}") from None


def load_session(
    path: Path, backbone: Backbone, store: ChunkStore, *, messages_only: bool = False
) -> tuple[dict[str, Any], State, ReusePolicy | None, int | None]:
    """Settings of the session saved at ``path``, its state, its reuse policy and its limit of tokens.

    ``messages_only``: the state has neither window nor layout, so that the next turn renders all of it.
    """
    from kamera.sessions.showing import State

    where = path / FILE
    document = read_session(where)
    for name, here in (("fingerprint", backbone.fingerprint), ("tenant", store.tenant)):
        if document[name] != here:
            raise IncompatibleChunk(
                f"the session at {str(path)!r} is of {name} {document[name][:12]!r}, this is {here[:12]!r}: "
                "load it with the model and the tenant that made it"
            )
    messages = tuple(_get_message(m, path / _MEDIA) for m in document["messages"])
    ids = None if document["ids"] is None else torch.tensor(document["ids"], dtype=torch.int64)
    layout = None if document["layout"] is None else layout_of(document["layout"])
    window = None
    if messages_only:
        ids = layout = None
    elif document["window"] is not None:
        window = KameraWindow.load(path / document["window"], backbone, store)
        assert layout is not None
        lengths = [
            layout.prompt.segments[b - 1].stop - layout.prompt.segments[a].start for a, b in layout.runs
        ]
        if lengths != [slot.length for slot in window.slots]:
            raise CorruptChunk(f"{str(where)!r} and its window are of different sessions")
    settings = {name: document[name] for name in ("mode", "uncached", "tools")}
    policy = None if document["policy"] is None else ReusePolicy(**document["policy"])
    timers = tuple(Timer(**{**timer, "chunks": tuple(timer["chunks"])}) for timer in document["timers"])
    state = State(messages, document["turn"], ids, layout, window, timers=timers)
    return settings, state, policy, document["max_tokens"]


# -- messages ----------------------------------------------------------------------------------


def _put_message(message: Mapping[str, Any], files: dict[str, bytes]) -> dict[str, Any]:
    content = message.get("content")
    if isinstance(content, Sequence) and not isinstance(content, str):
        content = [_put_item(item, files) for item in content]
    out = {**message, "content": content} if "content" in message else dict(message)
    try:
        json.dumps(out, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"a {message.get('role')} message cannot be saved: {error}; use JSON values only"
        ) from None
    return out


def _put_item(item: Any, files: dict[str, bytes]) -> Any:
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
        return {**message, "content": [_get_item(item, media) for item in content]}
    return message


def _get_item(item: Any, media: Path) -> Any:
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
    try:
        data = where.read_bytes()
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
        "runs": layout.runs,
    }


def layout_of(held: dict[str, Any]) -> Layout:
    """The layout that a document holds."""
    segments = tuple(Segment(**{**s, "messages": tuple(s["messages"])}) for s in held["segments"])
    ids = torch.tensor(held["ids"], dtype=torch.int64)
    turns, tags, runs = (tuple((a, b) for a, b in held[name]) for name in ("turns", "tags", "runs"))
    return Layout(Rendered(ids, segments, held["stable"], turns, tags), runs)


# -- files -------------------------------------------------------------------------------------


def _sealed(document: Mapping[str, Any]) -> bytes:
    """The document as JSON, after a line with its SHA-256."""
    try:
        # not sorted: a template writes the keys of tools and arguments in their order
        body = json.dumps(document, allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        raise ValueError(f"the session cannot be saved: {error}") from None
    seal = {"kamera": "session", "sha256": hashlib.sha256(body).hexdigest()}
    return json.dumps(seal).encode() + b"\n" + body + b"\n"


def read_session(where: Path) -> dict[str, Any]:
    """The document of a ``session.json``; raises as `ChatSession.load`."""
    try:
        data = where.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise StoreError(f"no saved session at {str(where.parent)!r}: it has no {FILE}") from None
    except OSError as error:
        raise StoreError(f"{str(where)!r} cannot be read: {error}") from None
    seal = _seal_of(data)
    if seal is None:
        raise CorruptChunk(f"{str(where)!r} is damaged or not a Kamera session: its first line is no seal")
    body = data[data.index(b"\n") + 1 : -1]
    if data[-1:] != b"\n" or hashlib.sha256(body).hexdigest() != seal.get("sha256"):
        raise CorruptChunk(f"{str(where)!r} is damaged: its digest does not match")
    document: dict[str, Any] = json.loads(body)
    if document["version"] != VERSION:
        raise StoreVersionError(
            f"{str(where)!r} is of session format {document['version']}, this version reads {VERSION}: open "
            "it with the version that wrote it and save it again"
        )
    return document


def _seal_of(data: bytes) -> dict[str, Any] | None:
    try:
        seal = json.loads(data.partition(b"\n")[0])
    except (ValueError, RecursionError):
        return None
    return seal if isinstance(seal, dict) and seal.get("kamera") == "session" else None


def _publish(folder: Path, name: str, data: bytes) -> None:
    aside = folder / f"{_ASIDE}{secrets.token_hex(8)}.tmp"
    try:
        with open(aside, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, folder / name)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(aside)


def _check_ours(path: Path) -> None:
    """Raise StoreError unless the directory is empty or holds a session, which may be replaced."""
    names = sorted(os.listdir(path))
    if not names or ((path / FILE).is_file() and _seal_of((path / FILE).read_bytes()) is not None):
        return
    if all(n == _MEDIA or n.startswith((_WINDOW, _ASIDE)) for n in names):
        return  # a save that was killed before it published
    raise StoreError(f"{str(path)!r} is not a saved session: it holds {names[0]!r}; give a new directory")


def _clear(path: Path, window: str | None, media: set[str]) -> None:
    """Remove files that the published session does not name."""
    for entry in os.listdir(path):
        if entry.startswith(_WINDOW) and entry != window:
            shutil.rmtree(path / entry, ignore_errors=True)
    for name in os.listdir(path / _MEDIA):
        if name not in media:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path / _MEDIA / name)
