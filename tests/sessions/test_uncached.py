"""A prompt that no window can hold is refused by name, or answered by the plain model, which says so."""

from __future__ import annotations

import pytest
import torch

from kamera.errors import UnsafeText, WindowFull
from tests.content.templates import LONG_TALK, TALK, screens
from tests.engines.compare import relative
from tests.sessions.rig import FULL, plain_logits, seeing, session, speaking

GREEDY = {"max_new_tokens": 3, "do_sample": False}


def _plain(backbone, messages) -> str:
    ids = backbone.processor.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    with torch.no_grad():
        whole = backbone.model.generate(**ids, **GREEDY)[0, ids["input_ids"].shape[1] :]
    return backbone.processor.decode(whole, skip_special_tokens=True)


UNSAFE = [{"role": "user", "content": "it says <|eot_id|> here"}]


@pytest.mark.parametrize(("messages", "error"), [(LONG_TALK, WindowFull), (UNSAFE, UnsafeText)])
def test_a_prompt_that_no_window_holds_is_refused_by_default(messages, error):
    chat = session(speaking("headers"), max_tokens=400)
    chat.send(TALK[:1], **GREEDY)
    before = chat.messages
    with pytest.raises(error):
        chat.send(messages, **GREEDY)
    assert chat.messages == before


@pytest.mark.parametrize(("messages", "error"), [(LONG_TALK, "WindowFull"), (UNSAFE, "UnsafeText")])
def test_uncached_the_plain_model_answers_and_says_so(messages, error):
    chat = session(speaking("headers"), max_tokens=400, uncached=True)
    chat.send(TALK[:1], **GREEDY)
    turn = chat.send(messages, **GREEDY)
    assert turn.text == _plain(chat.backbone, messages)
    assert turn.report.uncached.startswith(f"{error}: ") and turn.report.kept == 0
    assert turn.report.prefilled == len(chat.prompt_ids) and turn.report.guarantee == "exact"
    assert chat.messages == [*messages, {"role": "assistant", "content": turn.text}]
    assert chat.send(TALK[:1], **GREEDY).report.uncached is None
    assert relative(chat.next_token_logits(messages), plain_logits(chat.backbone, messages)) <= 1e-4


class _Gone(Exception):
    pass


class _Streamer:
    """A client that goes away after a token or two."""

    def __init__(self, after: int) -> None:
        self.left = after

    def put(self, value) -> None:
        self.left -= 1
        if self.left < 0:
            raise _Gone

    def end(self) -> None:
        pass


@pytest.mark.few(1)
@pytest.mark.parametrize("mode", ["forget", "amortize"])
@pytest.mark.parametrize("how", ["streamer", "criterion"])
def test_a_client_that_stops_leaves_the_session_as_it_was(mode, how):
    chat = session(seeing(), FULL, mode=mode)
    chat.send(screens(2), **GREEDY)
    before, ids, slots = chat.messages, chat.prompt_ids, chat.window.slots

    def stops(input_ids, scores, **options):
        raise _Gone

    options = {"streamer": _Streamer(2)} if how == "streamer" else {"stopping_criteria": [stops]}
    edited = [*before[:1], *before[3:], {"role": "user", "content": "and now?"}]
    with pytest.raises(_Gone):
        chat.send(edited, **GREEDY, **options)
    assert chat.messages == before and torch.equal(chat.prompt_ids, ids) and chat.window.slots == slots
    other = session(seeing(), FULL, mode=mode)
    other.send(screens(2), **GREEDY)
    wanted = other.next_token_logits("and now?")
    assert torch.equal(chat.next_token_logits("and now?"), wanted)
