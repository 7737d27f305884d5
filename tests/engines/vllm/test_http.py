"""vLLM's server in a process of its own, asked over HTTP by an unchanged client of OpenAI's API."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time

import pytest

pytest.importorskip("vllm", reason="needs vLLM: constraints-vllm.txt")

import httpx
import openai

from kamera import Backbone, ChunkStore, ReusePolicy
from kamera.engines.vllm.clients import Http
from kamera.testbed import World
from kamera.window import EngineWindow
from tests.engines.vllm.engine import ENVIRONMENT, bound, pictures_directory, transfer


@pytest.fixture
def server(tmp_path):
    model = pictures_directory(tmp_path / "model")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += ["--port", str(port), "--served-model-name", "bed", "--max-model-len", "2048"]
    command += ["--max-num-seqs", "8", "--enforce-eager", "--dtype", "float32", "--block-size", "32"]
    command += ["--limit-mm-per-prompt", '{"image":8,"video":0}', "--enable-prompt-tokens-details"]
    command += ["--scheduling-policy", "priority"]
    command += ["--kv-transfer-config", json.dumps(transfer(tmp_path / "store", harvest="256MiB"))]
    given = {**os.environ, **ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    with open(tmp_path / "log", "w", encoding="utf-8") as log:
        process = subprocess.Popen(command, env=given, stdout=log, stderr=log)
        try:
            url = f"http://127.0.0.1:{port}"
            _await(f"{url}/health", process, tmp_path / "log")
            yield url, model, tmp_path / "store"
        finally:
            process.terminate()
            process.wait(30)


def engine_client(url):
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none")


def counts(url):
    """The connector's counters, by name and label."""
    lines = re.findall(r"^kamera:(\w+)_total\{(.*)\} (.*)$", httpx.get(f"{url}/metrics").text, re.MULTILINE)
    label = re.compile(r'(?:origin|reason|kind)="(\w+)"')
    return {(name, label.search(labels)[1]): float(count) for name, labels, count in lines}


def _await(url, process, log):
    for _ in range(600):
        assert process.poll() is None, log.read_text(encoding="utf-8")[-2000:]
        try:
            if httpx.get(url).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.5)
    raise AssertionError(log.read_text(encoding="utf-8")[-2000:])


def test_an_unchanged_client_is_served_from_what_the_engine_stored(server):
    url, model, where = server
    backbone, store = Backbone.from_pretrained(model, dtype="float32", by_files=True), ChunkStore.open(where)
    engine = Http(engine_client(url), "bed", priorities=True)
    policy, right = ReusePolicy(certified=False, tolerance=None), []
    for number in range(12):
        episode = World(800_000).episode(number, layout="LLLI")
        window = EngineWindow(engine, backbone, store, fingerprint=backbone.fingerprint, policy=policy)
        for frame in episode.frames:
            window.append(frame.content)
        question = bound(episode)[0]
        first = window.generate(question.text, 4)
        assert [slot.origin for slot in first.slots] == ["computed"] * 4
        assert window.keep() >= 3  # the leading one may be stored by now
        for _ in range(200):
            if {slot.origin for slot in window.look()} == {"canonical", "stored"}:
                break
            time.sleep(0.1)
        second = window.generate(question.text, 4)
        assert second.supplied == len(window.recipe().ids)  # the server rendered the very tokens
        right += [first.text == question.answer, second.text == question.answer]
    assert sum(right) >= 23
    metrics = httpx.get(f"{url}/metrics").text
    [hits] = [
        line for line in metrics.splitlines() if line.startswith("vllm:external_prefix_cache_hits_total")
    ]
    assert float(hits.split()[-1]) > 12 * 300
    counted = counts(url)
    assert counted["supplied_tokens", "stored"] > counted["supplied_tokens", "canonical"] > 0
    supplied = sum(count for (name, _), count in counted.items() if name == "supplied_tokens")
    assert supplied > 12 * 300
    assert counted["harvested_bytes", "canonical"] > 0 and counted["harvested_bytes", "exact"] > 0
    assert not any(name == "refused_requests" for name, _ in counted)
    client = engine_client(url)
    said = {"role": "user", "content": "What?"}
    for recipe in ("no recipe", window.recipe().to_json()):
        field = {"kv_transfer_params": {"kamera": recipe}}
        client.chat.completions.create(model="bed", messages=[said], max_tokens=1, extra_body=field)
    assert counts(url)["refused_requests", "recipe"] == 2
