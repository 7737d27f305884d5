"""An answer is told in pieces that break no character and no stop string; equal seeds give equal answers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kamera.sessions import Stream
from tests.content.templates import TALK
from tests.sessions.rig import session, speaking

PROMPT = 3


class Told(Stream):
    """Keeps the pieces."""

    def __init__(self, *given, **options) -> None:
        super().__init__(*given, **options)
        self.pieces: list[str] = []

    def tell(self, text: str) -> None:
        self.pieces.append(text)


def followed(text: str, steps: list[int], **options) -> Told:
    """A stream that hears ``text`` token by token, or several at once."""
    backbone, stream = speaking("headers"), Told(**options)
    ids = backbone.builder.tokenize(text)
    prompt = torch.zeros(1, PROMPT, dtype=torch.int64)
    stream.begin(backbone)
    stream.watch(prompt, prompt)
    at = 0
    while at < len(ids) and not stream.stopped:
        at = min(len(ids), at + steps[at % len(steps)])
        stream(torch.cat([prompt, ids[None, :at]], dim=1), None)
    stream.finish(text)
    return stream


def cut(text: str, stop: list[str]) -> str:
    """The plain reading: up to the first stop string that is complete first."""
    for end in range(1, len(text) + 1):
        found = [text[:end].index(s) for s in stop if s in text[:end]]
        if found:
            return text[: min(found)]
    return text


letters = st.text(alphabet="ab é🦊界\n", max_size=24)


@settings(max_examples=150)
@given(letters, st.lists(st.text(alphabet="ab 🦊\n", min_size=1, max_size=3), max_size=2))
def test_pieces_join_to_the_text_before_the_stop_string(text, stop):
    stream = followed(text, [1], stop=stop)
    assert "".join(stream.pieces) == stream.text == cut(text, stop)
    assert not any("�" in piece for piece in stream.pieces)


@given(letters, st.lists(st.integers(1, 5), min_size=1, max_size=3))
def test_tokens_that_come_together_tell_the_same(text, steps):
    assert "".join(followed(text, steps).pieces) == text


def test_a_stop_string_ends_the_answer_before_it_and_the_history_too():
    chat = session(speaking("headers"))
    whole = chat.fork().send(TALK[:1], max_new_tokens=8, do_sample=False)
    stop = whole.text[2:4]
    turn = chat.send(TALK[:1], max_new_tokens=8, do_sample=False, stream=Stream(stop=[stop]))
    assert turn.text == whole.text[: whole.text.index(stop)] and turn.finish_reason == "stop"
    assert len(turn.token_ids) < len(whole.token_ids) and chat.messages[-1]["content"] == turn.text


def test_equal_seeds_give_equal_answers_whatever_is_drawn_elsewhere():
    chat = session(speaking("headers"))
    options = {"max_new_tokens": 12, "temperature": 2.0}
    one = chat.fork().send(TALK, seed=5, **options).text
    torch.rand(7)
    assert chat.fork().send(TALK, seed=5, **options).text == one
    assert chat.fork().send(TALK, seed=6, **options).text != one


def plain(backbone, **options) -> tuple[int, ...]:
    """New tokens of the model's own generate behind `TALK`."""
    made = backbone.processor.apply_chat_template(
        TALK, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    out = backbone.model.generate(**made, **options)
    return tuple(out[0, made["input_ids"].shape[1] :].tolist())


@pytest.mark.few(3)
@pytest.mark.parametrize("drawn", [{"do_sample": False}, {"seed": 3}], ids=str)
@pytest.mark.parametrize("uncached", [False, True])
def test_drafted_tokens_change_no_answer_and_no_logprobs(uncached, drawn):
    backbone = speaking("headers")
    options = {"max_new_tokens": 8, "repetition_penalty": 0.5, "logprobs": 1, **drawn}
    chats = [session(backbone, uncached=uncached, max_tokens=8 if uncached else None) for _ in range(2)]
    turn = chats[0].send(TALK, **options)
    drafted = chats[1].send(TALK, prompt_lookup_num_tokens=3, **options)
    assert drafted.token_ids == turn.token_ids and drafted.text == turn.text
    noted = zip(drafted.logprobs, turn.logprobs, strict=True)
    assert all(a.logprob == pytest.approx(b.logprob, abs=1e-4) for a, b in noted)
