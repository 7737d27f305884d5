"""One digest of all a KV depends on apart from its tokens: weights, computation, dtype and processor."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import nn

from kamera.content import exclusive_of
from kamera.engines.hf.computation import binds_buffer, chooses_frequencies, frequencies, layers_path
from kamera.engines.hf.state import tensor_content
from kamera.ops import Layout, digest

Two = tuple[str, str]
"""Of the whole model, and of the model without the decoder's layers."""


def tensors_digests(model: nn.Module, decoder: nn.Module) -> Two:
    """Digests of all parameters and buffers, by name and content; adapters are parameters."""
    whole, vision = (hashlib.blake2b(digest_size=32, person=b"kamera-tensors") for _ in range(2))
    names = [name for name, _ in _named_tensors(model)]
    layers = layers_path(model, decoder)
    with ThreadPoolExecutor() as pool:  # hashlib releases the GIL
        digests = pool.map(tensor_content, (t for _, t in _named_tensors(model)))
        for name, one in zip(names, digests, strict=True):
            for outer in (whole,) if name.startswith(layers) else (whole, vision):
                _feed(outer, name.encode())
                _feed(outer, one.encode())
    return whole.hexdigest(), vision.hexdigest()


def fingerprints(
    model: nn.Module,
    decoder: nn.Module,
    layout: Layout,
    limit: Any,
    tensors: Two,
    settings: Two,
    processor: str,
) -> Two:
    """BLAKE2b-256 over all but the tokens that decides a chunk's KV, and of all that decides its encoding.

    The first binds: class, every parameter and buffer with its dtype (``tensors``), the settings of every
    module and config, adapters among them, forwards and foreign hooks (``settings``), the rotary facts in
    ``layout`` and ``limit``, and the ``processor``'s settings. The second leaves out the decoder's layers,
    which no encoding depends on.
    """
    layers, pairs, kind = layers_path(model, decoder), list(model.named_modules()), type(model).__name__
    whole = [module for _, module in pairs]
    vision = [module for name, module in pairs if not f"{name}.".startswith(layers)]
    heads = [("kamera.backbone.v4", kind, repr(layout), repr(limit)), ("kamera.vision.v3", kind)]
    one, other = (
        digest(*head, repr(_chosen(modules)), *digests, processor)
        for head, modules, *digests in zip(heads, (whole, vision), tensors, settings, strict=True)
    )
    return one, other


def _chosen(modules: list[nn.Module]) -> list[list[str]]:
    return [frequencies(m) for m in modules if chooses_frequencies(m)]


def vocabulary_digest(processor: Any | None) -> str:
    """Digest of every token and its id; "" without a tokenizer."""
    tokenizer = getattr(processor, "tokenizer", processor)
    if tokenizer is None:
        return ""
    with exclusive_of(tokenizer):
        words = (f"{index} {token}" for token, index in sorted(tokenizer.get_vocab().items()))
        return digest("kamera.vocabulary.v1", *words)


def processor_digest(processor: Any | None) -> str:
    """Digest of all that decides a processor's output for a picture or a text."""
    tokenizer: Any = getattr(processor, "tokenizer", processor)
    with exclusive_of(tokenizer):
        settings = processor_settings(processor)
        if settings:
            backend = getattr(tokenizer, "backend_tokenizer", None)
            # the last call's padding and truncation are no settings
            settings["tokenizer"] = (
                sorted(tokenizer.get_vocab().items())
                if backend is None
                else json.loads(backend.to_str()) | {"padding": None, "truncation": None}
            )
        return digest("kamera.processor.v1", _json(settings or None))


def settings_state(processor: Any | None) -> bytes:
    """Cheap witness of the processor's settings."""
    return _json(processor_settings(processor))


def processor_settings(processor: Any | None) -> dict[str, Any]:
    """A processor's settings but the vocabulary, JSON-able: cheap enough to look at every time."""
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
    for path, module in model.named_modules(remove_duplicate=False):
        for name, buffer in module._buffers.items():
            if buffer is not None and binds_buffer(module, name):
                yield f"{path}.{name}", buffer


def _json(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, default=str).encode()


def _feed(digest: Any, field: bytes) -> None:
    digest.update(len(field).to_bytes(8, "little"))
    digest.update(field)
