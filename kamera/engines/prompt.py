"""A prompt for an engine that schedules by itself, and what comes back: values, whatever carries them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from PIL import Image

from kamera.engines.recipe import Recipe


@dataclass(frozen=True, eq=False)
class PromptPicture:
    """A picture of a prompt: the id by which the engine knows it, and its pixels (None: it has them)."""

    name: str
    image: Image.Image | None


@dataclass(frozen=True, eq=False)
class EnginePrompt:
    """Token ``ids``, placeholders expanded, and the same as chat ``messages``, for engines that take those.

    ``recipe`` says which of it is stored. A ``later`` prompt is one that no answer waits for.
    """

    ids: tuple[int, ...]
    messages: tuple[Mapping[str, Any], ...]
    pictures: tuple[PromptPicture, ...]
    recipe: Recipe
    max_new_tokens: int
    later: bool = False


@dataclass(frozen=True)
class EngineCompletion:
    """An answer: its text and tokens, and how many tokens of the prompt were not computed for it."""

    text: str
    token_ids: tuple[int, ...]
    prompt_tokens: int
    cached_tokens: int


class Completes(Protocol):
    """An engine that answers prompts: in this process, or over HTTP."""

    def complete(self, prompt: EnginePrompt) -> EngineCompletion:
        """Answer a prompt, greedily."""
        ...
