"""What a KV depends on apart from tokens: one digest over weights, rotary, dtype and processor."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import nn

from kamera.ops import Layout


def weight_state(model: nn.Module) -> tuple[tuple[int, int], ...]:
    """Cheap witness of the weights: storage address and in-place version of every tensor.

    Changes when a parameter is replaced (adapter loaded, weights swapped) or written in place.
    """
    return tuple(
        (t.data_ptr(), 0 if t.is_inference() else t._version) for _, t in _named_tensors(model)
    )


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
    names = [name for name, _ in _named_tensors(model)]
    with ThreadPoolExecutor() as pool:  # hashlib releases the GIL
        digests = pool.map(_tensor_digest, (t for _, t in _named_tensors(model)))
        for name, digest in zip(names, digests, strict=True):
            _feed(outer, name.encode())
            _feed(outer, digest)
    _feed(outer, _json(processor_settings(processor)))
    return outer.hexdigest()


def processor_settings(processor: Any | None) -> Any:
    """Everything that decides what a processor makes of a picture or a text, JSON-able."""
    if processor is None:
        return None
    settings: dict[str, Any] = {"class": type(processor).__name__}
    for part in ("image_processor", "video_processor", "feature_extractor"):
        member = getattr(processor, part, None)
        if member is not None:
            settings[part] = {"class": type(member).__name__, **member.to_dict()}
    if hasattr(processor, "image_processor") is False and hasattr(processor, "to_dict"):
        settings["self"] = processor.to_dict()
    tokenizer = getattr(processor, "tokenizer", processor)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    settings["tokenizer"] = (
        backend.to_str() if backend is not None else sorted(tokenizer.get_vocab().items())
    )
    settings["chat_template"] = getattr(processor, "chat_template", None) or getattr(
        tokenizer, "chat_template", None
    )
    return settings


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _tensor_digest(tensor: torch.Tensor) -> bytes:
    plain = tensor.detach().cpu().contiguous()
    digest = hashlib.blake2b(digest_size=32)
    digest.update(f"{plain.dtype}{tuple(plain.shape)}".encode())
    digest.update(plain.flatten().view(torch.uint8).numpy().data)
    return digest.digest()


def _config(model: nn.Module) -> Any:
    config: Any = model.config
    settings = config.to_dict()
    # where the checkpoint lay and who wrote it decides nothing
    for name in ("_name_or_path", "transformers_version", "architectures"):
        settings.pop(name, None)
    return settings


def _json(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, default=str).encode()


def _feed(digest: Any, field: bytes) -> None:
    digest.update(len(field).to_bytes(8, "little"))
    digest.update(field)
