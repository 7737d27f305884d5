"""An answer streams, ends at a stop string, and leaves nothing when its reader goes away."""

from __future__ import annotations

import pytest
import torch

from tests.content.templates import screens
from tests.engines.compare import relative
from tests.sessions.rig import plain_logits, seeing, session


class Reader:
    """Takes an answer's tokens as they come, and may go away."""

    def __init__(self, tokenizer, leaves_after: int | None = None) -> None:
        self.tokenizer, self.leaves_after = tokenizer, leaves_after
        self.prompt, self.ids, self.ended = None, [], False

    def put(self, value: torch.Tensor) -> None:
        if self.prompt is None:
            self.prompt = value
            return
        self.ids += value.flatten().tolist()
        if self.leaves_after is not None and len(self.ids) >= self.leaves_after:
            raise ConnectionResetError("the client is gone")

    def end(self) -> None:
        self.ended = True

    @property
    def text(self) -> str:
        return self.tokenizer.decode(self.ids, skip_special_tokens=True)


@pytest.mark.parametrize("scratch", [(), ({"role": "user", "content": "think"},)])
def test_a_reader_that_goes_away_leaves_the_session_as_it_was(scratch):
    chat = session(seeing())
    chat.send(screens(2), max_new_tokens=2, do_sample=False)
    before, ids, slots = chat.messages, chat.prompt_ids, chat.window.slots
    reader = Reader(chat.backbone.processor.tokenizer, leaves_after=2)
    with pytest.raises(ConnectionResetError):
        chat.send(screens(3), max_new_tokens=6, do_sample=False, streamer=reader, scratch=scratch)
    assert len(reader.ids) == 2 and not reader.ended
    assert chat.messages == before and torch.equal(chat.prompt_ids, ids) and chat.window.slots == slots
    after = [*before, {"role": "user", "content": "and now?"}]
    assert relative(chat.next_token_logits(after), plain_logits(seeing(), after)) <= 1e-4
