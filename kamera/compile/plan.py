"""Plans: the windows to compile, one JSON object per line.

A line is ``{"system": "You watch a camera.", "chunks": [CONTENT, …]}``. CONTENT is text, a chat content
item or list (``{"image": "a.png"}``, ``{"video": "b.mp4", "fps": 1}``, ``{"text": "…"}``), or
``{"chunk_id": "…"}`` of a stored chunk. ``system`` is optional, as in `KameraWindow`. ``rank``, ``layers``
(numbers, or ``"a:b"``) and ``orbit`` (true, false) override the job's settings for this line. Relative paths
are relative to the plan; blank lines are skipped.

A plan is a trie: a node is a chunk behind its antecedents, and has one patch. It is named by its path: the
ids of its antecedents and its own. Sorted paths are a depth-first walk, so the trie is a mapping: each window
keeps its common prefix with the one before, and no order keeps more.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kamera.content import names_media
from kamera.errors import PlanError, quote
from kamera.files import user_path
from kamera.ops import layers_of

_BUDGET = ("min_pixels", "max_pixels", "resized_height", "resized_width")
_FIELDS: Mapping[str, tuple[str, ...]] = {
    "text": (),
    "image": _BUDGET,
    "video": ("fps", "nframes", "num_frames", "max_frames"),
}
_WAYS = 'give text, {"text": …}, {"image": path}, {"video": path}, {"chunk_id": id}, or a list of these items'


@dataclass(frozen=True)
class ByContent:
    """A chunk given by its content; ``key`` is equal for equal descriptions."""

    items: tuple[Mapping[str, Any], ...] = field(compare=False)
    key: str


@dataclass(frozen=True)
class ById:
    """A chunk given by its id in the store."""

    chunk_id: str


ChunkSource = ByContent | ById


@dataclass(frozen=True)
class PlannedWindow:
    """One line: the chunks of a window, in order, and its own settings (None: those of the job).

    ``where`` is ``file:line``.
    """

    where: str
    system: str | None
    chunks: tuple[ChunkSource, ...]
    rank: int | None = None
    layers: tuple[int, ...] | None = None
    orbit: bool | None = None


@dataclass(frozen=True)
class PlanFile:
    """A checked plan file."""

    path: Path
    windows: tuple[PlannedWindow, ...]


def read_plan(path: str | Path) -> PlanFile:
    """Read a plan and check, without a model, its format, its names and that every file exists.

    Raises PlanError naming every bad line, or the first alone of a file that is no plan, FileNotFoundError
    (or another OSError) for the plan itself.
    """
    path = user_path(path)
    windows: list[PlannedWindow] = []
    problems: list[str] = []
    is_first = True
    for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            windows.append(_window(where, line, path.parent))
        except ValueError as bad:
            problems.append(f"{where}: {bad}")
        if problems and is_first and not line.lstrip().startswith(b"{"):
            break  # it is no plan
        is_first = False
    if problems:
        raise PlanError(problems)
    if not windows:
        raise PlanError([f"{path}:1: the plan describes no window: give one JSON object per line"])
    return PlanFile(path, tuple(windows))


def _window(where: str, line: bytes, base: Path) -> PlannedWindow:
    try:
        value = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 ({error}): save the plan as UTF-8") from None
    except json.JSONDecodeError as error:
        raise ValueError(
            f"not JSON, {error.msg} at column {error.colno}: give one whole object a line"
        ) from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON ({error}): give one object a line") from None
    if not isinstance(value, dict):
        raise ValueError(f'{_short(value)} is not an object: give {{"system": …, "chunks": […]}}')
    _check_names(value, ("system", "chunks", "rank", "layers", "orbit"), "a window")
    system = value.get("system")
    if system is not None and not isinstance(system, str):
        raise ValueError(f"system {_short(system)} is not text: give a string, or leave it out")
    chunks = value.get("chunks")
    if not isinstance(chunks, list) or not chunks:
        raise ValueError(f"chunks is {_short(chunks)}: give a list of at least one chunk")
    sources = []
    for number, content in enumerate(chunks):
        try:
            sources.append(_source(content, base))
        except ValueError as bad:
            raise ValueError(f"chunks[{number}]: {bad}") from None
    return PlannedWindow(where, system, tuple(sources), *_wishes(value))


def _wishes(value: Mapping[str, Any]) -> tuple[int | None, tuple[int, ...] | None, bool | None]:
    rank, layers, orbit = value.get("rank"), value.get("layers"), value.get("orbit")
    if rank is not None and (type(rank) is not int or rank < 1):
        raise ValueError(f"rank is {_short(rank)}: give a whole number from 1 on")
    if orbit is not None and not isinstance(orbit, bool):
        raise ValueError(f"orbit is {_short(orbit)}: give true or false")
    if layers is not None and not isinstance(layers, list | str):
        raise ValueError(f'layers is {_short(layers)}: give a list of numbers, or "a:b"')
    return rank, layers_of(layers), orbit


def _source(content: Any, base: Path) -> ChunkSource:
    if isinstance(content, dict) and "chunk_id" in content:
        _check_names(content, ("chunk_id",), "a stored chunk")
        chunk_id = content["chunk_id"]
        if not isinstance(chunk_id, str) or not chunk_id:
            raise ValueError(
                f"chunk_id {_short(chunk_id)} is not an id: give a stored chunk's (kamera store ls)"
            )
        return ById(chunk_id)
    parts = content if isinstance(content, list) else [content]
    if not parts:
        raise ValueError(f"an empty list is not a chunk: {_WAYS}")
    items = tuple(_item(part, base) for part in parts)
    return ByContent(items, json.dumps(items, sort_keys=True))


def _item(part: Any, base: Path) -> dict[str, Any]:
    if isinstance(part, str):
        if names_media(part):
            raise ValueError(
                f'{quote(part)} names a picture or a video: give {{"image": path}} or {{"video": path}}, or '
                '{"text": …} if it is text'
            )
        part = {"text": part}
    if not isinstance(part, dict):
        raise ValueError(f"{_short(part)} is not content: {_WAYS}")
    if "chunk_id" in part:
        raise ValueError("chunk_id names a whole chunk: it cannot be one item of a list")
    kinds = [kind for kind in _FIELDS if kind in part]
    kind = part.get("type", kinds[0] if len(kinds) == 1 else None)
    if not isinstance(kind, str) or kinds != [kind]:
        raise ValueError(f"item with {sorted(part)} is not content: {_WAYS}")
    _check_names(part, ("type", kind, *_FIELDS[kind]), f"{kind} content")
    options = {name: part[name] for name in _FIELDS[kind] if part.get(name) is not None}
    for name, number in options.items():
        if isinstance(number, bool) or not isinstance(number, int | float) or number <= 0:
            raise ValueError(f"{name} is {_short(number)}: give a positive number")
    media = part[kind]
    if kind == "text":
        if not isinstance(media, str) or not media:
            raise ValueError(f"text {_short(media)} is empty or no text: give a string")
        return {"type": "text", "text": media}
    if kind == "video" and isinstance(media, list):
        if not media:
            raise ValueError("a video of no frames: give at least one picture")
        return {"type": kind, kind: [_file(frame, base, "image") for frame in media], **options}
    return {"type": kind, kind: _file(media, base, kind), **options}


def _file(name: Any, base: Path, kind: str) -> str:
    if not isinstance(name, str) or not name:
        raise ValueError(f"{kind} {_short(name)} is not a path: give the path of a file")
    path = base / name.removeprefix("file://")
    if not path.is_file():
        raise ValueError(f"no {kind} at {str(path)!r}: paths are relative to the plan's folder")
    return str(path.absolute())


def _check_names(keys: Mapping[str, Any], names: tuple[str, ...], what: str) -> None:
    unknown = [name for name in keys if name not in names]
    if unknown:
        raise ValueError(f"unknown key {unknown[0]!r} in {what}: it takes {', '.join(names)}")


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "…"


ChunkIds = tuple[str, ...]
"""Chunk ids of a window, in order."""


def prefixes(path: ChunkIds) -> list[ChunkIds]:
    """The nodes of a window: its first chunk, its first two, …"""
    return [path[:n] for n in range(1, len(path) + 1)]


def leaves(windows: Iterable[Sequence[str]]) -> list[ChunkIds]:
    """The windows that are not a prefix of another, in the order of the walk."""
    paths = sorted({tuple(window) for window in windows if window})
    return [p for p, q in zip(paths, [*paths[1:], ()], strict=False) if q[: len(p)] != p]
