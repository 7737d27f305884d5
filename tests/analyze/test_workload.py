"""What a workload repeats: counts on requests whose repetitions are known, and the traces they come from."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
from PIL import Image

from kamera import ChunkStore, KameraWindow
from kamera.analyze import example, ids_of, read_requests, recovery, shift
from kamera.errors import TraceError
from kamera.reuse import Prompt
from tests.cli.run import kamera
from tests.sessions.rig import seeing, speaking


def words(seed: int, count: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 30_000, count)


def asked(*prompts: np.ndarray) -> list[tuple[str, Prompt]]:
    return [("", Prompt.of(ids)) for ids in prompts]


def test_prefix_recovered_and_novel_tokens_are_what_was_put_there():
    body, other = words(1, 500), words(2, 300)
    requests = asked(body, np.concatenate([body, words(3, 100)]), np.concatenate([words(4, 52), body, other]))
    found = recovery(requests, sink=32)["total"]
    assert (found["requests"], found["tokens"]) == (3, 500 + 600 + 852)
    assert found["prefix"] * found["tokens"] == pytest.approx(500, abs=2)
    assert found["recovered"] * found["tokens"] == pytest.approx(500, abs=2)
    assert found["novel"] * found["tokens"] == pytest.approx(500 + 100 + 52 + 300, abs=4)
    assert found["blocks"] == 0.0  # moved by 52, no block of 64 stands where it stood
    carved = recovery(requests, sink=152)["total"]
    assert carved["recovered"] * carved["tokens"] == pytest.approx(400, abs=2)
    aligned = recovery(asked(body, np.concatenate([words(4, 64), body])), sink=32)["total"]
    assert aligned["blocks"] * aligned["tokens"] == 64 * (500 // 64)
    with pytest.raises(ValueError, match="sink -1"):
        recovery(requests, sink=-1)


def written(tmp_path, rows) -> str:
    path = tmp_path / "requests.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n", encoding="utf-8")
    return str(path)


def test_words_in_another_order_are_not_recovered(tmp_path):
    rows = [row for row in example(4) if row["service"] == "agent_meta"]
    engine, draw = speaking("headers"), random.Random(0)
    whole = recovery(read_requests(engine, written(tmp_path, rows)))
    for row in rows:
        for message in row["messages"]:
            parts = message["content"].split()
            message["content"] = " ".join(draw.sample(parts, len(parts)))
    shuffled = recovery(read_requests(engine, written(tmp_path, rows)))
    assert [one["service"] for one in whole["services"]] == ["agent_meta"]
    assert whole["total"]["recovered"] > 0.7
    assert shuffled["total"]["recovered"] < 0.1


def test_early_variation_predicts_what_is_recovered():
    body = words(1, 2_000)
    early = shift([("a", Prompt.of(np.concatenate([words(10 + i, 34), body]))) for i in range(8)])
    deep = shift([("b", Prompt.of(np.concatenate([body, words(30 + i, 34)]))) for i in range(8)])
    [early, deep] = [found["services"][0] for found in (early, deep)]
    assert early["first_variation"] < 0.01
    assert early["predicted"] == pytest.approx(2_000 / 2_034, abs=0.01)
    assert early["measured"] == pytest.approx(early["predicted"], abs=0.01)
    assert (early["variants"], deep["variants"]) == (8, 8)
    assert deep["first_variation"] == pytest.approx(2_000 / 2_034, abs=0.01)
    assert deep["predicted"] == deep["measured"] == pytest.approx(0.0, abs=1e-9)
    few = [("c", Prompt.of(words(i, 40))) for i in range(3)]
    with pytest.raises(ValueError, match="four requests"):
        shift(few)
    assert shift([*few, *[("d", Prompt.of(body))] * 4])["left_out"] == ["c"]


def test_equal_chunks_of_a_windows_trace_are_found_again(tmp_path):
    path = tmp_path / "walk.jsonl"
    window = KameraWindow(speaking("headers"), ChunkStore.open("memory://"), system="You read.", trace=path)
    for number in range(3):
        window.append(f"This is page {number} of a book about everything. " * 3)
    window.slide()
    requests = read_requests(speaking("headers"), path)
    assert len(requests) == 4
    slots, last = window.slots, requests[-1][1]
    assert len(last) == sum(slot.length for slot in slots) + slots[0].start
    moved = recovery(requests[-2:], sink=0)["total"]
    assert moved["recovered"] * moved["tokens"] == sum(slot.length for slot in slots)
    assert moved["prefix"] * moved["tokens"] == slots[0].start
    with pytest.raises(ValueError, match="holds no texts"):
        ids_of(speaking("headers"), requests, 8)


def test_a_picture_is_found_again_and_no_other_is_taken_for_it(tmp_path):
    for name, colour in (("a", "red"), ("b", "blue")):
        Image.new("RGB", (56, 56), colour).save(tmp_path / f"{name}.png")

    def row(*names: str) -> dict:
        shown = [{"type": "image", "image": str(tmp_path / f"{name}.png")} for name in names]
        return {"messages": [{"role": "user", "content": [*shown, {"type": "text", "text": "what is it?"}]}]}

    requests = read_requests(seeing(), written(tmp_path, [row("a"), row("b"), row("b", "a")]))
    [(shown,), (other,), _] = [prompt.media for _, prompt in requests]
    front, picture = shown.start, shown.stop - shown.start
    rest = len(requests[0][1]) - shown.stop
    found = []
    for count in (1, 2, 3):
        total = recovery(requests[:count], sink=0)["total"]
        found.append([round(total[name] * total["tokens"]) for name in ("prefix", "recovered")])
    assert shown.digest != other.digest
    assert recovery(requests[:2], sink=0)["total"]["blocks"] == 0.0  # the tokens alone would be one block
    assert found[1] == [front, rest]
    assert found[2] == [front + front + picture, rest + picture + rest]


def test_a_line_that_is_no_request_is_named(tmp_path):
    for text in ("# words", '{"messages": []}', "[1]", '{"operation": "slide"}', '{"messages": [3]}'):
        path = tmp_path / "bad.jsonl"
        path.write_text(json.dumps({"messages": [{"role": "user", "content": "hi"}]}) + "\n" + text)
        with pytest.raises(TraceError, match=r"bad\.jsonl:2: .* is no request"):
            read_requests(speaking("headers"), path)
    path.write_text("\n")
    with pytest.raises(TraceError, match="no request in it"):
        read_requests(speaking("headers"), path)


def test_texts_are_taken_once(tmp_path):
    rows = [row for row in example(2) if row["service"] == "sysvar"]
    requests = read_requests(speaking("headers"), written(tmp_path, rows))
    ids = ids_of(speaking("headers"), requests, 8)
    assert len(requests[0][1]) < len(ids) < len(requests[0][1]) * 1.2
    with pytest.raises(ValueError, match="give a longer one"):
        ids_of(speaking("headers"), requests, 10**6)


def test_the_verbs_say_which_trace_they_counted(capsys, tmp_path):
    path = written(tmp_path, example(4))
    done = kamera(capsys, "analyze", "recovery", "testbed", path, "--format", "json", "-q")
    assert (done.code, done.err) == (0, "")
    assert done.document["trace"] == path
    assert {row["service"] for row in done.document["services"]} == {row["service"] for row in example(1)}
    kinds = kamera(capsys, "analyze", "shift", "testbed", path, "-q")
    assert kinds.code == 0 and "first variation" in kinds.out
    refused = kamera(capsys, "analyze", "recovery", "testbed", __file__)
    assert refused.code == 1 and "is no request" in refused.err and refused.err.count("\n") == 1
