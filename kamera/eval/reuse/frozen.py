"""A frozen benchmark: a folder with one file of items and traces, its digest inside, and their pictures.

``benchmark.json`` holds the items; ``media/`` the pictures as PNG, each named by the SHA-256 of its pixels,
so that equal sources give equal digests under any version of zlib. The digest in the file is that of
everything else in it: a changed item, trace or picture is refused.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from PIL import Image

from kamera.content import load_image
from kamera.errors import TaskDataError
from kamera.eval.reuse.item import Item
from kamera.eval.tasks.sample import Part, Picture, parse_record
from kamera.eval.tasks.set_files import read_json

FORMAT, VERSION = "kamera-reuse-benchmark", 3
FILE, MEDIA = "benchmark.json", "media"


@dataclass(frozen=True)
class Benchmark:
    """Items, the system prompt they are asked under, their origin (source, seed), and the digest of all."""

    items: tuple[Item, ...]
    system: str | None
    origin: Mapping[str, Any]
    digest: str
    folder: Path


def freeze(
    items: Iterable[Item], folder: Path, *, system: str | None, origin: Mapping[str, Any]
) -> Benchmark:
    """Write a benchmark. Raises TaskDataError for no items, and for a folder that holds one already."""
    if (folder / FILE).exists():
        raise TaskDataError(f"{folder / FILE}: a benchmark is frozen here already: give another folder")
    (folder / MEDIA).mkdir(parents=True, exist_ok=True)
    kept = []
    for item in items:
        item.check()
        parts = tuple(_write(part, folder) for part in item.sample.parts)
        others = tuple(_write(part, folder) for part in item.sample.others)
        kept.append(replace(item, sample=replace(item.sample, parts=parts, others=others, where="")))
    if not kept:
        raise TaskDataError("no item shows four visual units: nothing to freeze")
    body = {
        "format": FORMAT,
        "version": VERSION,
        "system": system,
        "origin": dict(origin),
        "items": [asdict(item) for item in kept],
    }
    text = json.dumps(body | {"digest": _digest(body)}, indent=1, ensure_ascii=False)
    (folder / FILE).write_text(text + "\n", encoding="utf-8")
    return load(folder)


def load(folder: Path) -> Benchmark:
    """Read a frozen benchmark. Raises TaskDataError if it is none, damaged, or changed since."""
    path = folder / FILE
    if not path.exists():
        raise TaskDataError(f"{path}: no benchmark here: kamera eval freeze writes one")
    body = read_json(path, dict, "freeze it again")
    if body.get("format") != FORMAT:
        raise TaskDataError(f"{path}: not a {FORMAT}")
    if body.get("version") != VERSION:
        raise TaskDataError(f"{path}: version {body.get('version')!r}, this Kamera reads {VERSION}")
    digest = body.pop("digest", None)
    if digest != _digest(body):
        raise TaskDataError(f"{path}: changed after it was frozen (digest {digest}): freeze it again")
    for item in body["items"]:
        for part in (*item["sample"]["parts"], *item["sample"]["others"]):
            if "source" in part:
                part["source"] = str(folder / MEDIA / part["source"])
    items = tuple(parse_record(item, Item) for item in body["items"])
    for item in items:
        item.check()
    return Benchmark(items, body["system"], body["origin"], digest, folder)


def check_picture(part: Part) -> None:
    """Raise TaskDataError for a picture of a frozen benchmark that is missing or was changed."""
    if isinstance(part, Picture):
        path = Path(part.source)
        if not path.is_file():
            raise TaskDataError(f"{path}: no such picture: freeze the benchmark again")
        if _name(load_image(path)) != path.name:
            raise TaskDataError(f"{path}: the picture was changed after the benchmark was frozen")


def _digest(body: Mapping[str, Any]) -> str:
    canonical = json.dumps(body, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(canonical.encode("utf-8")).hexdigest()


def _name(picture: Image.Image) -> str:
    pixels = f"{picture.width}x{picture.height}:".encode() + picture.tobytes()
    return hashlib.sha256(pixels).hexdigest() + ".png"


def _write(part: Part, folder: Path) -> Part:
    """The unit with its picture in ``media/``, by the digest of its pixels."""
    if not isinstance(part, Picture):
        return part
    picture = load_image(part.source)
    name = _name(picture)
    if not (folder / MEDIA / name).exists():
        picture.save(folder / MEDIA / name)
    return replace(part, source=name)
