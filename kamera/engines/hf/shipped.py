"""The model that ships with the package, by its name ``testbed``: unpacked into the user's cache folder."""

from __future__ import annotations

import functools
import hashlib
import lzma
from pathlib import Path

from kamera.engines.hf.screen_reader import SCREEN_READER, screen_reader_source
from kamera.engines.hf.smollm2 import SMOLLM2, smollm2_source
from kamera.files import cache_dir, publish_file

SHIPPED = "testbed"
"""The name of the model that ships with Kamera. A folder of that name is ``./testbed``."""

_PACKED = Path(__file__).parents[2] / "testbed" / "weights" / "gqa"
_WEIGHTS, _SIZE = "model.safetensors", 5_581_776


def source_of(name: str | Path) -> str | Path:
    """What transformers loads for a model's ``name``: its folder for one of our names, else ``name``.

    Of a path ``~`` is the user's home. Raises as `smollm2_source` and `screen_reader_source`.
    """
    if name == SMOLLM2:
        return smollm2_source()
    if name == SCREEN_READER:
        return screen_reader_source()
    if name == SHIPPED:
        return weights_dir()
    return Path(name).expanduser() if str(name).startswith("~") else name


@functools.cache
def weights_dir() -> Path:
    """The model directory in Hugging Face's format, unpacked into your cache folder at first use (5.6 MB).

    Raises OSError where it cannot be unpacked.
    """
    files = sorted(path for path in _PACKED.iterdir() if path.is_file())
    contents = {path.name: path.read_bytes() for path in files}
    name = hashlib.sha256(b"".join(hashlib.sha256(data).digest() for data in contents.values())).hexdigest()
    folder = cache_dir() / "testbed" / name[:16] / _PACKED.name
    archive = contents.pop(f"{_WEIGHTS}.xz")
    sizes = {file: len(data) for file, data in contents.items()} | {_WEIGHTS: _SIZE}
    if not all(_has(folder / file, size) for file, size in sizes.items()):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for file, data in (contents | {_WEIGHTS: lzma.decompress(archive)}).items():
                with publish_file(folder / file, mode=0o644) as into:
                    into.write(data)
        except OSError as error:
            raise OSError(
                f"the package's model cannot be unpacked into {folder} ({error.strerror}): make room there, "
                "or set XDG_CACHE_HOME"
            ) from None
    return folder


def _has(file: Path, size: int) -> bool:
    return file.is_file() and file.stat().st_size == size
