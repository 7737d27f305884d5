"""A recorded call as a prompt: tokens of its messages, with the places where each begins."""

from __future__ import annotations

from kamera.reuse.otel import Call
from kamera.reuse.prompt import Media, Prompt, Span
from kamera.reuse.words import Tokenise

_PICTURE = 2**32 - 1  # no tokenizer's id


def render(call: Call, tokenise: Tokenise, *, media_tokens: int = 1024) -> Prompt:
    """The tokens of ``call``: its tools, then its messages, each behind a line that names its role.

    No model's chat template: parts are tokenised one by one, and a picture is ``media_tokens`` equal tokens.
    What moves and what stays is the trace's; counts of tokens are about right. Anchors are the messages'
    starts, spans the tools.
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
