"""vLLM on the small trained backbones: prompts, recipes and questions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kamera.engines.vllm.serving import FIELD
from lab.vllm.bed import (
    ENVIRONMENT,
    PICTURES,
    latents_directory,
    pictures_directory,
    scheduler_of,
    start,
    transfer,
)

if TYPE_CHECKING:
    from kamera.testbed.world import Question

__all__ = [
    "ENVIRONMENT",
    "PICTURES",
    "apart",
    "ask",
    "bound",
    "greedy",
    "latents_directory",
    "pictures_directory",
    "prompt",
    "scheduler_of",
    "start",
    "transfer",
]

IMAGE = 5  # the placeholder's token id in the testbed's vocabulary


def prompt(
    ids: Sequence[int], images: Sequence[Any] = (), names: Sequence[str] = (), tenant: str = ""
) -> dict[str, Any]:
    """A prompt of token ids, whose runs of placeholders become one token, which vLLM expands."""
    before = (None, *ids)
    given: dict[str, Any] = {
        "prompt_token_ids": [t for t, b in zip(ids, before, strict=False) if t != IMAGE or t != b]
    }
    if images:
        given["multi_modal_data"] = {"image": list(images)}
        given["multi_modal_uuids"] = {"image": list(names)}
    if tenant:
        given["cache_salt"] = tenant
    return given


def greedy(recipe: str | None = None, tokens: int = 4, stops: bool = True) -> Any:
    """Sampling parameters, with a recipe in JSON; without ``stops`` an answer has all its tokens."""
    from vllm import SamplingParams

    extra = None if recipe is None else {"kv_transfer_params": {FIELD: recipe}}
    return SamplingParams(
        temperature=0.0, max_tokens=tokens, logprobs=5, extra_args=extra, ignore_eos=not stops
    )


def ask(llm: Any, given: dict[str, Any], recipe: str | None = None, tokens: int = 4) -> Any:
    """The engine's output for one prompt."""
    (out,) = llm.generate([given], greedy(recipe, tokens), use_tqdm=False)
    return out


def apart(one: Any, other: Any) -> float:
    """The largest difference of log-probabilities that both outputs give, at any of their tokens."""
    return max(
        abs(value.logprob - theirs[token].logprob)
        for mine, theirs in zip(one.outputs[0].logprobs, other.outputs[0].logprobs, strict=True)
        for token, value in mine.items()
        if token in theirs
    )


def bound(episode: Any, order: Sequence[int] | None = None) -> list[Question]:
    """Questions whose answers other frames determine, for frames in ``order``."""
    order = range(len(episode.frames)) if order is None else order
    asked = []
    for kind, subject in episode.subjects(("value",)):
        try:
            question = episode.ask(kind, subject, order)
        except ValueError:
            continue
        asked += [question] if question.bound else []
    return asked
