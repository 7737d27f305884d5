"""The witness of the weights: as sharp as a walk over every module, and far cheaper."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from kamera.engines.hf.computation import computation
from kamera.engines.hf.hooks import Observer
from kamera.engines.hf.witness import Witness
from tests.models import tiny

Change = Callable[[Any], None]


def _layer(model: Any) -> Any:
    return model.model.language_model.layers[1].mlp


def _written(model: Any) -> None:
    with torch.no_grad():
        _layer(model).up_proj.weight[0, 0] += 1


def _replaced(model: Any) -> None:
    _layer(model).up_proj.weight = nn.Parameter(_layer(model).up_proj.weight.detach().clone())


def _other_storage(model: Any) -> None:
    _layer(model).up_proj.weight.data = _layer(model).up_proj.weight.detach().clone()


def _added(model: Any) -> None:
    _layer(model).register_parameter("lora_A", nn.Parameter(torch.zeros(2)))


def _removed(model: Any) -> None:
    _layer(model).up_proj.register_parameter("weight", None)


def _buffer_added(model: Any) -> None:
    _layer(model).act_fn.register_buffer("scale", torch.ones(1))


def _module_replaced(model: Any) -> None:
    _layer(model).act_fn = nn.GELU()


def _module_added_deep(model: Any) -> None:
    _layer(model).up_proj.add_module("extra", nn.Linear(2, 2))


def _class_swapped(model: Any) -> None:
    class Other(type(_layer(model))):  # type: ignore[misc]
        pass

    _layer(model).__class__ = Other


def _dict_swapped(model: Any) -> None:
    up = _layer(model).up_proj
    up._parameters = {n: nn.Parameter(p.detach() + 1) for n, p in up._parameters.items() if p is not None}


@pytest.mark.parametrize(
    "change",
    [
        _written,
        _replaced,
        _other_storage,
        _added,
        _removed,
        _buffer_added,
        _module_replaced,
        _module_added_deep,
        _class_swapped,
        _dict_swapped,
    ],
)
def test_a_change_is_seen_once_and_the_next_one_too(change: Change):
    model = tiny.build("qwen2_5_vl")
    witness = Witness(model, model)
    before = witness.look()
    assert witness.look() == before
    change(model)
    after = witness.look()
    assert after != before
    assert witness.look() == after
    with torch.no_grad():
        model.lm_head.weight.mul_(2)
    assert witness.look() != after


def test_a_new_parameter_at_an_old_ones_address_is_seen():
    model = tiny.build("qwen2_5_vl")
    witness, linear = Witness(model, model), _layer(model).up_proj
    seen = [witness.look()]
    for value in range(20):  # the allocator hands the freed block out again
        shape = linear.weight.shape
        del linear.weight
        linear.weight = nn.Parameter(torch.full(shape, float(value)))
        seen.append(witness.look())
    assert all(a != b for a, b in itertools.pairwise(seen))


def test_frequencies_may_be_rewritten_where_forwards_choose_them():
    model = tiny.build("longrope")
    witness, rotary = Witness(model, model), model.model.rotary_emb
    before = witness.look()
    rotary.register_buffer("inv_freq", rotary.inv_freq * 2, persistent=False)
    assert witness.look() == before
    other = tiny.build("qwen2_5_vl")
    witness, rotary = Witness(other, other), other.model.language_model.rotary_emb
    before = witness.look()
    rotary.inv_freq.data.mul_(2)
    assert witness.look() != before


def test_shared_modules_and_inference_tensors_are_watched():
    with torch.inference_mode():
        frozen = nn.Linear(3, 3)
    model = nn.Sequential(frozen, nn.ReLU(), frozen)
    witness = Witness(model, model)
    before = witness.look()
    assert witness.look() == before
    model[2] = nn.Linear(3, 3)
    assert witness.look() != before


def test_an_addition_to_any_module_is_seen():
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Sequential(nn.BatchNorm1d(2), nn.BatchNorm1d(2)))
    witness = Witness(model, model)
    seen = [witness.look()]
    for i, module in enumerate(list(model.modules())):
        module.register_buffer(f"b{i}", torch.zeros(1))
        seen.append(witness.look())
        module.register_parameter(f"p{i}", nn.Parameter(torch.zeros(1)))
        seen.append(witness.look())
        module.add_module(f"m{i}", nn.Identity())
        seen.append(witness.look())
    assert all(a != b for a, b in itertools.pairwise(seen))


def test_observers_come_and_go_without_another_walk(monkeypatch):
    model = tiny.build("qwen2_5_vl")
    seen = Witness(model, model.model.language_model)
    first, walks = seen.look(), []

    def walked(*given: Any) -> Any:
        walks.append(given)
        return computation(*given)

    monkeypatch.setattr("kamera.engines.hf.witness.computation", walked)
    handle = _layer(model).register_forward_hook(Observer(lambda *_: None))
    assert seen.look() == first
    handle.remove()
    assert seen.look() == first and walks == []
    _layer(model).register_forward_hook(lambda *_: None)  # any other hook may change what is computed
    assert seen.look() != first and walks != []


def test_a_hook_that_moves_to_another_module_is_seen_although_observers_are_not():
    model, change = tiny.build("qwen2_5_vl"), lambda *_: None
    one, other = model.model.language_model.layers[:2]
    handle = one.register_forward_hook(change)
    seen = Witness(model, model.model.language_model)
    first = seen.look()
    handle.remove()
    handle = other.register_forward_hook(change)
    second = seen.look()
    handle.remove()
    other.register_forward_pre_hook(change)
    assert len({first, second, seen.look()}) == 3
