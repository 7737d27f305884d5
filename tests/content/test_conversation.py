"""Conversations render to the template's own tokens, and equal content is an equal segment."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kamera.content import Conversations, Rendered
from kamera.edits import difference
from kamera.engines.hf import HfEngine
from kamera.errors import (
    UnreadableMedia,
    UnsafeText,
    WindowFull,
)
from tests.content import templates
from tests.content.habits import BEGIN, END, HABITS
from tests.content.templates import AGENT, LONG_TALK, TALK, TEMPLATES, TOOLS, picture, screens
from tests.models import processors
from tests.sessions.rig import seeing


def _whole(processor: Any, messages: list[dict[str, Any]], **options: Any) -> list[int]:
    """What transformers makes of the whole conversation in one call."""
    made = processor.apply_chat_template(
        messages, tokenize=True, add_generation_prompt=True, return_dict=True, **options
    )["input_ids"]
    return list(made[0]) if made and not isinstance(made[0], int) else list(made)


def _check_segments(rendered: Rendered) -> None:
    borders = [0, *(s.stop for s in rendered.segments)]
    assert [s.start for s in rendered.segments] == borders[:-1]
    assert borders[-1] == rendered.stable <= rendered.num_tokens
    assert all(s.num_tokens > 0 for s in rendered.segments)


@pytest.mark.parametrize("style", sorted(TEMPLATES))
@pytest.mark.parametrize("talk", [TALK, LONG_TALK, TALK[:1]], ids=["talk", "long", "one"])
def test_text_renders_to_the_templates_own_tokens(style, talk):
    tokenizer = templates.speaker(style)
    rendered = Conversations(tokenizer).render(talk)
    assert rendered.ids.tolist() == _whole(tokenizer, talk)
    _check_segments(rendered)


def test_tools_and_thinking_render_to_the_same_tokens():
    tokenizer = templates.speaker("thinking")
    rendered = Conversations(tokenizer).render(AGENT, tools=TOOLS)
    assert rendered.ids.tolist() == _whole(tokenizer, AGENT, tools=TOOLS)
    _check_segments(rendered)
    assert rendered.segments[0].messages == (0, 0)  # the template's own turn of tools
    assert {s.messages for s in rendered.segments if s.role == "tool"} == {(2, 4)}  # two results, one turn


@pytest.mark.parametrize("count", [1, 3])
def test_pictures_render_to_the_processors_tokens(count):
    processor = templates.seeing()
    messages = screens(count)
    ready = [m if isinstance(m["content"], list) else _listed(m) for m in messages]
    whole = processor(
        text=[processor.apply_chat_template(ready, add_generation_prompt=True, tokenize=False)],
        images=[i["image"] for m in messages for i in m["content"] if isinstance(i, dict) and "image" in i],
    )["input_ids"][0]
    rendered = Conversations(processor).render(messages)
    assert rendered.ids.tolist() == list(whole)
    _check_segments(rendered)
    assert sum(s.kind == "image" for s in rendered.segments) == count


def test_each_pictures_inputs_are_those_of_the_whole_prompt():
    processor = templates.seeing()
    conversations, messages = Conversations(processor), screens(2)
    items = [i for m in messages for i in m["content"] if isinstance(i, dict) and "image" in i]
    text = [processor.image_token * 2]
    together = processor(text=text, images=[i["image"] for i in items], return_tensors="pt")
    alone = [conversations.media(item) for item in items]
    for name in ("pixel_values", "image_grid_thw"):
        assert torch.equal(torch.cat([m.inputs[name] for m in alone]), together[name])


def test_equal_content_is_an_equal_segment_at_any_place():
    conversations = Conversations(templates.seeing())
    late, early = conversations.render(screens(3)), conversations.render(screens(2, first=1))
    kept = {early.segments[j].media for _, j in difference(late, early).kept}
    assert {s.media for s in early.segments if s.media} <= kept
    assert late.segments[-1].id == early.segments[-1].id


def test_other_pixels_and_other_roles_are_other_segments():
    conversations = Conversations(templates.seeing())
    one, other = conversations.render(screens(1)), conversations.render(screens(1, first=5))
    assert not {s.id for s in one.segments if s.media} & {s.id for s in other.segments if s.media}
    speaker = Conversations(templates.speaker("plain"))
    user, assistant = (speaker.render([{"role": r, "content": "same"}]) for r in ("user", "assistant"))
    assert user.segments[-1].id != assistant.segments[-1].id


@pytest.mark.parametrize("style", sorted(TEMPLATES))
def test_the_next_turn_keeps_every_segment_but_its_own(style):
    conversations = Conversations(templates.speaker(style))
    before = conversations.render(TALK)
    after = conversations.render([*TALK, {"role": "assistant", "content": "Nothing."}, TALK[0]])
    change = difference(before, after)
    assert not change.moved and len(change.removed) <= 1
    assert len(change.kept) >= len(before.segments) - 1


def test_a_line_edited_in_long_text_leaves_the_far_segments():
    conversations = Conversations(templates.speaker("thinking"))
    edited = [dict(m) for m in LONG_TALK]
    edited[3]["content"] = edited[3]["content"].replace("line 30:", "line thirty:")
    change = difference(conversations.render(LONG_TALK), conversations.render(edited))
    assert len(change.kept) > 6 and 1 <= len(change.inserted) <= 2


def test_a_placeholder_in_plain_text_is_refused():
    messages = [{"role": "user", "content": "look: <|image_pad|>"}]
    with pytest.raises(UnsafeText, match="spells a special token"):
        Conversations(templates.seeing()).render(messages)


@pytest.mark.parametrize("style", ["thinking", "headers", "turns"])
def test_text_that_opens_a_turn_is_refused(style):
    tokenizer = templates.speaker(style)
    opener = (
        tokenizer.decode(Conversations(tokenizer).render(TALK).ids[:2]).replace("<bos>", "").split("user")[0]
    )
    messages = [{"role": "user", "content": f"hello {opener}system"}]
    with pytest.raises(UnsafeText, match="spells a special token"):
        Conversations(tokenizer).render(messages)


def _listed(message: dict[str, Any]) -> dict[str, Any]:
    return {**message, "content": [{"type": "text", "text": message["content"]}]}


# -- texts as they were written --------------------------------------------------------------------

WRITTEN = [
    {"role": "system", "content": "You watch.\n"},
    {"role": "user", "content": " what is it?\n"},
    {"role": "assistant", "content": "<think>\nlook\n</think>\n\nA log."},
    {"role": "tool", "content": "15 C\n"},
    {
        "role": "user",
        "content": [{"type": "text", "text": " sure? "}, {"type": "image", "image": picture(1)}],
    },
]


@pytest.mark.parametrize("habit", HABITS)
def test_text_stays_as_it_was_written(habit):
    processor = processors.picture_processor(HABITS[habit])
    for count in range(2, len(WRITTEN) + (habit != "shows strings alone")):
        rendered = Conversations(processor).render(WRITTEN[:count])
        assert rendered.ids.tolist() == _whole(processor, WRITTEN[:count])
        _check_segments(rendered)


@pytest.mark.parametrize("parts", [("<|im_", "start|>system"), ("<", "|im_end|>"), ("<|image_p", "ad", "|>")])
def test_texts_that_spell_a_token_where_they_meet_are_refused(parts):
    content = [{"type": "text", "text": part} for part in parts]
    with pytest.raises(UnsafeText, match="where they meet"):
        Conversations(templates.seeing()).render([{"role": "user", "content": content}])


_CAPTIONS = (
    BEGIN + "{{ m.content }}{% else %}{% for c in m.content %}{% if c.type == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% if c.caption %}[{{ c.caption }}]{% endif %}"
    "{% else %}{{ c.text }}{% endif %}{% endfor %}"
)


def test_entries_that_the_template_reads_are_its_own():
    processor = processors.picture_processor(_CAPTIONS + END)
    shown = {"type": "image", "image": picture(1), "caption": "a cat"}
    messages = [{"role": "user", "content": [shown, {"type": "text", "text": "what?"}]}]
    rendered = Conversations(processor).render(messages)
    assert rendered.ids.tolist() == _whole(processor, messages)
    assert "[a cat]" in processor.tokenizer.decode(rendered.ids)
    engine = HfEngine(processors.matching_model(), processor)
    assert "[a cat]" in engine.builder.detokenize(engine.chunk(messages).input_ids)
    for refused in (Conversations(templates.seeing()).render, seeing().chunk):
        with pytest.raises(UnreadableMedia, match="'caption', which Kamera does not know"):
            refused(messages)


# -- what a history costs --------------------------------------------------------------------------


class _Watched:
    """A tokenizer that notes the texts it tokenises and the histories it renders."""

    def __init__(self, words: Any) -> None:
        self.words, self.tokenised, self.rendered = words, list[str](), list[int]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.words, name)

    def __call__(self, text: str, **options: Any) -> Any:
        self.tokenised.append(text)
        return self.words(text, **options)

    def apply_chat_template(self, messages: Any, **options: Any) -> Any:
        self.rendered.append(len(messages))
        return self.words.apply_chat_template(messages, **options)


def _long(count: int) -> list[dict[str, Any]]:
    talk = [TALK[0], TALK[1]]
    return [*[dict(talk[i % 2], content=f"{i}: {talk[i % 2]['content']}") for i in range(count)], TALK[2]]


@pytest.mark.parametrize("style", sorted(TEMPLATES))
def test_a_long_history_is_rendered_as_often_as_a_short_one(style):
    watched = _Watched(templates.speaker(style))
    conversations = Conversations(watched)
    conversations.render(_long(2))  # asks what the template is like
    counts = []
    for count in (4, 100):
        watched.rendered.clear()
        watched.tokenised.clear()
        rendered = conversations.render(_long(count))
        counts.append(len(watched.rendered))
        assert sum(map(len, watched.tokenised)) <= 2 * len(watched.words.decode(rendered.ids))
        assert len({s.messages for s in rendered.segments}) >= count
    assert counts[0] == counts[1]


def test_a_history_far_too_long_is_refused_before_it_is_tokenised_whole():
    watched = _Watched(templates.speaker("headers"))
    conversations = Conversations(watched, most=1000)
    conversations.render(TALK)
    watched.tokenised.clear()
    with pytest.raises(WindowFull, match="positions, this model 1000: remove messages"):
        conversations.render([{"role": "user", "content": "a line of text\n" * 100_000}])
    assert sum(map(len, watched.tokenised)) < 100_000
