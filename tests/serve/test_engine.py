"""A server in front of another engine needs the model's files, and none of its weights."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel, Qwen2_5OmniConfig

from kamera import Backbone, testbed
from kamera.engines import EngineCompletion, EnginePrompt
from kamera.engines.hf import ServedModel
from kamera.serve import Service, Within
from kamera.trust import ReusePolicy
from tests.models import tiny
from tests.serve.rig import SYSTEM, as_chat, frames, user


class Recording:
    """An engine that answers every prompt with two tokens, and keeps it."""

    def __init__(self) -> None:
        self.prompts: list[EnginePrompt] = []

    def stream(self, prompt: EnginePrompt) -> Iterator[EngineCompletion]:
        self.prompts.append(prompt)
        yield EngineCompletion("", (5, 6), len(prompt.ids), 0)


def answer(backbone, store) -> tuple[dict, list[EnginePrompt]]:
    engine, policy = Recording(), ReusePolicy()
    service = Service(backbone, policy, store=store, engine=engine)
    messages = [SYSTEM, user("What is it?", frames()[0])]
    body = {"model": "m", "messages": [*map(as_chat, messages)], "max_tokens": 4}
    said = Within(service).complete(body)
    service.close()
    return said, engine.prompts


def test_a_server_over_an_engine_loads_no_weight_and_sends_what_one_with_weights_does(tmp_path, monkeypatch):
    folder = testbed.weights_dir()
    whole = Backbone.from_pretrained(folder, dtype="float32", by_files=True)
    said, (prompt, *_) = answer(whole, tmp_path / "whole")
    with monkeypatch.context() as patch:
        patch.setattr(PreTrainedModel, "from_pretrained", None)
        patch.setattr(torch.nn.Module, "load_state_dict", None)
        bare = ServedModel(folder, dtype="float32")
    tensors = [*bare.model.parameters(), *bare.model.buffers()]
    assert tensors and all(tensor.is_meta for tensor in tensors)
    assert bare.fingerprint == whole.fingerprint
    got, (own, *_) = answer(bare, tmp_path / "bare")
    assert own.ids == prompt.ids and own.recipe == prompt.recipe
    assert got["choices"] == said["choices"] and got["usage"] == said["usage"]


def test_the_thinker_of_an_omni_model_needs_no_weights_either(tmp_path):
    model = tiny.build("qwen2_5_omni")
    config = Qwen2_5OmniConfig(thinker_config=model.config.to_dict(), enable_audio_output=False)
    config.save_pretrained(tmp_path)
    tensors = {f"thinker.{name}": tensor.contiguous() for name, tensor in model.state_dict().items()}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    bare = ServedModel(tmp_path, dtype="float32")
    whole = Backbone.from_pretrained(tmp_path, dtype="float32", by_files=True).engine
    assert (bare.fingerprint, bare.limits, bare.axes) == (whole.fingerprint, whole.limits, whole.axes)
    assert all(parameter.is_meta for parameter in bare.model.parameters())
