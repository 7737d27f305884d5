"""The versions of vLLM that the connector has been run on."""

from __future__ import annotations

import re

from kamera.errors import UnsupportedBackbone, quote

KNOWN = ("0.30", "0.31", "0.32")
"""Minor versions. All tests run on the first one, and one file of them on the others."""


def check_version(version: str) -> None:
    """Raise UnsupportedBackbone unless vLLM's ``version`` is one that the connector was run on."""
    parsed = re.match(r"\d+\.\d+(?!\d)", version)
    if parsed is None or parsed[0] not in KNOWN:
        raise UnsupportedBackbone(
            f"vLLM {quote(version)}: Kamera's connector was run on {', '.join(KNOWN)} alone: install "
            "one of them, or start vLLM without a kv_transfer_config"
        )
