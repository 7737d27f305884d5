"""A model that is changed after its Backbone was made: noticed for next to nothing, and refused by name."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

from kamera import Backbone, ChunkStore, KameraWindow, ReusePolicy
from kamera.engines.hf import HfEngine
from kamera.errors import IncompatibleChunk, ModelChanged
from kamera.patches import later_of
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
        "a plan": lambda: window.plan_slide(),
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


def test_a_model_put_back_is_the_first_one_again():
    backbone = Backbone(tiny.build(FAMILY))
    engine, before = backbone.engine, backbone.fingerprint
    window = make(engine, None, *chunks(engine), policy=EXACT)
    weight = _layer(backbone.model).mlp.up_proj.weight
    kept = weight.detach().clone()
    with torch.no_grad():
        weight.mul_(2)
        other = backbone.refresh()
        weight.copy_(kept)
    assert (backbone.refresh() == before) and other != before
    assert error(engine, window) < 1e-4


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


@pytest.mark.parametrize("how", ["written", "replaced"])
def test_rotary_angles_that_changed_are_refused_by_a_refresh_too(how: str):
    backbone = Backbone(tiny.build(FAMILY))
    engine, inner = backbone.engine, backbone.model.model.language_model
    window = make(engine, None, chunks(engine)[0])
    if how == "written":
        inner.rotary_emb.inv_freq.mul_(1.01)
    else:
        config = backbone.model.config.text_config
        config.rope_parameters = config.rope_parameters | {"rope_theta": 5e3}
        inner.rotary_emb = type(inner.rotary_emb)(config)
    for _ in range(2):
        with pytest.raises(ModelChanged, match=REFUSED):
            window.slide(1)
        with pytest.raises(ModelChanged, match=r"rotary angles.*make a new Backbone"):
            backbone.refresh()
    again = Backbone(backbone.model)
    assert again.engine.layout != engine.layout
    with pytest.raises(IncompatibleChunk):
        make(again.engine).append(chunks(tiny.backbone(FAMILY))[0])


@pytest.mark.parametrize("family", ["longrope", "dynamic_ntk"])
def test_frequencies_that_a_forward_chooses_are_no_change(family: str):
    backbone = Backbone(tiny.build(family))
    before, engine = backbone.fingerprint, backbone.engine
    rotary, limit = engine.decoder.rotary_emb, engine.limits.below
    assert limit is not None
    stood = rotary.inv_freq.clone()
    with torch.no_grad():
        # past the limit: a user's own, which Kamera refuses
        backbone.model(input_ids=samples.text_ids(limit + 40, seed=3)[None])
    assert not torch.equal(rotary.inv_freq, stood)
    assert backbone.fingerprint == before
    assert backbone.refresh() == before


# -- autocast --------------------------------------------------------------------------------------


def test_autocast_around_an_append_is_refused():
    backbone = tiny.backbone(FAMILY)
    store = ChunkStore.open("memory://")
    one, two = chunks(backbone)
    window = make(backbone, store, one)
    before = backbone.fingerprint
    with torch.autocast("cpu", torch.bfloat16):
        half = backbone.fingerprint
        with pytest.raises(IncompatibleChunk, match="autocast"):
            window.append(two)
        inner = chunks(backbone)[1]
        make(backbone, store, inner)  # a window of its own may run so
        assert inner.fingerprint == half
    with torch.autocast("cpu", torch.float16):
        assert backbone.fingerprint not in (before, half)
    with torch.autocast("cpu", enabled=False):
        assert backbone.fingerprint == before
    window.append(two)
    assert len({info.context for info in store.ls("canonical")}) == 2


def test_training_mode_is_another_model_as_long_as_it_lasts():
    backbone = HfEngine(tiny.build(FAMILY))
    window = make(backbone, None, *chunks(backbone), policy=EXACT)
    backbone.model.train()
    with pytest.raises(IncompatibleChunk, match="make a new window"):
        window.slide(1)
    assert error(backbone, make(backbone, None, *chunks(backbone), policy=EXACT)) < 1e-4
    backbone.model.eval()
    assert error(backbone, window) < 1e-4


# -- later work ------------------------------------------------------------------------------------


def test_later_work_runs_no_forward_of_a_model_that_changed_meanwhile():
    """A canonical that is owed would bear the old model's name: it is dropped, and said so."""
    backbone = Backbone(tiny.build(FAMILY))
    engine, store = backbone.engine, ChunkStore.open("memory://")
    one, two = chunks(engine)
    window = make(engine, store, one, two, policy=EXACT)
    window.flush()
    queue, gate = later_of(engine), threading.Event()
    queue.add(lambda: gate.wait(60) and None)
    window.evict(window.slots[1])
    weight = _layer(backbone.model).mlp.up_proj.weight
    kept = weight.detach().clone()
    with torch.no_grad():
        weight.mul_(2)
    gate.set()
    queue.flush()
    assert store.contexts_of(one.id) and not store.contexts_of(two.id), "one led, so no forward was due"
    with torch.no_grad():
        weight.copy_(kept)
    backbone.refresh()
    notes = window.append(chunks(engine)[0]).notes
    assert any("have changed since its fingerprint was made" in note for note in notes)


# -- what it costs ---------------------------------------------------------------------------------


def calls_of(function: Callable[[], Any]) -> int:
    """Calls of Python functions in one run."""
    count = 0

    def note(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


def test_a_look_costs_as_many_calls_whatever_the_model_holds():
    """All is compared in C: what Python calls does not grow with the tensors."""
    small, large = (HfEngine(tiny.build(FAMILY)) for _ in range(2))
    for i in range(500):
        _layer(large.model).mlp.register_buffer(f"b{i}", torch.zeros(1))
        _layer(large.model).mlp.add_module(f"m{i}", nn.Linear(1, 1))
    large.refresh()
    counts = [calls_of(lambda e=engine: e.check(e.fingerprint)) for engine in (small, large)]
    assert counts[0] == counts[1] <= 40, counts


def test_an_operation_looks_at_the_model_once(monkeypatch):
    engine = HfEngine(tiny.build(FAMILY))
    window = make(engine, None, *chunks(engine))
    window.flush()
    looks, look = [], HfEngine.check
    monkeypatch.setattr(HfEngine, "check", lambda self, given: looks.append(given) or look(self, given))
    chunk = samples.chunk(engine, samples.sample(FAMILY, 7), "p7")
    for act in (
        lambda: window.append(chunk),
        lambda: window.append(engine.chunk_from_tensors(torch.arange(5, 9))),
        lambda: window.plan_slide(),
        lambda: window.reorder([1, 0, *range(2, len(window))]),
        lambda: window.next_token_logits(QUESTION),
        lambda: window.slide(1),
    ):
        looks.clear()
        act()
        assert len(looks) == 1
        window.flush()
