"""Pictures from files, bytes, arrays, PIL images and chat content items."""

from __future__ import annotations

import base64
import io
import os
import re
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from kamera.content.naming import file_of
from kamera.content.sizing import CELL, SIZES, resize, sizes_of
from kamera.errors import UnreadableMedia, first_line, quote

_SOURCES = {"image": ("image", "path", "url"), "video": ("video", "path", "url")}
_URL = re.compile(r"^(?:[a-z][a-z0-9+.-]*://|data:)", re.IGNORECASE)
# raised by Pillow for damaged files, in addition to OSError
_DAMAGE = (UnidentifiedImageError, OSError, ValueError, SyntaxError, EOFError, KeyError, struct.error)


def load_image(source: Any, cell: int = CELL) -> Image.Image:
    """An upright RGB picture from a PIL image, a path, a file's bytes, a uint8 array, or a chat item.

    A ``data:`` url in base64 counts as the bytes that it holds, an open file (`io.BytesIO`) as its content
    from the beginning. An array is ``[height, width]`` (gray) or ``[height, width, 1, 3 or 4]``. An EXIF
    orientation (phones write one) is applied. Gray of 16 bits keeps its range: 65535 becomes 255; floats are
    shares of white, 0 to 1. Alpha is dropped. A chat item may carry `SIZES`, in cells of
    ``cell`` pixels. Raises UnreadableMedia, naming the source.
    """
    if isinstance(source, Mapping):
        check_options(source, "image", SIZES)
        sizes = sizes_of(source, "image")
        image = load_image(next((source[k] for k in _SOURCES["image"] if source.get(k) is not None), None))
        return resize(image, sizes, "image", cell)
    if isinstance(source, Image.Image):
        return _open(source, "the picture")
    if isinstance(source, np.ndarray):
        return _of_array(source)
    if isinstance(source, bytes | bytearray | memoryview):
        return _open(io.BytesIO(source), f"{len(source)} bytes")
    if hasattr(source, "read"):
        return load_image(_content(source))
    if isinstance(source, str) and source[:5].lower() == "data:":
        return load_image(_data(source))
    if isinstance(source, str | os.PathLike):
        path = local_path(source, "image")
        return _open(path, quote(path))
    raise UnreadableMedia(f"{type(source).__name__} is not an image: give a PIL image, a path or an array")


def _data(url: str) -> bytes:
    """The bytes of a data url. Raises UnreadableMedia."""
    head, comma, body = url.partition(",")
    try:
        if not comma or not head.lower().endswith(";base64"):
            raise ValueError("it does not say base64")
        return base64.b64decode(body, validate=True)
    except ValueError as error:
        raise UnreadableMedia(f"{quote(url)} cannot be read as an image: {error}") from None


def _content(stream: Any) -> bytes:
    """All bytes of an open file, which is left at its place: a conversation reads it again each turn."""
    try:
        place = stream.tell()
        stream.seek(0)
        data = stream.read()
        stream.seek(place)
    except (OSError, ValueError, AttributeError) as error:
        raise UnreadableMedia(
            f"{type(stream).__name__} cannot be read again and again ({first_line(error)}): give its bytes"
        ) from None
    if not isinstance(data, bytes):
        raise UnreadableMedia(f"{type(stream).__name__} gives {type(data).__name__}: open it for bytes")
    return data


def _of_array(array: np.ndarray) -> Image.Image:
    gray = array[..., 0] if array.ndim == 3 and array.shape[-1] == 1 else array
    flat = gray.ndim == 2 or (gray.ndim == 3 and gray.shape[-1] in (3, 4))
    if not flat or array.dtype != np.uint8 or 0 in array.shape:
        raise UnreadableMedia(
            f"array of shape {array.shape}, {array.dtype} is not a picture: "
            "give uint8 [height, width], or [height, width, 1, 3 or 4]"
        )
    return Image.fromarray(gray).convert("RGB")


def local_path(source: str | os.PathLike[str], kind: str) -> Path:
    """The file of a path or a file:// url. Raises UnreadableMedia for any other url."""
    if isinstance(source, str) and _URL.match(source):
        if not source.lower().startswith("file://"):
            raise UnreadableMedia(
                f"{quote(source)} is a url: Kamera fetches nothing, give the {kind} as a file"
            )
        return file_of(source)
    return Path(source)


def check_options(item: Mapping[str, Any], kind: str, options: Sequence[str]) -> None:
    """Raise UnreadableMedia for an entry of a chat item that would have no effect."""
    unknown = [name for name in item if name not in ("type", *_SOURCES[kind], *options)]
    if unknown:
        raise UnreadableMedia(
            f"{kind} item with {', '.join(map(quote, unknown[:3]))}, which Kamera does not know: leave it "
            f"out; it takes {', '.join(options)}"
        )


def _open(file: Path | io.BytesIO | Image.Image, name: str) -> Image.Image:
    if isinstance(file, Path) and os.path.exists(file) and not os.path.isfile(file):  # a pipe would never end
        raise UnreadableMedia(f"{name} is no file: give one picture")
    try:
        if isinstance(file, Image.Image):
            return _upright(file, name)
        with Image.open(file) as image:
            return _upright(image, name)
    except FileNotFoundError:
        raise UnreadableMedia(f"no image at {name}: give an existing file") from None
    except UnreadableMedia:
        raise
    except (*_DAMAGE, Image.DecompressionBombError) as error:
        first = first_line(error)
        raise UnreadableMedia(f"{name} cannot be read as an image: {first}") from None


def _upright(image: Image.Image, name: str) -> Image.Image:
    if 0 in image.size:
        raise UnreadableMedia(f"{name} has {image.width} x {image.height} pixels: give one with pixels in it")
    return _eight_bits(ImageOps.exif_transpose(image), name).convert("RGB")


def _eight_bits(image: Image.Image, name: str) -> Image.Image:
    """Gray of more bits in 8; Pillow's own conversion cuts it off at 255. Other pictures as they are."""
    if image.mode != "F" and image.mode[:1] != "I":
        return image
    values = np.asarray(image)
    low, high = float(values.min()), float(values.max())
    if image.mode == "F":
        if not (low >= 0.0 and high <= 1.0):  # NaN included
            raise UnreadableMedia(
                f"{name} has floats from {low:g} to {high:g}, whose white is unknown: give 0 to 1, or 8 bits"
            )
        return Image.fromarray(np.rint(values * 255).astype(np.uint8))
    if not (low >= 0 and high <= 65535):
        raise UnreadableMedia(
            f"{name} has integers from {low:.0f} to {high:.0f}, whose white is unknown: "
            "give 0 to 65535, or 8 bits"
        )
    white = 255 if image.mode == "I" and high <= 255 else 65535
    return Image.fromarray(np.rint(values * (255 / white)).astype(np.uint8))
