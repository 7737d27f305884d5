"""A conversation over vLLM, whose window of pictures slides: what vLLM computes, with Kamera and without.

Start vLLM with Kamera's connector (docs/vllm.md) on MODEL_FOLDER and a STORE, then
python examples/vllm_conversation.py --model MODEL_FOLDER --store STORE --url http://localhost:8000
"""

from __future__ import annotations

import argparse
import sys
import time

import openai

from kamera import Backbone, ChatSession, ChunkStore
from kamera.edits import policies
from kamera.engines.vllm.clients import Http
from kamera.testbed import SYSTEM, World


def main(arguments: list[str]) -> int:
    """Prints a line a turn."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="the folder that vLLM was started on")
    parser.add_argument("--store", required=True, help="the store of its connector")
    parser.add_argument("--url", default="http://localhost:8000")
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--keep", type=int, default=3, help="pictures that stay in the conversation")
    parser.add_argument("--dtype", default="auto", help="that of vLLM's computation")
    given = parser.parse_args(arguments)

    client = openai.OpenAI(base_url=f"{given.url}/v1", api_key="none")
    engine = Http(client, client.models.list().data[0].id)
    backbone = Backbone.from_pretrained(given.model, dtype=given.dtype, by_files=True)
    keep = policies.keep_last_images(given.keep, placeholder=None)
    session = ChatSession(backbone, ChunkStore.open(given.store), engine=engine, edit_policy=keep)
    history = [{"role": "system", "content": SYSTEM}]
    frames = [frame for n in range(given.turns) for frame in World(3).episode(n, legends=1).frames]
    for turn_number, frame in enumerate(frames[: given.turns]):
        content = [*frame.content, {"type": "text", "text": "What is on the desk?"}]
        turn = session.send([*history, {"role": "user", "content": content}], max_new_tokens=8)
        history = session.messages
        usage, report = turn.usage, turn.report
        computed = usage.prompt_tokens - usage.cached_tokens
        print(
            f"turn {turn_number}: {computed} of {usage.prompt_tokens} tokens computed, "
            f"{report.left} left, {report.guarantee}: {turn.text!r}"
        )
        session.anticipate()
        session.flush()
        time.sleep(1)  # an agent acts; the connector stores meanwhile
    print(f"usage: {session.usage()}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
