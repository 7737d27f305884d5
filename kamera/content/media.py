"""Pictures from files, bytes, arrays, PIL images and chat content items."""

from __future__ import annotations

import base64
import io
import re
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from kamera.content.sizing import CELL, SIZES, Sizing
from kamera.errors import UnreadableMedia

_SOURCES = {"image": ("image", "path", "url"), "video": ("video", "path", "url")}
_URL = re.compile(r"^(?:[a-z][a-z0-9+.-]*://|data:)", re.IGNORECASE)
# raised by Pillow for damaged files, in addition to OSError
_DAMAGE = (UnidentifiedImageError, OSError, ValueError, SyntaxError, EOFError, KeyError, struct.error)


def load_image(source: Any, cell: int = CELL) -> Image.Image:
    """An upright RGB picture from a PIL image, a path, a file's bytes, a uint8 array, or a chat item.

    A ``data:`` url in base64 counts as the bytes that it holds. An array is ``[height, width, 3]``. An EXIF
    orientation (phones write one) is applied. A chat item may carry the sizes of `Sizing`, in cells of
    ``cell`` pixels. Raises UnreadableMedia, naming the source.
    """
    if isinstance(source, Mapping):
        check_options(source, "image", SIZES)
        sizing = Sizing.of(source, "image")
        image = load_image(next((source[k] for k in _SOURCES["image"] if source.get(k) is not None), None))
        return image if sizing is None else sizing.apply(image, cell)
    if isinstance(source, Image.Image):
        return _upright(source, "the picture")
    if isinstance(source, np.ndarray):
        if source.ndim != 3 or source.shape[-1] != 3 or source.dtype != np.uint8 or 0 in source.shape:
            raise UnreadableMedia(
                f"array of shape {source.shape}, {source.dtype} is not a picture: "
                "give uint8 [height, width, 3]"
            )
        return Image.fromarray(source)
    if isinstance(source, bytes):
        return _opened(io.BytesIO(source), f"{len(source)} bytes")
    if isinstance(source, str) and source[:5].lower() == "data:":
        return load_image(_data(source))
    if isinstance(source, str | Path):
        path = local_path(source, "image")
        return _opened(path, repr(str(path)))
    raise UnreadableMedia(f"{type(source).__name__} is not an image: give a PIL image, a path or an array")


def _data(url: str) -> bytes:
    """The bytes of a data url. Raises UnreadableMedia."""
    head, comma, body = url.partition(",")
    try:
        if not comma or not head.lower().endswith(";base64"):
            raise ValueError("it does not say base64")
        return base64.b64decode(body, validate=True)
    except ValueError as error:
        raise UnreadableMedia(f"{url[:40]!r} cannot be read as an image: {error}") from None


def local_path(source: str | Path, kind: str) -> Path:
    """The file of a path or a file:// url. Raises UnreadableMedia for any other url."""
    text = str(source)
    if not isinstance(source, Path) and _URL.match(text) and not text.startswith("file://"):
        raise UnreadableMedia(f"{text[:80]!r} is a url: Kamera fetches nothing, give the {kind} as a file")
    return Path(text.removeprefix("file://"))


def check_options(item: Mapping[str, Any], kind: str, options: Sequence[str]) -> None:
    """Raise UnreadableMedia for an entry of a chat item that would have no effect."""
    unknown = [name for name in item if name not in ("type", *_SOURCES[kind], *options)]
    if unknown:
        raise UnreadableMedia(
            f"{kind} item with {', '.join(map(repr, unknown))}, which Kamera does not know: leave it out; it "
            f"takes {', '.join(options)}"
        )


def _opened(file: Path | io.BytesIO, name: str) -> Image.Image:
    try:
        with Image.open(file) as image:
            return _upright(image, name)
    except FileNotFoundError:
        raise UnreadableMedia(f"no image at {name}: give an existing file") from None
    except UnreadableMedia:
        raise
    except (*_DAMAGE, Image.DecompressionBombError) as error:
        first = (str(error) or type(error).__name__).splitlines()[0]
        raise UnreadableMedia(f"{name} cannot be read as an image: {first}") from None


def _upright(image: Image.Image, name: str) -> Image.Image:
    if 0 in image.size:
        raise UnreadableMedia(f"{name} has {image.width} x {image.height} pixels: give one with pixels in it")
    try:
        return ImageOps.exif_transpose(image).convert("RGB")
    except _DAMAGE as error:
        first = (str(error) or type(error).__name__).splitlines()[0]
        raise UnreadableMedia(f"{name} cannot be read as an image: {first}") from None
