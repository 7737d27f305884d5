"""A chunk of a processor's own tensors is what the plain model makes of them, or is refused by name."""

from __future__ import annotations

import pytest
import torch

from kamera import Backbone, ChunkStore, KameraWindow
from kamera.errors import IncompatibleChunk, KameraError
from tests.engines.compare import relative
from tests.models import families
from tests.models.families import picture, plain_logits, said, whole_prompt
from tests.sessions.rig import EXACT

ASKED = 3
"""Tokens of a prompt that are asked, behind the others."""


def bare(family: str) -> tuple[Backbone, dict[str, torch.Tensor], torch.Tensor]:
    """A backbone without a processor, what that made of a message with a picture, and the model's logits."""
    engine = families.engine(family)
    made = whole_prompt(engine.processor, [said("user", "see ", picture(), "what?")])
    return Backbone(engine.model), made, plain_logits(engine.model, made)


def front(made: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The prompt but for the tokens that are asked."""
    length = made["input_ids"].shape[1]
    per_token = {name for name, value in made.items() if value.shape == (1, length)}
    return {name: value[:, :-ASKED] if name in per_token else value for name, value in made.items()}


def logits(backbone: Backbone, inputs: dict[str, torch.Tensor], question: torch.Tensor) -> torch.Tensor:
    """The window's, behind a chunk of ``inputs``."""
    nothing = torch.empty(0, dtype=torch.int64)
    window = KameraWindow(backbone, ChunkStore.open("memory://"), nothing, policy=EXACT)
    window.append(backbone.chunk_from_tensors(**inputs))
    return window.next_token_logits(question)


def pad(value: torch.Tensor, left: int, right: int) -> torch.Tensor:
    return torch.nn.functional.pad(value, (left, right))


@pytest.mark.few(1)
@pytest.mark.parametrize("pads", [(0, 0), (6, 0), (0, 5), (2, 3)], ids=str)
@pytest.mark.parametrize("family", families.families())
def test_pads_that_a_mask_hides_are_no_content(family, pads):
    backbone, made, want = bare(family)
    inputs = front(made)
    length = inputs["input_ids"].shape[1]
    padded = {n: pad(t, *pads) if t.shape == (1, length) else t for n, t in inputs.items()}
    assert padded["attention_mask"].sum() == length
    assert relative(logits(backbone, padded, made["input_ids"][0, -ASKED:]), want) <= 1e-4


@pytest.mark.few(2)
@pytest.mark.parametrize("family", families.families())
def test_token_types_are_read_off_the_ids_only_where_they_say_it(family):
    backbone, made, want = bare(family)
    inputs = {n: t for n, t in front(made).items() if not n.endswith("token_type_ids")}
    if "moe_mm_token_type_ids" in made:
        with pytest.raises(IncompatibleChunk, match="give those that the processor made"):
            backbone.chunk_from_tensors(**inputs)
        return
    assert relative(logits(backbone, inputs, made["input_ids"][0, -ASKED:]), want) <= 1e-4


def zeros(inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.zeros_like(inputs["input_ids"])


WRONG = {
    "labels": (lambda i: {"labels": i["input_ids"]}, "labels is no content of a chunk: nothing is trained"),
    "positions": (lambda i: {"position_ids": zeros(i)}, "position_ids is no content of a chunk"),
    "deltas": (lambda i: {"rope_deltas": torch.tensor([[5]])}, "takes no 'rope_deltas'"),
    "embeddings": (lambda i: {"inputs_embeds": torch.randn(1, 9, 64)}, "inputs_embeds is no content"),
    "a cache": (lambda i: {"past_key_values": torch.zeros(1)}, "past_key_values is no content of a chunk"),
    "no cache": (lambda i: {"use_cache": torch.tensor(False)}, "use_cache is no content of a chunk"),
    "few logits": (lambda i: {"logits_to_keep": torch.tensor(1)}, "logits_to_keep is no content of a chunk"),
    "features": (lambda i: {"mm_encoder_outputs": torch.zeros(1)}, "mm_encoder_outputs is no content"),
    "hidden states": (lambda i: {"output_hidden_states": True}, "takes no 'output_hidden_states'"),
    "two rows": (lambda i: {"input_ids": i["input_ids"].repeat(2, 1)}, "input_ids of shape (2, "),
    "no mask": (lambda i: {"attention_mask": zeros(i)}, "a chunk of no tokens"),
    "a mask of fewer": (lambda i: {"attention_mask": torch.ones(1, 4)}, "attention_mask of shape (4,) for"),
    "a mask of rows": (lambda i: {"attention_mask": torch.ones(2, 9)}, "attention_mask of shape (2, 9)"),
    "an additive mask": (lambda i: {"attention_mask": zeros(i) - 9.0}, "give a 1 or 0 for each"),
    "a mask with a hole": (
        lambda i: {"attention_mask": i["attention_mask"].index_fill(1, torch.tensor([2]), 0)},
        "attention_mask hides 1 tokens between others",
    ),
    "no tensor": (lambda i: {"pixel_values": "a.png"}, "pixel_values='a.png' is no tensor"),
    "zero types": (lambda i: {"mm_token_type_ids": zeros(i)}, "16 tokens of pictures are text"),
    "types of other tokens": (
        lambda i: {"mm_token_type_ids": i["mm_token_type_ids"].roll(-4)},
        "4 tokens of pictures are text",
    ),
    "more types": (lambda i: {"mm_token_type_ids": zeros(i) + 1}, "has no positions for"),
    "a larger grid": (
        lambda i: {"image_grid_thw": torch.tensor([[1, 8, 16]])},
        "for 64 rows of pixel",
    ),
    "a smaller grid": (
        lambda i: {"image_grid_thw": torch.tensor([[1, 4, 8]]), "pixel_values": i["pixel_values"][:32]},
        "has no positions for",
    ),
    "two grids": (lambda i: {"image_grid_thw": torch.tensor([[1, 4, 8]] * 2)}, "has no positions for"),
    "a flat grid": (lambda i: {"image_grid_thw": torch.tensor([1, 8, 8])}, "image_grid_thw=[1, 8, 8] for 64"),
    "pixels alone": (lambda i: {"image_grid_thw": None}, "pixel_values without image_grid_thw"),
    "types alone": (
        lambda i: {"image_grid_thw": None, "pixel_values": None},
        "says that tokens are pictures, and no pixels are given",
    ),
}


@pytest.mark.few(5)
@pytest.mark.parametrize("case", WRONG)
def test_what_is_no_content_is_refused_by_name_before_anything_runs(case):
    change, says = WRONG[case]
    backbone, made, _ = bare("qwen2_5_vl")
    inputs = front(made)
    with backbone.measure() as work, pytest.raises((KameraError, ValueError)) as caught:
        backbone.chunk_from_tensors(**{**inputs, **change(inputs)})
    assert says in str(caught.value) and "\n" not in str(caught.value) and len(str(caught.value)) < 400
    assert (work.forwards, work.vision_encodes) == (0, 0)
