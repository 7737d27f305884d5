"""A saved session: a document that the store signs, PNG files named by their content, and a saved window.

The document's fields are declared once (`Document`), and JSON is read and written by them. It names its
window's file and its pictures by their digests. So no file of another session, and no folder under another
id, passes for a part of this one. No pickle.

The document is published last, by one rename. A process that is killed before it leaves the old session. What
was answered is never replaced by a session that does not go on from it: a save compares the changes that made
both.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import cattrs
import torch
from cattrs.gen import make_dict_structure_fn, make_dict_unstructure_fn, override
from PIL import Image

from kamera import files
from kamera.content import Clip, Medium, Rendered, kind_of, load_image, load_media, media_item, tool_schema
from kamera.edits import Directive, EditPolicy, PolicyName, name_of
from kamera.errors import CorruptChunk, ForeignObject, IncompatibleChunk, SessionConflict, StoreError
from kamera.files import publish_file
from kamera.sessions.anchors import Anchors, History, PastTurn, Turns
from kamera.sessions.layout import Layout, Manner, SessionMode, tools_digest, worth_to_others
from kamera.sessions.showing import State
from kamera.store import ChunkStore, Folder, signature
from kamera.trust import Guarantee, ReusePolicy
from kamera.window import KameraWindow, Saved, SealedFile, refuse_malformed

MEDIA = "media"
"""The folder of a session's pictures."""

SESSION = SealedFile("session", 3, (MEDIA, f"window-{'[0-9a-f]' * 16}"))
"""The file of a saved session, which is published last, beside its pictures and its window."""

WINDOW_FOLDER = re.compile(r"window-[0-9a-f]{16}")
"""The name of the folder of a session's window."""


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
    decays: tuple[Directive, ...]
    ids: torch.Tensor | None
    window: SavedWindow | None

    def __post_init__(self) -> None:
        if any(d.verb != "decay" or d.end > len(self.messages) for d in self.decays):
            raise ValueError("what decays are messages of the history")
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
    converter.register_unstructure_hook(Directive, asdict)
    converter.register_structure_hook(Directive, lambda fields, _: Directive(**fields))
    converter.register_unstructure_hook(torch.Tensor, torch.Tensor.tolist)
    converter.register_structure_hook(torch.Tensor, lambda ids, _: torch.tensor(ids, dtype=torch.int64))
    pixels: Any = dict.fromkeys(("media", "types"), override(omit=True))  # a layout's prompt has none
    converter.register_unstructure_hook(Rendered, make_dict_unstructure_fn(Rendered, converter, **pixels))
    converter.register_structure_hook(Rendered, make_dict_structure_fn(Rendered, converter, **pixels))
    return converter


_PICTURE = re.compile(r"[0-9a-f]{64}\.png")

TURNS = 64
"""Last changes of a session that can be gone on from when it was saved, each with all turns before it."""


def save_session(
    path: Path, state: State, anchors: Anchors, manner: Manner, name: str | None, *, strict: bool = False
) -> Document:
    """Write a session to the directory ``path``, whose lock is held; ``name`` is its id in a pool.

    Raises SessionConflict, and writes nothing, if the session saved there has gone on without this one:
    changes of its own came after those that both share. ``strict``: also if they share none.
    """
    said = _Said(anchors.backbone.processor)
    messages = said.indices(state.messages)
    turns = anchors.branches.turns(state.changes[-TURNS:])
    window, saved_window = state.window, None
    if window is not None and state.layout is not None:
        folder = f"window-{secrets.token_hex(8)}"
        minimum = window.policy.minimum
        saved_window = SavedWindow(folder, "", worth_to_others(window), minimum, state.layout)
    document = Document(
        id=name,
        fingerprint=anchors.backbone.fingerprint,
        tenant=anchors.store.tenant,
        mode=manner.mode,
        uncached=manner.uncached,
        edit_policy=None if manner.edit_policy is None else name_of(manner.edit_policy),
        tools=None if manner.tools is None else [tool_schema(tool) for tool in manner.tools],
        policy=anchors.policy,
        max_tokens=anchors.max_tokens,
        said=said.messages,
        messages=messages,
        turns={
            name: SavedTurn(t.previous_id, said.indices(t.system), said.indices(t.messages), t.has_left)
            for name, t in turns.items()
        },
        turn=state.turn,
        changes=state.changes,
        last=state.last,
        decays=state.decays,
        ids=state.ids,
        window=saved_window,
    )
    sign_document(document.to_json(), anchors.store)  # raises before anything is written
    try:
        SESSION.check_folder(path)
        _check_order(path, state, name, strict)
        (path / MEDIA).mkdir(exist_ok=True)
        for file, content in said.files.items():
            if not (path / MEDIA / file).exists():
                with publish_file(path / MEDIA / file, 0o666) as picture:
                    picture.write(content)
        if isinstance(window, KameraWindow) and saved_window is not None:
            saved_window = replace(saved_window, sha256=window.save(path / saved_window.folder))
        document = replace(document, window=saved_window)
        SESSION.publish(path, sign_document(document.to_json(), anchors.store))
        _clear(path, None if saved_window is None else saved_window.folder, set(said.files))
        return document
    except OSError as error:
        raise StoreError(f"the session cannot be saved at {str(path)!r}: {error}") from None


def find_policy(path: Path, document: Document, given: EditPolicy | None) -> EditPolicy | None:
    """The edit policy of the session that is saved at ``path``: made again, or ``given`` if it is that one.

    Raises IncompatibleChunk for another one, and for one that has to be given.
    """
    saved = document.edit_policy
    other = None if given is None else name_of(given)
    if given is not None and other != saved:
        raise IncompatibleChunk(
            f"the session at {str(path)!r} was saved under edit policy {saved}, this is {other}: load it "
            "under that one, and set session.edit_policy then"
        )
    with refuse_malformed(path / SESSION.name):
        policy = saved.make() if saved is not None and given is None else given
    if saved is not None and policy is None:
        raise IncompatibleChunk(
            f"the session at {str(path)!r} was saved under edit policy {saved}, which is code: give it to "
            "load (edit_policy=…)"
        )
    return policy


def load_session(path: Path, document: Document, anchors: Anchors, *, messages_only: bool = False) -> State:
    """The state of the session that is saved at ``path``, whose last turn can be gone on from.

    ``messages_only``: without window and layout, so that the next turn renders all of it.
    """
    backbone, store, branches = anchors.backbone, anchors.store, anchors.branches
    for field, ours in (("fingerprint", backbone.fingerprint), ("tenant", store.tenant)):
        if (value := getattr(document, field)) != ours:
            raise IncompatibleChunk(
                f"the session at {str(path)!r} is of {field} {value[:12]!r}, this is {ours[:12]!r}: load it "
                "with the model and the tenant that made it"
            )
    said, turns = load_turns(path, document)
    branches.restore(turns)
    messages = tuple(said[i] for i in document.messages)
    state = State(messages=messages, turn=document.turn, changes=document.changes, last=document.last)
    state = replace(state, decays=document.decays)
    if messages_only:
        return state
    state, saved_window = replace(state, ids=document.ids), document.window
    if saved_window is None:
        return state
    window = KameraWindow.load(path / saved_window.folder, backbone, store, digest=saved_window.sha256)
    segments = saved_window.layout.prompt.segments
    lengths = [segments[last - 1].stop - segments[first].start for first, last in saved_window.layout.runs]
    if lengths != [slot.length for slot in window.slots]:
        raise CorruptChunk(f"{str(path / SESSION.name)!r} and its window are of different sessions")
    anchors.listen_to(window)
    return replace(state, layout=saved_window.layout, window=window)


def load_turns(path: Path, document: Document) -> tuple[History, Turns]:
    """What was said in the session that is saved at ``path``, and its turns. Raises CorruptChunk."""
    with refuse_malformed(path / SESSION.name):
        said = tuple(_get_message(m, path / MEDIA) for m in document.said)

    def spoken(indices: Sequence[int]) -> History:
        return tuple(said[i] for i in indices)

    turns = {
        name: PastTurn(turn.previous_id, spoken(turn.system), spoken(turn.messages), turn.has_left)
        for name, turn in document.turns.items()
    }
    return said, turns


def save_turn(path: Path, name: str, anchors: Anchors) -> None:
    """Write one turn alone to the directory ``path``, before its session is saved. Raises as `save_session`.

    Its document has the turn before it as its ``last``.
    """
    turn = anchors.branches.turns([name]).get(name)
    if turn is None:
        return
    said = _Said(anchors.backbone.processor)
    saved = SavedTurn(None, said.indices(turn.system), said.indices(turn.messages), turn.has_left)
    document = Document(
        id=name,
        fingerprint=anchors.backbone.fingerprint,
        tenant=anchors.store.tenant,
        mode="auto",
        uncached=False,
        edit_policy=None,
        tools=None,
        policy=None,
        max_tokens=None,
        said=said.messages,
        messages=(),
        turns={name: saved},
        turn=1,
        changes=(name,),
        last=turn.previous_id,
        decays=(),
        ids=None,
        window=None,
    )
    try:
        (path / MEDIA).mkdir(parents=True, exist_ok=True)
        for file, content in said.files.items():
            with publish_file(path / MEDIA / file, 0o666) as picture:
                picture.write(content)
        SESSION.publish(path, sign_document(document.to_json(), anchors.store))
    except OSError as error:
        raise StoreError(f"the turn cannot be saved at {str(path)!r}: {error}") from None


def load_turn(path: Path, name: str, anchors: Anchors) -> PastTurn:
    """The turn that `save_turn` wrote. Raises as `read_document`, IncompatibleChunk for another model's."""
    document = read_document(path, anchors.store, name)
    own = (anchors.backbone.fingerprint, anchors.store.tenant)
    if (document.fingerprint, document.tenant) != own:
        raise IncompatibleChunk(f"the turn at {str(path)!r} is of another model or tenant")
    return replace(load_turns(path, document)[1][name], previous_id=document.last)


# -- messages ----------------------------------------------------------------------------------


class _Said:
    """Messages as they are saved, each once, and the files of their media."""

    def __init__(self, processor: Any) -> None:
        self.messages: list[dict[str, Any]] = []
        self.files: dict[str, bytes] = {}
        self._processor = processor
        self._places: dict[str, int] = {}
        self._items: dict[Any, Any] = {}

    def indices(self, messages: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
        """The places of ``messages``; those that are new are added. Raises ValueError for what is no JSON."""
        return tuple(map(self._index, messages))

    def _index(self, message: Mapping[str, Any]) -> int:
        out, content = dict(message), message.get("content")
        if isinstance(content, Sequence) and not isinstance(content, str):
            out["content"] = list(map(self._item, content))
        try:
            text = json.dumps(out, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"a {message.get('role')} message cannot be saved: {error}; use JSON values only"
            ) from None
        place = self._places.setdefault(text, len(self.messages))
        if place == len(self.messages):
            self.messages.append(out)
        return place

    def _item(self, item: Any) -> Any:
        kind = kind_of(item)
        if kind is None or kind == "text":
            return item
        name = id(item) if not isinstance(item, Mapping) else tuple((k, _name(v)) for k, v in item.items())
        if name not in self._items:
            self._items[name] = _put_item(item, kind, self.files, self._processor)
        return self._items[name]


def _name(value: Any) -> Any:
    """What a medium is known by while a session is saved: itself where that tells equal ones, else its id."""
    return value if isinstance(value, str | bytes) else id(value)


def _put_item(item: Any, kind: str, files: dict[str, bytes], processor: Any) -> Any:
    clip = load_media(media_item(item, kind), processor)
    if isinstance(clip, Image.Image):
        return {"type": "image", "kamera": {"file": _put_picture(clip, files)}}
    numbers = {
        "indices": [int(i) for i in clip.indices],
        "seconds": [float(s) for s in clip.seconds],
        "fps": float(clip.fps),
        "total_frames": int(clip.total_frames),
        "start": float(clip.start),
    }
    return {
        "type": "video",
        "kamera": {"frames": [_put_picture(frame, files) for frame in clip.frames], **numbers},
    }


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
    fields = item["kamera"]
    if item["type"] == "image":
        return {"type": "image", "image": Medium("image", _get_picture(fields["file"], media))}
    frames = tuple(load_image(_get_picture(name, media)) for name in fields["frames"])
    indices, seconds = tuple(fields["indices"]), tuple(fields["seconds"])
    rest = fields["fps"], fields["total_frames"], fields["start"]
    return {"type": "video", "video": Medium("video", Clip(frames, indices, seconds, *rest))}


def _get_picture(name: str, media: Path) -> bytes:
    if not _PICTURE.fullmatch(name):
        raise ValueError(f"{name!r} is no picture's digest")
    try:
        with Folder.at(media) as folder:
            data, _ = folder.read(name)
    except OSError as error:
        raise CorruptChunk(f"a picture of the session is missing: {error}") from None
    if f"{hashlib.sha256(data).hexdigest()}.png" != name:
        raise CorruptChunk(f"{str(media / name)!r} is damaged: its digest does not match")
    return data


# -- files -------------------------------------------------------------------------------------


def _check_order(path: Path, state: State, name: str | None, strict: bool) -> None:
    """Raise SessionConflict if the session saved there has gone on without ``state``.

    What is damaged or displaced is no session. Raises StoreVersionError for one of another format.
    """
    try:
        document = read_document(path, name=name)
    except (CorruptChunk, StoreError):
        return
    if not document.changes or document.changes[-1] in state.changes:
        return
    if strict or set(document.changes) & set(state.changes):
        raise SessionConflict(
            f"the session at {str(path)!r} was continued elsewhere: {document.turn} answers are there, "
            f"{state.turn} others here; load it again, or save this branch in another directory"
        )


def _clear(path: Path, window: str | None, media: set[str]) -> None:
    """Remove windows and pictures that the published session does not name; what is not ours stays."""
    for entry in filter(WINDOW_FOLDER.fullmatch, os.listdir(path)):
        if entry != window:
            shutil.rmtree(path / entry, ignore_errors=True)
    for name in filter(_PICTURE.fullmatch, os.listdir(path / MEDIA)):
        if name not in media:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path / MEDIA / name)
