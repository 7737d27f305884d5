"""A model directory that vLLM loads, and an engine on it in this process."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "OMP_NUM_THREADS": "1",
}


def pictures_directory(into: Path) -> Path:
    """The shipped backbone with the processor files that vLLM looks for."""
    from kamera import testbed  # loads transformers' classes, which later vLLMs cap below ours

    into.mkdir(parents=True, exist_ok=True)
    for file in testbed.weights_dir().iterdir():
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


def _write(path: Path, document: Any) -> None:
    path.write_text(json.dumps(document), encoding="utf-8")
