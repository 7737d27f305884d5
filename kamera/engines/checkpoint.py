"""The fingerprint of a model by its files: what every engine that was started on them can compute.

No model class is asked: safetensors are read under their names on disk, before any engine fuses or splits
them, and settings as they are written. So it is equal in transformers and in an engine of its own kernels,
and it differs with a byte of a tensor, an adapter, a factor of YaRN, the dtype of computation or KV.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
from collections.abc import Container, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from kamera.errors import UnsupportedBackbone, first_line, quote
from kamera.ops import digest

_PIXELS = ("preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json")
"""The files of a folder that decide what a picture's pixels become."""

_ORIGIN = frozenset(
    {
        "_name_or_path",
        "_commit_hash",
        "_processor_class",
        "_attn_implementation_autoset",
        "architectures",
        "dtype",  # it is given, as the engine computes
        "torch_dtype",
        "processor_class",
        "transformers_version",
        "use_cache",
    }
)
"""Settings of where files come from; engines write them over without computing otherwise."""

_SETTLED = 2_000_000_000  # ns: a file that changed less ago may change again within one tick of its clock


class _Stamp(NamedTuple):
    """What changes with every write to a file; nobody but the system sets ``changed_ns``."""

    device: int
    inode: int
    size: int
    modified_ns: int
    changed_ns: int


_digests: dict[_Stamp, tuple[tuple[str, str], ...]] = {}
_lock = threading.Lock()


def checkpoint_fingerprint(
    path: str | os.PathLike[str],
    *,
    dtype: str,
    kv_dtype: str | None = None,
    adapters: Sequence[str | os.PathLike[str]] = (),
    overrides: Mapping[str, Any] | None = None,
    pixels: Mapping[str, Any] | None = None,
) -> str:
    """BLAKE2b-256 of all that decides a chunk's KV, by the model folder ``path`` alone.

    It binds every tensor of the folder's safetensors by name, dtype, shape and bytes (however they are spread
    over files), config.json, and the settings of the processor's pixels. ``dtype`` is that of the computation
    ("bfloat16"), ``kv_dtype`` that of the KV if it is another. ``adapters`` are folders of adapters that act.
    ``overrides`` are settings in the place of config.json's, ``pixels`` of the processor's, as an engine was
    started with them: none of them can stand for another. Each file is hashed once in a process, and again
    once it has changed. Raises UnsupportedBackbone for a folder without config.json or safetensors, or with
    broken ones.
    """
    folder = Path(path)
    config = _merge(_settings(folder / "config.json"), overrides or {})
    processors = [_settings(folder / name) if (folder / name).is_file() else None for name in _PIXELS]
    digests = sorted(_adapter(Path(adapter)) for adapter in adapters)
    kv = _dtype(dtype if kv_dtype in (None, "auto") else str(kv_dtype))
    facts = [drop_settings(config), drop_settings(processors), dict(pixels or {}), digests, _dtype(dtype), kv]
    return digest("kamera.checkpoint.v1", _weights(folder), json.dumps(facts, sort_keys=True))


def files_of(path: str | os.PathLike[str]) -> tuple[tuple[str, _Stamp], ...]:
    """The files that `checkpoint_fingerprint` reads in a folder, and what shows that they changed."""
    folder = Path(path)
    names = [n for n in ("config.json", "adapter_config.json", *_PIXELS) if (folder / n).is_file()]
    files = [*(folder / name for name in names), *sorted(folder.glob("*.safetensors"))]
    return tuple((file.name, _stamp(os.stat(file))) for file in files)


def _adapter(folder: Path) -> str:
    settings = drop_settings(_settings(folder / "adapter_config.json"))
    settings.pop("base_model_name_or_path", None)
    return digest("kamera.adapter.v1", _weights(folder), json.dumps(settings, sort_keys=True))


def _weights(folder: Path) -> str:
    """Digest of all tensors of a folder, and of the adapter that it may be itself."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise UnsupportedBackbone(
            f"no safetensors in {quote(folder)}: a fingerprint of files needs them; save the model so"
        )
    own = folder / "adapter_config.json"
    settings = json.dumps(drop_settings(_settings(own)), sort_keys=True) if own.is_file() else ""
    tensors = sorted(pair for file in files for pair in _tensors(file))
    return digest("kamera.weights.v1", settings, *(text for pair in tensors for text in pair))


def _tensors(file: Path) -> tuple[tuple[str, str], ...]:
    """Name and digest of each tensor of a file. Each state of a file is hashed once."""
    stamp = _stamp(os.stat(file))
    with _lock:
        digests = _digests.get(stamp)
    if digests is not None:
        return digests
    try:
        with safe_open(file, "pt") as handle, ThreadPoolExecutor() as pool:  # hashlib releases the GIL
            names = list(handle.keys())
            digests = tuple(zip(names, pool.map(partial(_hash, handle), names), strict=True))
    except (SafetensorError, ValueError, TypeError, AttributeError) as error:
        raise UnsupportedBackbone(f"{quote(file)} is no safetensors file: {first_line(error)}") from None
    if _stamp(os.stat(file)) != stamp:
        raise UnsupportedBackbone(f"{quote(file)} changed while it was read: compute its fingerprint again")
    if time.time_ns() - stamp.changed_ns > _SETTLED:
        with _lock:
            _digests[stamp] = digests
    return digests


def _hash(handle: Any, name: str) -> str:
    tensor = handle.get_slice(name)
    hasher = hashlib.sha256(json.dumps([tensor.get_dtype(), tensor.get_shape()]).encode())
    hasher.update(handle.get_tensor(name).reshape(-1).view(torch.uint8).numpy())
    return hasher.hexdigest()


def _settings(file: Path) -> dict[str, Any]:
    try:
        settings = json.loads(file.read_bytes())
        if not isinstance(settings, dict):
            raise ValueError("no object")
    except (OSError, ValueError, RecursionError) as error:
        raise UnsupportedBackbone(f"{quote(file)} cannot be read: {type(error).__name__}") from None
    return settings


def drop_settings(settings: Any, names: Container[str] = _ORIGIN) -> Any:
    """Settings without those of these ``names``, at any depth; tuples are lists."""
    if isinstance(settings, list | tuple):
        return [drop_settings(value, names) for value in settings]
    if isinstance(settings, dict):
        return {name: drop_settings(value, names) for name, value in settings.items() if name not in names}
    return settings


def _merge(settings: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """``settings`` with those of ``overrides`` in their place; objects are merged, as engines do."""
    out = dict(settings)
    for name, value in overrides.items():
        old = out.get(name)
        out[name] = _merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return out


def _dtype(name: str) -> str:
    short_name = str(name).removeprefix("torch.")
    if not short_name:
        raise ValueError("a dtype is needed: give that of the computation, such as bfloat16")
    return short_name


def _stamp(status: os.stat_result) -> _Stamp:
    return _Stamp(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
