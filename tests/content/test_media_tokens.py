"""Media before they become tokens: each is processed once, few pixels are kept, and too many are refused."""

from __future__ import annotations

import base64
import io
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from kamera import Backbone, ChatSession, ChunkStore
from kamera.content import Conversations
from kamera.errors import WindowFull
from tests.content.templates import picture
from tests.models import processors
from tests.sessions.rig import EXACT, plain_logits

GREEDY = {"max_new_tokens": 1, "do_sample": False}


class Counting(processors.PictureProcessor):
    """A processor that counts the pictures it is given."""

    seen = 0

    def __call__(self, images: Any = None, **options: Any) -> Any:
        self.seen += np.size(images, 0) if images is not None else 0
        return super().__call__(images=images, **options)


def counting() -> Counting:
    stock = processors.picture_processor()
    return Counting(stock.image_processor, stock.tokenizer, chat_template=processors.CHATML)


def item(image: Any, **options: Any) -> dict[str, Any]:
    return {"type": "image", "image": image, **options}


def user(*parts: Any) -> dict[str, Any]:
    return {
        "role": "user",
        "content": [p if isinstance(p, dict) else {"type": "text", "text": p} for p in parts],
    }


def png(image: Image.Image) -> bytes:
    into = io.BytesIO()
    image.save(into, "PNG")
    return into.getvalue()


def bomb(side: int) -> bytes:
    return png(Image.new("1", (side, side), 1))


def resident(key: str) -> int:
    line = next(one for one in Path("/proc/self/status").read_text().splitlines() if one.startswith(key))
    return int(line.split()[1]) << 10


@pytest.mark.few(1)
@pytest.mark.parametrize("whole", [False, True])
def test_a_history_is_processed_once_however_its_pictures_come_again(whole):
    processor = counting()
    chat = ChatSession(
        Backbone(processors.matching_model(), processor), ChunkStore.open("memory://"), policy=EXACT
    )
    before, messages = processor.seen, []
    for number in range(4):
        messages.append(user(item(png(picture(number))), "what?"))
        chat.send(messages if whole else messages[-1], **GREEDY)
        messages.append(chat.messages[-1])
    compared = processor.seen - before - 4  # stand-ins, once for each number of pictures
    assert compared <= 1 + 2 + 3 + 4 + 4, "and each picture once"
    again = processor.seen
    chat.send("and now?", **GREEDY)
    assert processor.seen == again
    shown = [{**message} for message in chat.messages]
    for number in range(4):
        shown[2 * number] = user(item(picture(number)), "what?")
    want = plain_logits(chat.backbone, [*shown, user("so?")])
    got = chat.next_token_logits("so?")
    assert float((got - want).norm() / want.norm()) < 1e-4


@pytest.mark.parametrize("given", ["bytes", "picture", "data url", "file"])
def test_media_of_too_many_tokens_are_refused_before_they_are_decoded(given, tmp_path):
    data = png(Image.new("L", (64, 64)))
    if given in ("bytes", "file"):
        data = data[:50]  # its size alone
    (tmp_path / "a.png").write_bytes(data)
    source = {
        "bytes": data,
        "picture": Image.new("L", (64, 64)),
        "data url": "data:image/png;base64," + base64.b64encode(data).decode(),
        "file": tmp_path / "a.png",
    }[given]
    conversations = Conversations(processors.picture_processor(), most=80)  # each has 64 tokens
    with pytest.raises(WindowFull, match=r"more than 160 tokens, .* 80 positions"):
        conversations.render([user(*[item(source)] * 3, "which?")])
    small = {"max_pixels": 32 * 32}
    if given in ("picture", "data url"):
        assert (
            conversations.render([user(*[item(source)] * 2, *[item(source, **small)] * 2)]).num_tokens > 160
        )


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="tells its memory elsewhere")
def test_eight_bombs_cost_little_memory():
    """40 megapixels of one bit each, 40 KB together; a picture of 64 tokens to this model."""
    chat = ChatSession(
        Backbone(processors.matching_model(), processors.picture_processor()),
        ChunkStore.open("memory://"),
        policy=EXACT,
    )
    chat.send(user(item(picture(1)), "hello"), **GREEDY)
    bombs = [item(bomb(6316 + i)) for i in range(8)]
    assert sum(len(one["image"]) for one in bombs) < 130_000
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
    chat.send(user(*bombs, "which?"), **GREEDY)
    assert len(chat.prompt_ids) > 8 * 64
    assert resident("VmHWM") - before < 0.6 * 2**30
    assert resident("VmRSS") - before < 0.3 * 2**30
