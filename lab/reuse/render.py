"""A recorded call as a prompt: tokens of its messages, with the start of each."""

from __future__ import annotations

from kamera.reuse.prompt import Media, Prompt, Span
from lab.reuse.otel import Call
from lab.reuse.words import Tokenise

_PICTURE = 2**32 - 1  # not an id of any tokenizer


def render(call: Call, tokenise: Tokenise, *, media_tokens: int = 1024) -> Prompt:
    """The tokens of ``call``: its tools, then its messages, each after a line with its role.

    This is not a model's chat template: parts are tokenised one by one, and a picture is ``media_tokens``
    equal tokens, so token counts are approximate while repetitions are those of the trace. Anchors are the
    starts of messages, spans the tools.
    """
    ids: list[int] = []
    anchors: list[int] = []
    media: list[Media] = []
    spans: list[Span] = []
    if call.tools:
        anchors.append(0)
        ids += tokenise("<|tools|>\n")
        for tool in call.tools:
            start = len(ids)
            ids += tokenise(tool + "\n")
            if len(ids) > start:
                spans.append(Span(start, len(ids), "tool"))
    for message in call.messages:
        anchors.append(len(ids))
        ids += tokenise(f"<|{message.role}|>\n")
        for part in message.parts:
            if part.digest:
                media.append(Media(len(ids), len(ids) + media_tokens, part.digest))
                ids += [_PICTURE] * media_tokens
            else:
                ids += tokenise(part.text)
        ids += tokenise("\n")
    return Prompt.of(ids, anchors=anchors, media=media, spans=spans, placeholders=(_PICTURE,))
