"""Options of an answer are taken, or refused by name before anything runs."""

from __future__ import annotations

import pytest

from kamera import ChunkStore, KameraWindow
from kamera.sessions import SessionPool
from tests.content.templates import TALK
from tests.sessions.rig import EXACT, session, speaking

WRONG = {
    "stop": ({"stop": ["\n"]}, "use stop_strings"),
    "n": ({"n": 2}, "n=2 is no option of an answer: use num_return_sequences"),
    "logprobs": ({"logprobs": True}, "logprobs"),
    "max_tokens": ({"max_tokens": 5}, "use max_new_tokens"),
    "unknown": ({"max_new_token": 5}, "max_new_token=5 is no option of an answer: leave it out"),
    "long": ({"response_format": "x" * 31_598}, "is no option"),
    "ours": ({"past_key_values": None}, "past_key_values=None is no option"),
    "cache": ({"cache_implementation": "static"}, "is no option"),
    "pixels": ({"pixel_values": 3}, "is no option"),
    "no tokens": ({"max_new_tokens": 0}, "max_new_tokens=0: give a whole number from 1 on"),
    "tokens in text": ({"max_new_tokens": "9"}, "max_new_tokens='9': give a whole number"),
    "temperature": ({"temperature": -1.0, "do_sample": True}, "temperature=-1.0: give a number from 0 on"),
    "no temperature": (
        {"temperature": 0, "do_sample": True},
        "temperature=0 with sampling: use do_sample=False",
    ),
    "top_p": ({"top_p": 1.5, "do_sample": True}, "top_p=1.5: give a number from 0 to 1"),
    "config": ({"generation_config": {"do_sample": True}}, "generation_config={'do_sample': True} is none"),
    "early stopping": ({"early_stopping": "soon"}, "are refused"),
}


def test_a_window_takes_no_seed_which_sessions_take():
    backbone = speaking("headers")
    window = KameraWindow(backbone, ChunkStore.open("memory://"), policy=EXACT)
    with pytest.raises(ValueError, match=r"seed=7 is no option of an answer: use torch\.manual_seed"):
        window.generate("Does it?", seed=7)
    session(backbone).send(TALK, seed=7, max_new_tokens=1, do_sample=True)


@pytest.mark.parametrize("wrong", WRONG)
def test_an_option_that_is_none_is_refused_before_anything_runs(wrong):
    options, says = WRONG[wrong]
    backbone = speaking("headers")
    window = KameraWindow(backbone, ChunkStore.open("memory://"), policy=EXACT)
    window.append("It rains.")
    chat = session(backbone)
    chat.send(TALK[:1], max_new_tokens=2, do_sample=False)
    pool = SessionPool(backbone, ChunkStore.open("memory://"), policy=EXACT)
    before, held = window.slots, chat.messages
    with backbone.measure() as work:
        for ask in (
            lambda: window.generate("Does it?", **options),
            lambda: window.generate("Does it?", keep=True, **options),
            lambda: chat.send("And now?", **options),
            lambda: session(backbone, uncached=True).send(TALK, **options),
            lambda: pool.send(TALK, **options),
        ):
            with pytest.raises(ValueError) as caught:
                ask()
            assert says in str(caught.value)
            assert "\n" not in str(caught.value)
            assert len(str(caught.value)) < 400
    assert work.forwards == 0
    assert window.slots == before
    assert chat.messages == held
    assert len(pool) == 0


def test_options_of_transformers_are_taken():
    backbone = speaking("headers")
    window = KameraWindow(backbone, ChunkStore.open("memory://"), policy=EXACT)
    window.append("It rains.")
    said = window.generate("Does it?", max_new_tokens=6, do_sample=False)
    assert window.generate("Does it?", max_new_tokens=6, do_sample=False, stop_strings=["\x00never"]) == said
    some = window.generate("Does it?", max_new_tokens=2, do_sample=True, temperature=0.7, top_p=0.9, top_k=5)
    assert isinstance(some, str)
    assert len(window.generate("Does it?", max_new_tokens=2, num_beams=2, num_return_sequences=2)) == 2
    config = backbone.model.generation_config
    assert window.generate("Does it?", generation_config=config, max_new_tokens=6, do_sample=False) == said


def test_an_answer_ends_at_a_stop_string():
    window = KameraWindow(speaking("headers"), ChunkStore.open("memory://"), policy=EXACT)
    window.append("It rains.")
    said = window.generate("Does it?", max_new_tokens=12, do_sample=False)
    end = next(letter for letter in said if letter.isascii())
    stopped = window.generate("Does it?", max_new_tokens=12, do_sample=False, stop_strings=[end])
    assert stopped == said[: said.index(end) + 1]
