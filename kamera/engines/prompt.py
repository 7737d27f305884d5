"""A prompt for an engine that schedules by itself, and what comes back: values, whatever carries them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from PIL import Image

from kamera.engines.recipe import Recipe
from kamera.engines.work import Spent
from kamera.errors import EngineFailed


@dataclass(frozen=True, eq=False)
class PromptPicture:
    """A picture of a prompt: the id by which the engine knows it, and its pixels (None: it has them)."""

    name: str
    image: Image.Image | None


@dataclass(frozen=True)
class EngineSampling:
    """How an engine draws an answer's tokens, and the strings that end it; by default the likeliest.

    ``structured_outputs``, what an answer has to be, are vLLM's own.
    """

    temperature: float = 0.0
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    structured_outputs: Mapping[str, Any] | None = None

    def options(self) -> dict[str, Any]:
        """What is said, by the names that vLLM and OpenAI's API give it."""
        return {name: value for name, value in vars(self).items() if value not in (None, ())}


@dataclass(frozen=True, eq=False)
class EnginePrompt:
    """Token ``ids``, placeholders expanded, and the same as chat ``messages``, for engines that take those.

    What no messages render to has none: it is text alone, and taken as token ids.
    ``recipe`` says which of it is stored. A ``later`` prompt is one that no answer waits for. ``tools`` are
    those that the chat template is given with the messages.
    """

    ids: tuple[int, ...]
    messages: tuple[Mapping[str, Any], ...]
    pictures: tuple[PromptPicture, ...]
    recipe: Recipe
    max_new_tokens: int
    later: bool = False
    tools: Sequence[Any] = ()
    sampling: EngineSampling = field(default_factory=EngineSampling)


@dataclass(frozen=True)
class EngineCompletion:
    """An answer: its text and tokens, and how many tokens of the prompt were not computed for it.

    Of an answer in pieces each has its own tokens, and the last one those of the prompt.
    """

    text: str
    token_ids: tuple[int, ...]
    prompt_tokens: int
    cached_tokens: int

    @property
    def cost(self) -> Spent:
        """What the engine ran for it: a forward a token, seconds not counted."""
        new_tokens, answer_tokens = self.prompt_tokens - self.cached_tokens, len(self.token_ids)
        return Spent(max(answer_tokens, int(new_tokens > 0)), new_tokens + max(0, answer_tokens - 1))


class Completes(Protocol):
    """An engine that answers prompts: in this process, or over HTTP."""

    def stream(self, prompt: EnginePrompt) -> Iterator[EngineCompletion]:
        """The pieces of an answer as they come: one, from an engine that does not stream.

        Closing the iterator ends the answer.
        """


def join_pieces(pieces: Iterable[EngineCompletion]) -> EngineCompletion:
    """An answer in one piece. Raises EngineFailed for one of no pieces."""
    parts = list(pieces)
    if not parts:
        raise EngineFailed("the engine ended an answer before it began: look at its log, and ask again")
    text, ids = "".join(piece.text for piece in parts), tuple(i for piece in parts for i in piece.token_ids)
    prompt, hits = (max(getattr(p, name) for p in parts) for name in ("prompt_tokens", "cached_tokens"))
    return EngineCompletion(text, ids, prompt, hits)
