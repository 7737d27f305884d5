"""Pictures from files, bytes, arrays, tensors, PIL images and chat content items, and strings that name one.

A name is a path, a file url or a data url, alone in its string. A file that Pillow reads is what it holds:
one with several frames in time (GIF, WebP, APNG) is a video.
"""

from __future__ import annotations

import base64
import io
import math
import os
import re
import stat
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import urlsplit
from urllib.request import url2pathname

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError

from kamera import forks
from kamera.content.limits import CELL, DEFAULT_LIMITS, SIZES, Budget, MediaLimits, size_of, sizes_of
from kamera.errors import UnreadableMedia, first_line, quote
from kamera.forks import lazy
from kamera.ops import digest

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
_NAMED_URL = re.compile(r"[a-z][a-z0-9+.-]*://\S+", re.IGNORECASE)
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
    elif _NAMED_URL.fullmatch(name):
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


# -- reading ---------------------------------------------------------------------------------------


SOURCES = {"image": ("image", "path", "url"), "video": ("video", "path", "url")}
"""The entries of a chat item that name its picture or clip, the first that is there."""

_URL = re.compile(r"^(?:[a-z][a-z0-9+.-]*://|data:)", re.IGNORECASE)
DAMAGE = (UnidentifiedImageError, OSError, ValueError, SyntaxError, EOFError, KeyError, struct.error)
"""Raised by Pillow for damaged files."""

_STRIP = 1 << 22  # pixels that are converted at a time where a picture becomes smaller


@dataclass(frozen=True, eq=False, repr=False)
class Medium:
    """A picture or clip that only a conversation holds: bytes of a file, or pixels (a picture, a `Clip`).

    Nothing may write to what is ``held``. Two that hold the same are equal.
    """

    kind: str
    held: Any
    name: str = ""
    """What errors call it, a path say."""

    @lazy
    def digest(self) -> str:
        """A digest of what is held: equal pixels in two files have two."""
        if isinstance(self.held, bytes):
            return digest("kamera.media.v1", self.kind, self.held)
        return pixels_digest(self.held)

    @property
    def nbytes(self) -> int:
        """Bytes of memory that it takes."""
        if isinstance(self.held, bytes):
            return len(self.held)
        return sum(4 * frame.width * frame.height for frame in getattr(self.held, "frames", [self.held]))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Medium) and (self is other or self.digest == other.digest)

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        return f"Medium({self.kind}, {self.nbytes} bytes)"


def pixels_digest(pixels: Any) -> str:
    """A digest of a picture's pixels, or of a clip's and their times."""
    if isinstance(pixels, Image.Image):
        return digest("kamera.picture.v1", f"{pixels.size}", pixels.tobytes())
    times = f"{pixels.fps},{pixels.total_frames},{pixels.places}"
    frames = (part for f in pixels.frames for part in (f"{f.size}", f.tobytes()))
    return digest("kamera.clip.v2", times, *frames)


def load_image(
    source: Any, cell: int = CELL, *, limits: MediaLimits = DEFAULT_LIMITS, budget: Budget | None = None
) -> Image.Image:
    """An upright RGB picture of a PIL image, a path, a file's bytes, a uint8 array or tensor, or a chat item.

    It shares no memory with its source. A ``data:`` url in base64 counts as the bytes that it holds, an open
    file (`io.BytesIO`) as its content from the beginning. An array is ``[height, width]`` (gray) or
    ``[height, width, 1, 3 or 4]``, a tensor may have its channels first. An EXIF orientation (phones write
    one) is applied. Gray of 16 bits keeps its range: 65535 becomes 255; floats are shares of white, 0 to 1.
    Alpha is dropped. A chat item may carry `SIZES`, in cells of ``cell`` pixels. A picture of more than
    ``limits.decoded`` pixels is made smaller: to a processor's ``budget``, else to so many. Raises
    UnreadableMedia, naming the source.
    """
    sizes: Mapping[str, int] = {}
    if isinstance(source, Mapping):
        check_options(source, "image", SIZES)
        sizes, source = sizes_of(source, "image"), source_of(source, "image")
    name = ""
    if isinstance(source, Medium):
        source, name = source.held, source.name
    if isinstance(source, str) and source[:5].lower() == "data:":
        source = read_data_url(source)
    if isinstance(source, bytes | bytearray | memoryview) or hasattr(source, "read"):
        data = bytes_of(source, limits)
        return _open(io.BytesIO(data), name or f"{len(data)} bytes", sizes, cell, limits, budget)
    if isinstance(source, np.ndarray | torch.Tensor):
        source = _of_array(source)
    if isinstance(source, Image.Image):
        return _open(source, "the picture", sizes, cell, limits, budget)
    if isinstance(source, str | os.PathLike):
        path = local_path(source, "image")
        return _open(path, quote(path), sizes, cell, limits, budget)
    raise UnreadableMedia(f"{type(source).__name__} is not an image: give a PIL image, a path or an array")


def source_of(item: Mapping[str, Any], kind: str) -> Any:
    """The picture or clip of a chat item."""
    return next((item[name] for name in SOURCES[kind] if item.get(name) is not None), None)


def stored_size(source: Any) -> tuple[int, int] | None:
    """Width and height of a picture as its file has them, not decoded; None if not told."""
    source = source.held if isinstance(source, Medium) else source
    if isinstance(source, Image.Image):
        return source.size
    if isinstance(source, str) and source[:5].lower() == "data:":
        source = read_data_url(source)
    try:
        with Image.open(io.BytesIO(source)) as image:
            return image.size
    except (*DAMAGE, TypeError, Image.DecompressionBombError):
        return None  # what reads it says why


def bytes_of(source: Any, limits: MediaLimits = DEFAULT_LIMITS) -> bytes:
    """All bytes of a bytes-like object, or of an open file, whose place stays. Raises UnreadableMedia."""
    if isinstance(source, bytes | bytearray | memoryview):
        limits.check_file(memoryview(source).nbytes, f"{type(source).__name__}")
        return bytes(source)
    try:
        place = source.tell()
        source.seek(0)
        data = source.read(limits.file + 1)
        source.seek(place)
    except (OSError, ValueError, AttributeError) as error:
        raise UnreadableMedia(
            f"{type(source).__name__} cannot be read from its beginning ({first_line(error)}): give its bytes"
        ) from None
    if not isinstance(data, bytes):
        raise UnreadableMedia(f"{type(source).__name__} gives {type(data).__name__}: open it for bytes")
    limits.check_file(len(data), type(source).__name__)
    return data


def read_file(path: Path, kind: str, limits: MediaLimits = DEFAULT_LIMITS) -> bytes:
    """The bytes of a picture's or video's file. Raises UnreadableMedia."""
    article = "image" if kind == "image" else "video"
    try:
        with open(path, "rb", opener=_open_at_once) as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise UnreadableMedia(f"{quote(path)} is no file: give one {article}")
            limits.check_file(found.st_size, quote(path))
            return file.read()
    except FileNotFoundError:
        raise UnreadableMedia(f"no {article} at {quote(path)}: give an existing file") from None
    except (OSError, ValueError) as error:
        raise UnreadableMedia(f"{quote(path)} cannot be read: {first_line(error)}") from None


def _open_at_once(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))  # a pipe would wait for its writer


def _of_array(source: np.ndarray | torch.Tensor) -> Image.Image:
    array = source.detach().cpu().numpy() if isinstance(source, torch.Tensor) else source
    if isinstance(source, torch.Tensor) and array.ndim == 3 and array.shape[0] in (1, 3, 4):
        array = array.transpose(1, 2, 0)  # as torch has pictures
    gray = array[..., 0] if array.ndim == 3 and array.shape[-1] == 1 else array
    flat = gray.ndim == 2 or (gray.ndim == 3 and gray.shape[-1] in (3, 4))
    if not flat or array.dtype != np.uint8 or 0 in array.shape:
        raise UnreadableMedia(
            f"array of shape {tuple(source.shape)}, {source.dtype} is not a picture: "
            "give uint8 [height, width], or [height, width, 1, 3 or 4]"
        )
    return Image.fromarray(np.ascontiguousarray(gray))


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
    unknown = [name for name in item if name not in ("type", *SOURCES[kind], *options)]
    if unknown:
        raise UnreadableMedia(
            f"{kind} item with {', '.join(map(quote, unknown[:3]))}, which Kamera does not know: leave it "
            f"out; it takes {', '.join(options)}"
        )


# -- decoding --------------------------------------------------------------------------------------


def _open(
    file: Path | io.BytesIO | Image.Image,
    name: str,
    sizes: Mapping[str, int],
    cell: int,
    limits: MediaLimits,
    budget: Budget | None,
) -> Image.Image:
    if isinstance(file, Path) and os.path.exists(file) and not os.path.isfile(file):  # a pipe would never end
        raise UnreadableMedia(f"{name} is no file: give one picture")
    try:
        if isinstance(file, Image.Image):
            return _decode(file, name, sizes, cell, limits, budget, drafts=False)
        with Image.open(file) as image:
            return _decode(image, name, sizes, cell, limits, budget, drafts=True)
    except FileNotFoundError:
        raise UnreadableMedia(f"no image at {name}: give an existing file") from None
    except UnreadableMedia:
        raise
    except (*DAMAGE, Image.DecompressionBombError) as error:
        first = first_line(error)
        raise UnreadableMedia(f"{name} cannot be read as an image: {first}") from None


def _decode(
    image: Image.Image,
    name: str,
    sizes: Mapping[str, int],
    cell: int,
    limits: MediaLimits,
    budget: Budget | None,
    *,
    drafts: bool,
) -> Image.Image:
    """An upright RGB picture in the size that its item asks for.

    ``drafts``: its decoder may be told to decode less, which changes ``image``.
    """
    limits.check_picture(image.size, name)
    width, height = image.size
    if width * height <= limits.decoded:
        upright = _eight_bits(ImageOps.exif_transpose(image), name).convert("RGB")
        size = size_of(upright.size, sizes, "image", cell)
        return upright if size in (None, upright.size) else upright.resize(size)

    def used() -> tuple[int, int] | None:
        turned = image.getexif().get(_ORIENTATION) in _SIDEWAYS
        shape = (height, width) if turned else (width, height)
        size = size_of(shape, sizes, "image", cell) or (budget and budget.fit(*shape))
        return size[::-1] if size and turned else size

    with _one_at_a_time:
        if drafts:
            size = used() or _within(width, height, limits.decoded)
            image.draft("RGB", (2 * size[0], 2 * size[1]))
        image.load()
        return ImageOps.exif_transpose(_smaller(_eight_bits(image, name), used(), limits.decoded))


_ORIENTATION, _SIDEWAYS = 0x0112, (5, 6, 7, 8)  # of EXIF
_one_at_a_time = forks.Lock()  # large pictures in many threads would be large together


def _within(width: int, height: int, most: int) -> tuple[int, int]:
    """The sides divided by the whole number that makes the area at most ``most`` pixels, 1 or more."""
    factor = math.ceil(math.sqrt(width * height / most))
    return -(-width // factor), -(-height // factor)


def _smaller(image: Image.Image, size: tuple[int, int] | None, most: int) -> Image.Image:
    """A large picture in RGB and a small ``size``: averaged to twice that, strip by strip, and then resized.

    Without a size it is averaged to at most ``most`` pixels. It keeps an EXIF orientation.
    """
    if size is None:
        factor = math.ceil(math.sqrt(image.width * image.height / most))
    else:
        factor = max(1, min(image.width // size[0], image.height // size[1]) // 2)
    rows = max(1, _STRIP // (image.width * factor)) * factor
    small = Image.new("RGB", (-(-image.width // factor), -(-image.height // factor)))
    for top in range(0, image.height, rows):  # all of it in three channels would be large
        strip = image.crop((0, top, image.width, min(image.height, top + rows))).convert("RGB")
        small.paste(strip.reduce(factor), (0, top // factor))
    small = small if size is None else small.resize(size)
    small.info |= {entry: image.info[entry] for entry in _TURNS if entry in image.info}
    return small


_TURNS = ("exif", "xmp", "XML:com.adobe.xmp")  # where Pillow finds an orientation


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
        white = 1.0
    elif not (low >= 0 and high <= 65535):
        raise UnreadableMedia(
            f"{name} has integers from {low:.0f} to {high:.0f}, whose white is unknown: "
            "give 0 to 65535, or 8 bits"
        )
    else:
        white = 255.0 if image.mode == "I" and high <= 255 else 65535.0
    out = np.empty(values.shape, np.uint8)
    rows = max(1, _STRIP // image.width)
    for top in range(0, image.height, rows):
        out[top : top + rows] = np.rint(values[top : top + rows] * (255 / white))
    return Image.fromarray(out)
