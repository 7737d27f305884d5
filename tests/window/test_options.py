"""Options of an answer are taken, or refused by name before anything runs."""

from __future__ import annotations

import pytest
import torch
from transformers import GenerationConfig

from kamera import ChunkStore, KameraWindow
from kamera.sessions import SessionPool
from tests.content.templates import TALK
from tests.models import tiny
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
    "contrastive search": ({"penalty_alpha": 0.6, "top_k": 4}, "penalty_alpha=0.6 is no option behind a"),
    "DoLa": ({"dola_layers": "high"}, "dola_layers='high' is no option behind a cache"),
    "groups of beams": ({"num_beams": 2, "num_beam_groups": 2}, "num_beam_groups=2 is no option behind"),
    "words to hold": ({"force_words_ids": [[3]], "num_beams": 2}, "force_words_ids=[[3]] is no option"),
    "another loop": ({"custom_generate": lambda **_: None}, "custom_generate="),
    "another prompt": ({"negative_prompt_ids": torch.ones(1, 2)}, "negative_prompt_ids="),
    "guidance": (
        {"guidance_scale": 1.5},
        "guidance_scale=1.5 is no option behind a cache: it runs the model",
    ),
    "guidance by a config": (
        {"generation_config": GenerationConfig(guidance_scale=1.5)},
        "guidance_scale=1.5 of the generation_config is no option",
    ),
    "another end of the prompt": ({"token_healing": True}, "token_healing=True is no option"),
    "an early exit": ({"assistant_early_exit": 1}, "assistant_early_exit=1 is no option behind a cache"),
    "heads that draft": ({"use_mtp": True}, "use_mtp=True is no option"),
    "another draft": ({"speculation_type": "dflash"}, "is no option behind a cache"),
    "no drafts": ({"prompt_lookup_num_tokens": 0}, "prompt_lookup_num_tokens=0: give a whole number"),
    "drafts of beams": ({"prompt_lookup_num_tokens": 3, "num_beams": 2}, "2 beams or answers with drafted"),
    "no assistant": ({"assistant_model": "llama"}, "assistant_model='llama' cannot draft"),
    "an assistant that encodes": ({"assistant_model": tiny.build("llama_mqa").model}, "cannot draft"),
    "other words": (
        {"assistant_model": tiny.build("llama_mqa")},
        "of a vocabulary of 160 tokens, this",
    ),
    "a translator": (
        {"assistant_model": tiny.build("llama_mqa"), "assistant_tokenizer": "x"},
        "assistant_tokenizer='x' is no option behind a cache: give an assistant_model with the model's own",
    ),
}


@pytest.mark.few(6)
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


def test_an_answer_ends_at_a_stop_string():
    window = KameraWindow(speaking("headers"), ChunkStore.open("memory://"), policy=EXACT)
    window.append("It rains.")
    said = window.generate("Does it?", max_new_tokens=12, do_sample=False)
    end = next(letter for letter in said if letter.isascii())
    stopped = window.generate("Does it?", max_new_tokens=12, do_sample=False, stop_strings=[end])
    assert stopped == said[: said.index(end) + 1]
