"""The versions of vLLM that the connector has been run on."""

from __future__ import annotations

import re

from kamera.errors import UnsupportedBackbone, quote

KNOWN = ("0.30", "0.31", "0.32")
"""Minor versions; a patch release is as its minor one. The first runs all tests, the others one file."""


def check_version(version: str) -> None:
    """Raise UnsupportedBackbone unless vLLM's ``version`` is one that the connector was run on."""
    parsed = re.match(r"\d+\.\d+(?!\d)", version)
    if parsed is None or parsed[0] not in KNOWN:
        raise UnsupportedBackbone(
            f"vLLM {quote(version)}: Kamera's connector was run on {', '.join(KNOWN)} alone; install it, "
            "or start vLLM without a kv_transfer_config"
        )
