"""Chat templates by their habits with texts and items, for the tokens of Qwen2.5-VL."""

from __future__ import annotations
