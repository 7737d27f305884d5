"""vLLM on the small trained backbones: prompts, recipes and questions."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file

from benchmarks.vllm.bed import (
    ENVIRONMENT,
    PICTURES,
    pictures_directory,
    scheduler_of,
    start,
    transfer,
)
from kamera.engines.vllm.serving import FIELD

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


def latents_directory(into: Path) -> Path:
    """The language model of the trained MLA backbone, padded with zeros to what vLLM's kernels take.

    Its 96 latents become 512 and its 32 rotary features 64. Padding changes the mean square under the norm of
    the latents, the scale of attention and the rotary frequencies; weights make up for the first two, and
    each rotary pair goes to the place of its own frequency, which is every other one.
    """
    from tests.models.trained import (
        mla_directory,  # loads transformers' classes, as `pictures_directory` does
    )

    source = mla_directory()
    into.mkdir(parents=True, exist_ok=True)
    text = json.loads((source / "config.json").read_text(encoding="utf-8"))["text_config"]
    heads, plain = text["num_attention_heads"], text["qk_nope_head_dim"]
    latent, rope = text["kv_lora_rank"], text["qk_rope_head_dim"]
    wide, turned = 512, 64
    text |= {
        "kv_lora_rank": wide,
        "qk_rope_head_dim": turned,
        "head_dim": turned,
        "qk_head_dim": plain + turned,
    }
    text |= {"architectures": ["DeepseekV3ForCausalLM"], "dtype": "float32", "tie_word_embeddings": False}
    (into / "config.json").write_text(json.dumps(text), encoding="utf-8")
    places = torch.tensor([4 * (i // 2) + i % 2 for i in range(rope)])
    scale = ((plain + turned) / (plain + rope)) ** 0.5
    padded = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if not name.startswith("language_model."):
            continue
        own = name.removeprefix("language_model.").replace(".blocks.", ".layers.")
        tensor = tensor.float()
        if own.endswith("kv_a_proj_with_mqa.weight"):
            new = torch.zeros(wide + turned, tensor.shape[1])
            new[:latent], new[wide + places] = tensor[:latent], tensor[latent:]
        elif own.endswith("kv_a_layernorm.weight"):
            new = torch.zeros(wide)
            new[:latent] = tensor * (latent / wide) ** 0.5
        elif own.endswith("kv_b_proj.weight"):
            new = torch.zeros(tensor.shape[0], wide)
            new[:, :latent] = tensor
        elif own.endswith("q_b_proj.weight"):
            each = tensor.view(heads, plain + rope, -1)
            new = torch.zeros(heads, plain + turned, tensor.shape[1])
            new[:, :plain], new[:, plain + places] = each[:, :plain], each[:, plain:]
            new = scale * new.flatten(0, 1)
        else:
            new = tensor
        padded[own] = new.contiguous()
    padded["lm_head.weight"] = padded["model.embed_tokens.weight"].clone()  # vLLM does not tie them
    save_file(padded, into / "model.safetensors", metadata={"format": "pt"})
    for name in ("tokenizer.json", "chat_template.jinja", "generation_config.json"):
        shutil.copyfile(source / name, into / name)
    words = json.loads((source / "tokenizer_config.json").read_text(encoding="utf-8"))
    words.pop("processor_class", None)
    words |= {"tokenizer_class": "PreTrainedTokenizerFast"}
    (into / "tokenizer_config.json").write_text(json.dumps(words), encoding="utf-8")
    return into
