"""Who an engine is: the fingerprints of the files and settings that its requests are computed with."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

from kamera.engines.checkpoint import checkpoint_fingerprint, files_of
from kamera.errors import IncompatibleChunk, UnsupportedBackbone, quote

KNOWN = ("0.30", "0.31", "0.32")
"""Minor versions of vLLM that the connector has been run on: all tests on the first one, one file of them on
the others."""


class EngineIdentity:
    """The fingerprints of an engine's requests: of its model alone, and of it under an adapter.

    Each is equal to `checkpoint_fingerprint` of the same folders and dtype. Raises UnsupportedBackbone for a
    model that is no folder of safetensors, for weights that the engine quantizes, and for adapters that act
    on pictures or in another dtype.
    """

    def __init__(self, config: Any) -> None:
        model, lora = config.model_config, config.lora_config
        if model.quantization is not None:
            raise UnsupportedBackbone(
                f"weights quantized by the engine ({model.quantization}): no files say that"
            )
        if lora is not None and (lora.enable_tower_connector_lora or lora.lora_dtype != model.dtype):
            raise UnsupportedBackbone(
                "LoRA on pictures, or in another dtype than the model's: no files say that; start vLLM "
                "without enable_tower_connector_lora and lora_dtype"
            )
        self._folder, self._start_ns = model.model, time.time_ns()
        self._settings: dict[str, Any] = {
            "dtype": str(model.dtype).removeprefix("torch."),
            "overrides": model.hf_overrides if isinstance(model.hf_overrides, dict) else None,
            "pixels": getattr(model.multimodal_config, "mm_processor_kwargs", None),
        }
        self.model = checkpoint_fingerprint(self._folder, **self._settings)
        self._adapter_fingerprints: dict[str, str] = {}

    def of(self, request: Any) -> str:
        """The fingerprint of what computes a request.

        Raises IncompatibleChunk for an adapter whose files are not at hand, or changed since the engine
        started: what it has loaded may be another.
        """
        adapter = request.lora_request
        if adapter is None:
            return self.model
        folder = Path(adapter.lora_path)
        files = files_of(folder) if folder.is_dir() else ()
        if not files or max(stamp.changed_ns for _, stamp in files) >= self._start_ns:
            raise IncompatibleChunk(
                f"adapter {quote(adapter.lora_name)} is no folder that is as it was when vLLM started: its "
                "requests are computed; start vLLM again"
            )
        if adapter.lora_path not in self._adapter_fingerprints:
            self._adapter_fingerprints[adapter.lora_path] = checkpoint_fingerprint(
                self._folder, adapters=[folder], **self._settings
            )
        return self._adapter_fingerprints[adapter.lora_path]


def check_version(version: str) -> None:
    """Raise UnsupportedBackbone unless vLLM's ``version`` is one that the connector was run on."""
    release = re.match(r"\d+\.\d+(?!\d)", version)
    if release is None or release[0] not in KNOWN:
        raise UnsupportedBackbone(
            f"vLLM {quote(version)}: Kamera's connector was run on {', '.join(KNOWN)} alone: install "
            "one of them, or start vLLM without a kv_transfer_config"
        )
