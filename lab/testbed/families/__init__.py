"""The four attention families of the testbed, each through its real transformers classes.

| name | classes | what a layer caches |
|---|---|---|
| gqa | Qwen2.5-VL | K, V of 2 kv heads; blocked M-RoPE |
| deepstack | Qwen3-VL | K, V of 2 kv heads; interleaved M-RoPE; vision features added in layers 0, 1 |
| mla | Kimi-K2.5: MoonViT, DeepSeek-V3 | a latent of 96 and a rotary key of 32, shared by all heads |
| mha | LLaVA: Pixtral tower, Llama | K, V of 4 heads; 1-D RoPE |
"""

from __future__ import annotations

from . import deepstack, gqa, mha, mla
from .family import Family

FAMILIES: dict[str, Family] = {
    family.name: family for family in (gqa.FAMILY, deepstack.FAMILY, mla.FAMILY, mha.FAMILY)
}


def family(name: str) -> Family:
    """The family of this name; ValueError for another."""
    if name not in FAMILIES:
        raise ValueError(f"no testbed family {name!r}: there are {', '.join(FAMILIES)}")
    return FAMILIES[name]


__all__ = ["FAMILIES", "Family", "family"]
