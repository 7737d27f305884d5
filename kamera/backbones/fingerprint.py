"""What a KV depends on apart from tokens: one digest over weights, rotary, dtype and processor."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import nn

from kamera.backbones.witness import adapter_state
from kamera.ops import Layout
from kamera.ops.digest import tensor_digest


def fingerprint(model: nn.Module, processor: Any | None, layout: Layout, limit: Any) -> str:
    """BLAKE2b-256 over everything but the tokens that decides a chunk's KV.

    Binds: class, config, every parameter and buffer (adapters are parameters), dtype, the rotary facts
    in ``layout``, attention implementation's mask semantics (sliding windows, from the config), and
    the processor's settings. Reading the weights costs one pass over their bytes.
    """
    outer = hashlib.blake2b(digest_size=32, person=b"kamera-backbone")
    _feed(outer, type(model).__name__.encode())
    _feed(outer, _json(_config(model)))
    _feed(outer, repr(layout).encode())
    _feed(outer, repr(limit).encode())
    _feed(outer, repr(adapter_state(model)).encode())
    names = [name for name, _ in _named_tensors(model)]
    with ThreadPoolExecutor() as pool:  # hashlib releases the GIL
        digests = pool.map(tensor_digest, (t for _, t in _named_tensors(model)))
        for name, digest in zip(names, digests, strict=True):
            _feed(outer, name.encode())
            _feed(outer, digest.encode())
    _feed(outer, _json(processor_settings(processor)))
    return outer.hexdigest()


def processor_settings(processor: Any | None) -> Any:
    """Everything that decides what a processor makes of a picture or a text, JSON-able."""
    if processor is None:
        return None
    settings = processor_state(processor)
    tokenizer = getattr(processor, "tokenizer", processor)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    settings["tokenizer"] = backend.to_str() if backend is not None else sorted(tokenizer.get_vocab().items())
    return settings


def processor_state(processor: Any | None) -> dict[str, Any]:
    """All of `processor_settings` but the vocabulary: cheap enough to look at every time."""
    if processor is None:
        return {}
    settings: dict[str, Any] = {"class": type(processor).__name__}
    for part in ("image_processor", "video_processor", "feature_extractor"):
        member = getattr(processor, part, None)
        if member is not None:
            settings[part] = {"class": type(member).__name__, **member.to_dict()}
    if hasattr(processor, "image_processor") is False and hasattr(processor, "to_dict"):
        settings["self"] = processor.to_dict()
    tokenizer = getattr(processor, "tokenizer", processor)
    settings["vocabulary"] = len(tokenizer)
    settings["chat_template"] = getattr(processor, "chat_template", None) or getattr(
        tokenizer, "chat_template", None
    )
    return settings


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    for name, buffer in model.named_buffers(remove_duplicate=False):
        # bound by the layout, which was probed from them; longrope rewrites its own at every forward
        if not name.endswith("inv_freq"):
            yield name, buffer


def _config(model: nn.Module) -> Any:
    config: Any = model.config
    return _without_origin(config.to_dict())


def _without_origin(settings: Any) -> Any:
    # where the checkpoint lay and who wrote it decides nothing; the tensors' own dtype is bound apart
    if not isinstance(settings, dict):
        return settings
    origin = ("_name_or_path", "transformers_version", "architectures", "dtype", "torch_dtype")
    return {k: _without_origin(v) for k, v in settings.items() if k not in origin}


def settings_state(processor: Any | None) -> bytes:
    """Cheap witness of the processor's settings."""
    return _json(processor_state(processor))


def _json(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, default=str).encode()


def _feed(digest: Any, field: bytes) -> None:
    digest.update(len(field).to_bytes(8, "little"))
    digest.update(field)
