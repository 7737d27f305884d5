"""A server that is killed under load: what it acknowledged is found again, or named."""

from __future__ import annotations

import threading
from pathlib import Path

import httpx
import pytest

from tests.serve.rig import SYSTEM, said, user
from tests.serve.test_process import asked, started

TURNS = 1


@pytest.mark.slow
@pytest.mark.parametrize("session", [{}, {"session_id": "s"}])
def test_the_last_acknowledged_turn_of_a_killed_server_is_gone_on_from(tmp_path: Path, session):
    store, history = str(tmp_path / "store"), [SYSTEM, user("value of tag 3?")]
    process, url = started("--store", store)
    with process:
        for _ in range(2):
            answer = asked(url, history, **session)
            history += [answer["choices"][0]["message"], user("and?")]
        process.kill()
    process, url = started("--store", store)
    with process:
        after = {"kamera": {"after": answer["kamera"]["turn_id"]}}
        for named in (session, {}):
            again = asked(url, [user("and?")], **after, **named)
            assert again["choices"][0]["message"]["content"] == said(history, 4)
        process.kill()


@pytest.mark.slow
def test_every_acknowledged_turn_of_a_server_killed_under_load_is_there_or_named(tmp_path: Path):
    store, threads = str(tmp_path / "store"), list[threading.Thread]()
    history = {number: [SYSTEM, user(f"value of tag {number}?")] for number in range(2)}
    kept, enough = list[str](), threading.Barrier(3)
    process, url = started("--store", store)

    def talk(number: int) -> None:
        """Goes on until the server is gone; the main thread kills it once all have their turns."""
        talked = history[number]
        for turn in range(10_000):
            try:
                answer = asked(url, talked)
                response = {"model": "testbed", "input": f"tag {number}?", "max_output_tokens": 2}
                named = httpx.post(url + "/v1/responses", json=response, timeout=60).json()
            except httpx.HTTPError:
                return
            talked += [answer["choices"][0]["message"], user(f"and tag {turn}?")]
            kept.append(named["id"])
            if turn == TURNS:
                enough.wait(300)

    with process:
        threads += [threading.Thread(target=talk, args=(number,)) for number in history]
        for thread in threads:
            thread.start()
        enough.wait(300)
        process.kill()
        for thread in threads:
            thread.join(60)
    process, url = started("--store", store)
    with process:
        for talked in history.values():
            answer = asked(url, talked)
            usage = answer["usage"]
            assert answer["choices"][0]["message"]["content"] == said(talked, 4)
            cached = usage["prompt_tokens_details"]["cached_tokens"]
            assert cached >= usage["prompt_tokens"] - 80, "at most the last exchanges are prefilled again"
        for name in kept:
            answer = httpx.get(f"{url}/v1/responses/{name}", timeout=60)
            assert answer.status_code == 200 and answer.json()["id"] == name
        process.kill()
