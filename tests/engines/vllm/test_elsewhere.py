"""A store that another process has written, maybe of other library versions: `KAMERA_PYTHON` runs that.

vLLM 0.31 and 0.32 take no transformers under which a backbone loads, so this file loads none.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="needs vLLM: constraints-vllm.txt")

from PIL import Image

from tests.engines.vllm.engine import PICTURES, apart, ask, greedy, prompt, scheduler_of, start

TOP = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def bed(tmp_path_factory):
    where = tmp_path_factory.mktemp("written")
    python = os.environ.get("KAMERA_PYTHON", sys.executable)
    given = {**os.environ, "PYTHONPATH": str(TOP)}
    subprocess.run([python, "-m", "tests.engines.vllm.writer", str(where)], check=True, cwd=TOP, env=given)
    return start(where / "model", where / "store", **PICTURES), json.loads((where / "asked.json").read_text())


@pytest.mark.parametrize("patches", ["full", "default", "blind"])
def test_a_store_that_was_written_elsewhere_answers_as_the_patches_in_it_do(bed, patches):
    llm, windows = bed
    side, right, same, furthest = scheduler_of(llm).connector.scheduler, [], [], 0.0
    for window in (window for window in windows if window["patches"] == patches):
        images = [Image.open(file) for file in window["images"]]
        given = [prompt(ids, images, window["names"]) for ids in window["prompts"]]
        encodes = side.encodes
        served = llm.generate(given, greedy(window["recipe"]), use_tqdm=False)
        assert side.encodes == encodes and side.counts.of("refused_requests") == 0
        cold = [ask(llm, {**one, "cache_salt": "cold"}) for one in given]
        for answer, one, other in zip(window["answers"], served, cold, strict=True):
            assert one.num_cached_tokens >= window["length"] - 32
            right.append(one.outputs[0].text == answer)
            same.append(one.outputs[0].token_ids == other.outputs[0].token_ids)
            furthest = max(furthest, apart(one, other))
    assert len(right) >= 20
    if patches == "full":
        assert all(same) and furthest <= 2e-5
    share = sum(right) / len(right)
    assert share <= 0.1 if patches == "blind" else share >= 0.95
