"""The versions of vLLM whose connector interface is this one."""

from __future__ import annotations

import re

from kamera.errors import UnsupportedBackbone, quote

OLDEST, NEWEST = (0, 30), (0, 32)
"""Versions, both included; a patch release is as its minor one."""


def check_version(version: str) -> None:
    """Raise UnsupportedBackbone unless vLLM's ``version`` is one that the connector was written for."""
    parsed = re.match(r"(\d+)\.(\d+)", version)
    if parsed is None or not OLDEST <= (int(parsed[1]), int(parsed[2])) <= NEWEST:
        lowest, highest = (".".join(map(str, bound)) for bound in (OLDEST, NEWEST))
        raise UnsupportedBackbone(
            f"vLLM {quote(version)}: Kamera's connector knows {lowest} to {highest}; install one of these, "
            "or start vLLM without a kv_transfer_config"
        )
