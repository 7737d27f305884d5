"""A call leaves a model, its settings and the process as they were: the user's own use of it goes on."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from kamera import Backbone, ChunkStore, KameraWindow, ReusePolicy
from kamera.engines.hf import HfEngine
from kamera.errors import KameraError
from kamera.patches import background_of
from kamera.sessions import Stream
from tests.engines.compare import relative
from tests.models import families
from tests.models.families import picture, said, whole_prompt
from tests.sessions.rig import session

GREEDY = {"max_new_tokens": 3, "do_sample": False}
LOOK = [said("user", picture(64, 64, 1), "look")]
SPELT = [said("user", picture(64, 64, 1), "<|im_end|> look")]
"""A text that no window holds: it spells a special token."""


class Failing(Stream):
    """Fails at the first token."""

    def tell(self, text: str) -> None:
        raise OSError("nobody listens")


def _window(engine: HfEngine) -> None:
    window = KameraWindow(engine, ChunkStore.open("memory://"), "S", policy=ReusePolicy())
    first = window.append(picture(64, 64, 1)).slot
    window.append([picture(32, 64, 2), "text"])
    window.reorder([1, 0])
    window.generate("what?", **GREEDY)
    window.next_token_logits("what?")
    window.slide()
    window.recall(first.chunk_id)
    window.flush()


def _failing(engine: HfEngine, **options: Any) -> None:
    with contextlib.suppress(OSError):
        session(engine, **options).send(SPELT if options else LOOK, stream=Failing(), **GREEDY)


def _wrong(engine: HfEngine) -> None:
    """Pixels of another size than the tokens: refused by the model itself."""
    inputs = whole_prompt(engine.processor, LOOK)
    names = [n for n in inputs if n != "attention_mask"]
    per_token = [n for n in names if inputs[n].shape == inputs["input_ids"].shape]
    twice = {n: torch.cat([inputs[n]] * 2, -1) if n in per_token else inputs[n] for n in names}
    with contextlib.suppress(KameraError):
        KameraWindow(engine, ChunkStore.open("memory://"), "S").append(engine.chunk_from_tensors(**twice))


CALLS: dict[str, Callable[[HfEngine], Any]] = {
    "a session": lambda e: session(e).send(LOOK, **GREEDY),
    "a window": _window,
    "beams": lambda e: session(e).send(LOOK, num_beams=2, **GREEDY),
    "drafts of the prompt": lambda e: session(e).send(LOOK, prompt_lookup_num_tokens=2, **GREEDY),
    "drafts of itself": lambda e: session(e).send(LOOK, assistant_model=e.model, **GREEDY),
    "drawn with a seed": lambda e: session(e).send(LOOK, max_new_tokens=3, seed=4),
    "uncached": lambda e: session(e, uncached=True).send(SPELT, **GREEDY),
    "uncached beams": lambda e: session(e, uncached=True).send(SPELT, num_beams=2, **GREEDY),
    "uncached logits": lambda e: session(e, uncached=True).next_token_logits(SPELT),
    "a streamer that fails": _failing,
    "a streamer that fails, uncached": lambda e: _failing(e, uncached=True),
    "pixels that do not fit": _wrong,
    "a new backbone": lambda e: Backbone(e.model, e.processor).describe(),
}


def state_of(model: torch.nn.Module) -> dict[str, Any]:
    """What a user may have set, and what the model keeps."""
    spaces = [(name, vars(module)) for name, module in model.named_modules()]
    kept = {
        f"{name}.{key}": value.tolist() if isinstance(value, torch.Tensor) else value
        for name, space in spaces
        for key, value in space.items()
        if value is None or isinstance(value, bool | int | float | str | torch.Tensor)
    }
    return {
        **kept,
        "config": model.config.to_dict(),
        "generation_config": model.generation_config.to_dict(),
        "weights": [(n, t._version, t.requires_grad) for n, t in model.state_dict(keep_vars=True).items()],
        "dtype": torch.get_default_dtype(),
        "grad": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        "draws": torch.get_rng_state().tolist(),
        "numpy": str(np.random.get_state()),
        "random": random.getstate(),
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }


@pytest.fixture(scope="module", params=["qwen2_vl", "llava"])
def engine(request):
    return HfEngine(*families.build(request.param))


TRAINED = "a window", "uncached", "a streamer that fails, uncached"


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("call", "mode"), [*((call, "eval") for call in CALLS), *((call, "train") for call in TRAINED)]
)
def test_a_call_leaves_the_model_and_the_process_as_they_were(engine, call, mode):
    model = engine.model
    made = whole_prompt(engine.processor, [said("user", picture(), "what?")])
    question, cache = torch.tensor([[40, 41, 42]]), DynamicCache()
    with torch.no_grad():  # the user's own conversation, whose cache goes on below
        model(**made, past_key_values=cache)
        CALLS[call](engine)  # hooks and kernels of the first call
        model(**made, past_key_values=DynamicCache())
    getattr(model, mode)()
    try:
        before = state_of(model)
        CALLS[call](engine)
        background_of(engine).flush()
        after = state_of(model)
    finally:
        model.eval()
    assert {name for name in before if before[name] != after[name]} == set()
    with torch.no_grad():
        got = model(input_ids=question, past_key_values=cache).logits[0, -1]
        again = DynamicCache()
        model(**made, past_key_values=again)
        want = model(input_ids=question, past_key_values=again).logits[0, -1]
    assert relative(got, want) <= 1e-5
