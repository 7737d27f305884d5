"""Model directories that vLLM loads, and an engine on them in this process."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "OMP_NUM_THREADS": "1",
}


def pictures_directory(into: Path, name: str = "gqa") -> Path:
    """A trained backbone of pictures with the processor files that vLLM looks for."""
    from lab.testbed.directories import weights_dir

    into.mkdir(parents=True, exist_ok=True)
    for file in weights_dir(name).iterdir():
        shutil.copyfile(file, into / file.name)
    processor = json.loads((into / "processor_config.json").read_text(encoding="utf-8"))
    image = processor["image_processor"]
    video = {name: value for name, value in image.items() if name != "image_processor_type"}
    video["video_processor_type"] = "Qwen2VLVideoProcessor"
    processor |= {"processor_class": "Qwen2_5_VLProcessor", "video_processor": video}
    _write(into / "processor_config.json", processor)
    _write(into / "preprocessor_config.json", image)
    _write(into / "video_preprocessor_config.json", video)
    words = json.loads((into / "tokenizer_config.json").read_text(encoding="utf-8"))
    words |= {"processor_class": "Qwen2_5_VLProcessor", "tokenizer_class": "PreTrainedTokenizerFast"}
    _write(into / "tokenizer_config.json", words)
    return into


def transfer(store: Path | str, **options: Any) -> dict[str, Any]:
    """The ``kv_transfer_config`` of an engine on a store."""
    return {
        "kv_connector": "KameraConnector",
        "kv_connector_module_path": "kamera.engines.vllm.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"store": str(store), **options},
    }


def start(
    directory: Path, store: Path | str | None, options: dict[str, Any] | None = None, **settings: Any
) -> Any:
    """An ``LLM`` in this process whose connector reads ``store``; with None it has no connector."""
    os.environ.update(ENVIRONMENT)
    from vllm import LLM

    given = {
        "max_model_len": 2048,
        "max_num_seqs": 8,
        "enforce_eager": True,
        "dtype": "float32",
        "block_size": 32,
        "enable_prefix_caching": True,
        **settings,
    }
    if store is not None:
        given["kv_transfer_config"] = transfer(store, **(options or {}))
    return LLM(model=str(directory), **given)


PICTURES = {"limit_mm_per_prompt": {"image": 8, "video": 0}}


def scheduler_of(llm: Any) -> Any:
    """The scheduler of an engine in this process; its connector is ``.connector``."""
    return llm.llm_engine.engine_core.engine_core.scheduler


def latents_directory(into: Path) -> Path:
    """The language model of the trained MLA backbone, padded with zeros to what vLLM's kernels take.

    Its 96 latents become 512 and its 32 rotary features 64. Padding changes the mean square under the norm of
    the latents, the scale of attention and the rotary frequencies; weights make up for the first two, and
    each rotary pair goes to the place of its own frequency, which is every other one.
    """
    from safetensors.torch import load_file, save_file

    from lab.testbed.directories import weights_dir

    source = weights_dir("mla")
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
    _write(into / "config.json", text)
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
    _write(into / "tokenizer_config.json", words | {"tokenizer_class": "PreTrainedTokenizerFast"})
    return into


def _write(path: Path, document: Any) -> None:
    path.write_text(json.dumps(document), encoding="utf-8")
