"""A model that is changed after its Backbone was made: noticed for next to nothing, and refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from kamera import Backbone, ChunkStore, KameraWindow, ReusePolicy
from kamera.engines.hf import HfEngine
from kamera.errors import IncompatibleChunk, ModelChanged
from kamera.window import Slide
from tests.engines.compare import relative
from tests.models import samples, tiny
from tests.window.rig import QUESTION, Prefilled, make

FAMILY = "qwen2_5_vl"
EXACT = ReusePolicy.exact()
REFUSED = r"have changed since its fingerprint was made: undo that, or call backbone.refresh\(\)"


def chunks(backbone: HfEngine) -> list[Any]:
    return [samples.chunk(backbone, samples.sample(FAMILY, seed), f"p{seed}") for seed in (1, 2)]


def error(backbone: HfEngine, window: KameraWindow) -> float:
    """How far the window's logits are from a prefill by the model as it is now."""
    with torch.no_grad():
        return relative(window.next_token_logits(QUESTION), Prefilled(backbone, chunks(backbone)).logits)


def _layer(model: Any, index: int = 1) -> Any:
    return model.model.language_model.layers[index]


# -- changes ---------------------------------------------------------------------------------------


def written(model: Any) -> None:
    with torch.no_grad():
        _layer(model).mlp.up_proj.weight[0, 0] += 1


def loaded_anew(model: Any) -> None:
    model.load_state_dict(tiny.build(FAMILY, seed=1).state_dict())


def replaced(model: Any) -> None:
    _layer(model).mlp.up_proj.weight = nn.Parameter(_layer(model).mlp.up_proj.weight.detach() * 2)


def other_storage(model: Any) -> None:
    _layer(model).mlp.up_proj.weight.data = _layer(model).mlp.up_proj.weight.detach() * 2


def another_dtype(model: Any) -> None:
    _layer(model).mlp.up_proj.to(torch.bfloat16).to(torch.float32)


def a_fused_step(model: Any) -> None:
    step = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    model(input_ids=QUESTION[None], labels=QUESTION[None]).loss.backward()
    step.step()  # no counter of writes moves
    step.zero_grad(set_to_none=True)


def through_data(model: Any) -> None:
    for parameter in model.parameters():
        parameter.data.mul_(1.01)


def parameter_added(model: Any) -> None:
    _layer(model).mlp.register_parameter("lora_A", nn.Parameter(torch.zeros(2)))


def buffer_added(model: Any) -> None:
    _layer(model).mlp.act_fn.register_buffer("scale", torch.ones(1))


def module_replaced(model: Any) -> None:
    _layer(model).mlp.act_fn = nn.GELU()


CHANGES = [
    written,
    loaded_anew,
    replaced,
    other_storage,
    another_dtype,
    a_fused_step,
    through_data,
    parameter_added,
    buffer_added,
    module_replaced,
]


@pytest.mark.few(1)
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_changed_model_is_refused_until_it_is_refreshed(change: Callable[[Any], None]):
    backbone = Backbone(tiny.build(FAMILY))
    engine, store = backbone.engine, ChunkStore.open("memory://")
    before, (one, two) = backbone.fingerprint, chunks(engine)
    window = make(engine, store, one, two, policy=EXACT)
    slots = window.slots
    assert error(engine, window) < 1e-4
    change(backbone.model)
    uses = {
        "a question": lambda: window.next_token_logits(QUESTION),
        "a slide": lambda: window.slide(1),
        "a plan": lambda: window.plan(Slide()),
        "a new window": lambda: make(engine, store),
        "its fingerprint": lambda: backbone.fingerprint,
    }
    for name, use in uses.items():
        with pytest.raises(ModelChanged, match=REFUSED):
            use()
            pytest.fail(f"{name} was served")
    assert window.slots == slots
    assert backbone.refresh() != before
    with pytest.raises(IncompatibleChunk, match="make a new window"):
        window.slide(1)
    assert window.slots == slots
    new = make(engine, store, *chunks(engine), policy=EXACT)  # it recalls nothing of the old model's
    assert error(engine, new) < 1e-4


def test_switching_merging_and_disabling_an_adapter_is_noticed():
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    wrapped = peft.get_peft_model(tiny.build(FAMILY), config, adapter_name="one")
    wrapped.add_adapter("two", config)
    backbone = Backbone(wrapped)  # the wrapper itself is stepped out of
    window = make(backbone.engine, None, *chunks(backbone.engine), policy=EXACT)
    layer = _layer(backbone.model).self_attn.q_proj

    def scale(by: float) -> None:
        layer.scaling["one"] *= by

    def add() -> None:
        wrapped.add_adapter("three", config)

    with wrapped.disable_adapter(), pytest.raises(ModelChanged, match=REFUSED):
        window.slide(1)
    for change, undo in (
        (lambda: wrapped.set_adapter("two"), lambda: wrapped.set_adapter("one")),
        (wrapped.merge_adapter, wrapped.unmerge_adapter),  # PEFT writes through tensor.data
        (lambda: scale(2.0), lambda: scale(0.5)),
    ):
        change()
        with pytest.raises(ModelChanged, match=REFUSED):
            window.next_token_logits(QUESTION)
        undo()
        window.next_token_logits(QUESTION)
    add()
    with pytest.raises(ModelChanged, match=REFUSED):
        window.slide(1)
    wrapped.set_adapter("two")
    seen = {backbone.refresh()}
    wrapped.set_adapter("three")
    seen.add(backbone.refresh())
    assert len(seen) == 2


# -- rotary frequencies ----------------------------------------------------------------------------


# -- autocast --------------------------------------------------------------------------------------


# -- background work ------------------------------------------------------------------------------------


# -- what it costs ---------------------------------------------------------------------------------
