"""Strings that name a picture or a video: a path, a file url or a data url, alone in its string.

A file that Pillow reads is what it holds: one with several frames in time (GIF, WebP, APNG) is a video.
"""

from __future__ import annotations

import base64
import io
import os
import re
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import urlsplit
from urllib.request import url2pathname

from PIL import Image

from kamera.errors import UnreadableMedia, quote

# fmt: off
PICTURE_SUFFIXES = {
    ".apng", ".bmp", ".dib", ".gif", ".heic", ".heif", ".ico", ".jfif", ".jp2", ".jpe", ".jpeg", ".jpg",
    ".jxl", ".avif", ".pbm", ".pgm", ".png", ".pnm", ".ppm", ".svg", ".tga", ".tif", ".tiff", ".webp",
}
# fmt: on
VIDEO_SUFFIXES = {".mp4", ".mkv", ".mov", ".avi", ".webm", ".m4v", ".mpg", ".mpeg", ".3gp", ".ogv", ".wmv"}
OTHER_VIDEO_SUFFIXES = {".ts", ".mts", ".m2ts", ".flv", ".vob"}
"""Of a path's object alone: a word with one of them may name a program's text."""

MOVING = ("GIF", "PNG", "WEBP", "AVIF")
"""Formats of Pillow whose frames follow one another in time; the pages of others are pictures."""

_LONGEST = 4096  # characters of a path
_WEB = re.compile(r"https?://\S+", re.IGNORECASE)
_URL = re.compile(r"[a-z][a-z0-9+.-]*://\S+", re.IGNORECASE)
_DATA = re.compile(r"data:(image|video)/[\w.+-]+[;,]", re.IGNORECASE)
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")  # a line end, say
_ROOTED = re.compile(r"~?/|\.{1,2}[/\\]|[a-z]:[/\\]", re.IGNORECASE)
_AS_TEXT = 'or {"type": "text", "text": …} if it is text'


def find_media(text: str) -> dict[str, Any] | None:
    """The chat item of the picture or video that ``text`` names, None if it is text.

    It names one if it is a data url of one, or the path (also as file url) of an existing file that by its
    suffix, or as Pillow reads it, is one. Raises UnreadableMedia for text that looks like such a path and
    has no file, unless it is a whole line, and for a url of the web: Kamera fetches nothing.
    """
    name = text.strip()
    if data := _DATA.match(name):
        kind = data.group(1).lower()
        kind = kind_inside(io.BytesIO(read_data_url(name))) if kind == "image" else kind
        return {"type": kind, kind: name}
    if not name or len(name) > _LONGEST or _CONTROL.search(name):
        return None
    if name.lower().startswith("file://"):
        path, is_certain = file_of(name), True
    elif _URL.fullmatch(name):
        if _WEB.match(name) or _kind(urlsplit(name).path):
            raise UnreadableMedia(
                f"{quote(name)} is a url: Kamera fetches nothing, give the picture as a file, {_AS_TEXT}"
            )
        return None
    else:
        path = Path(os.path.expanduser(name))
        is_alone = not re.search(r"\s", name) or bool(_ROOTED.match(name))
        is_certain = bool(_kind(name)) and is_alone and not text.endswith("\n")  # a line may speak of a file
    kind = _kind(path.name)
    if os.path.isfile(path):
        # a bare word is no path
        kind = kind_of_file(path) if kind or is_certain else _ROOTED.match(str(path)) and _readable(path)
        return {"type": kind, kind: path} if kind else None
    if is_certain:
        raise UnreadableMedia(f"no {kind or 'image'} at {quote(path)}: give an existing file, {_AS_TEXT}")
    return None


def names_media(text: str) -> bool:
    """True if ``text`` names a picture or a video, or looks as if it did."""
    try:
        return find_media(text) is not None
    except UnreadableMedia:
        return True


def file_of(url: str) -> Path:
    """The path that a file url names."""
    return Path(url2pathname(url[len("file://") :].removeprefix("localhost")))


def read_data_url(url: str, kind: str = "image") -> bytes:
    """The bytes of a data url in base64. Raises UnreadableMedia."""
    head, comma, body = url.partition(",")
    try:
        if not comma or not head.lower().endswith(";base64"):
            raise ValueError("it does not say base64")
        return base64.b64decode(body, validate=True)
    except ValueError as error:
        article = "an image" if kind == "image" else "a video"
        raise UnreadableMedia(f"{quote(url)} cannot be read as {article}: {error}") from None


def kind_of_file(path: Path) -> str:
    """ "image" or "video": what a file is by its suffix, and inside where pictures may move."""
    suffix = path.suffix.lower()
    if suffix in VIDEO_SUFFIXES | OTHER_VIDEO_SUFFIXES:
        return "video"
    return kind_inside(path) if os.path.isfile(path) else "image"


def kind_inside(file: Path | BinaryIO) -> str:
    """ "video" if Pillow reads several frames in time, else "image"."""
    return "video" if moves(file) else "image"


def moves(file: Path | BinaryIO) -> bool:
    """True if Pillow reads several frames in time."""
    Image.init()
    try:
        with Image.open(file, formats=[name for name in MOVING if name in Image.OPEN]) as image:
            return bool(getattr(image, "is_animated", False))
    except Exception:  # whatever Pillow raises for other files
        return False


def _kind(name: str) -> str:
    """The kind of media that a name's suffix says, "" for another."""
    suffix = os.path.splitext(name)[1].lower()
    return "image" if suffix in PICTURE_SUFFIXES else "video" if suffix in VIDEO_SUFFIXES else ""


def _readable(path: Path) -> str:
    """What a file without a known suffix holds, if Pillow reads it, else ""."""
    try:
        with Image.open(path):
            return kind_inside(path)
    except Exception:  # whatever Pillow raises for other files
        return ""
