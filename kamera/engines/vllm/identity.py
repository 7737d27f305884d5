"""Who an engine is: the fingerprint of the files and settings that it was started with."""

from __future__ import annotations

from typing import Any

from kamera.engines.checkpoint import checkpoint_fingerprint
from kamera.errors import UnsupportedBackbone


def fingerprint_of(config: Any) -> str:
    """The fingerprint of a ``VllmConfig``, equal to that of a `Backbone` of the same folder and dtype.

    Raises UnsupportedBackbone for a model that is no folder of safetensors, and for one with LoRA, whose
    adapters differ from request to request.
    """
    model = config.model_config
    if config.lora_config is not None:
        raise UnsupportedBackbone("LoRA: requests differ in their weights; merge the adapter into the model")
    if model.quantization is not None:
        raise UnsupportedBackbone(
            f"weights quantized by the engine ({model.quantization}): no files say that"
        )
    return checkpoint_fingerprint(
        model.model,
        dtype=str(model.dtype).removeprefix("torch."),
        overrides=model.hf_overrides if isinstance(model.hf_overrides, dict) else None,
        pixels=getattr(model.multimodal_config, "mm_processor_kwargs", None),
    )
