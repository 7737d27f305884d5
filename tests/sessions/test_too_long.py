"""A prompt of more positions than the model was made for is WindowFull; one whose positions fit is served."""

from __future__ import annotations

import inspect

import pytest
import torch

from kamera import Backbone, ChunkStore, KameraWindow
from kamera.engines.hf import HfEngine
from kamera.errors import WindowFull
from tests.engines.compare import relative
from tests.models import families
from tests.models.families import picture, plain_logits, said, whole_prompt
from tests.sessions.rig import EXACT, session

UNLIKE = picture(32, 32, 0), picture(48, 24, 1)
HISTORY = [
    said("user", "see ", UNLIKE[0], " x"),
    said("assistant", "ok"),
    said("user", "see ", UNLIKE[1], "what? " * 3),
]


def limited(family: str, tokens: int) -> HfEngine:
    """The family's model with a limit of its own."""
    model, processor = families.build(family)
    model.config.get_text_config().max_position_embeddings = tokens
    return HfEngine(model, processor)


def positions_of(engine: HfEngine, made: dict[str, torch.Tensor]) -> int:
    """Positions of a whole prompt, as the model counts them itself."""
    owner = next((m for m in (engine.model.model, engine.model) if hasattr(m, "get_rope_index")), None)
    if owner is None:
        return made["input_ids"].shape[1]
    names = inspect.signature(owner.get_rope_index).parameters
    places, _ = owner.get_rope_index(**{n: t for n, t in made.items() if n in names})
    return int(places.max()) + 1


@pytest.mark.few(1)
@pytest.mark.parametrize("family", families.families())
def test_a_prompt_is_served_up_to_the_models_last_position_and_refused_by_name_behind_it(family):
    engine = families.engine(family)
    made = whole_prompt(engine.processor, HISTORY)
    count = positions_of(engine, made)
    full = limited(family, count - 1)
    says = f"has {count} positions, this model {count - 1}"
    with full.measure() as work, pytest.raises(WindowFull, match=says):
        session(full).next_token_logits(HISTORY)
    assert (work.forwards, work.vision_encodes) == (0, 0)
    fits = limited(family, count)
    got = session(fits).next_token_logits(HISTORY)
    assert relative(got, plain_logits(fits.model, whole_prompt(fits.processor, HISTORY))) <= 1e-4
    assert count < made["input_ids"].shape[1] or fits.axes == 1


@pytest.mark.few(1)
@pytest.mark.parametrize("family", families.families())
def test_a_window_longer_than_that_is_what_the_plain_model_makes_of_it(family):
    engine = limited(family, 40)
    made = whole_prompt(engine.processor, HISTORY)
    bare = Backbone(engine.model)
    window = KameraWindow(bare, ChunkStore.open("memory://"), None, max_tokens=1000, policy=EXACT)
    length = made["input_ids"].shape[1]
    cut = {n: t[:, :-3] if t.shape == (1, length) else t for n, t in made.items()}
    window.append(bare.chunk_from_tensors(**cut))
    got = window.next_token_logits(made["input_ids"][0, -3:])
    assert relative(got, plain_logits(engine.model, made)) <= 1e-4
    assert length > 40
