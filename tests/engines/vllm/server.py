"""vLLM's server in a process of its own, on the small trained backbone."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import openai

from kamera import testbed
from tests.engines.vllm.engine import ENVIRONMENT, pictures_directory, transfer

TEMPLATE = (testbed.weights_dir() / "chat_template.jinja").read_text(encoding="utf-8")
TEMPLATE = (
    "{%- if tools -%}<|im_start|>system\ncall tag {{ tools | length }}<|im_end|>\n{%- endif -%}"
    + TEMPLATE.replace(
        "{{ '<|im_end|>\\n' }}",
        "{%- for call in message['tool_calls'] or [] -%}call {{ call['function']['arguments']['tag'] }}"
        "{%- endfor -%}{{ '<|im_end|>\\n' }}",
        1,
    )
)
"""The testbed's chat template, which shows tools and calls, too."""


class Serving(NamedTuple):
    """A server's address, the folder of its model, and its connector's store."""

    url: str
    model: Path
    store: Path

    @property
    def client(self) -> Any:
        """An unchanged client of OpenAI's API."""
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)

    def counted(self) -> dict[tuple[str, str], float]:
        """The connector's counters, by name and label."""
        text = httpx.get(f"{self.url}/metrics").text
        lines = re.findall(r"^vllm:kamera_(\w+)_total\{(.*)\} (.*)$", text, re.MULTILINE)
        label = re.compile(r'(?:origin|reason|kind)="(\w+)"')
        return {(name, label.search(labels)[1]): float(count) for name, labels, count in lines}


@contextmanager
def serving(where: Path, store: str | None = None, **options: Any) -> Iterator[Serving]:
    """A server that serves the model under the name "bed", and harvests; ``options`` of its connector."""
    model = pictures_directory(where / "model")
    (model / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += ["--port", str(port), "--served-model-name", "bed", "--max-model-len", "2048"]
    command += ["--max-num-seqs", "8", "--enforce-eager", "--dtype", "float32", "--block-size", "32"]
    command += ["--limit-mm-per-prompt", '{"image":8,"video":0}', "--enable-prompt-tokens-details"]
    command += ["--scheduling-policy", "priority"]
    command += [
        "--kv-transfer-config",
        json.dumps(transfer(store or where / "store", **{"harvest": "256MiB", **options})),
    ]
    given = {**os.environ, **ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    with open(where / "log", "w", encoding="utf-8") as log:
        process = subprocess.Popen(command, env=given, stdout=log, stderr=log)
        try:
            url = f"http://127.0.0.1:{port}"
            _await(f"{url}/health", process, where / "log")
            yield Serving(url, model, where / "store")
        finally:
            process.terminate()
            process.wait(30)


def _await(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    for _ in range(1800):
        assert process.poll() is None, log.read_text(encoding="utf-8")[-2000:]
        try:
            if httpx.get(url).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.5)
    raise AssertionError(log.read_text(encoding="utf-8")[-2000:])
