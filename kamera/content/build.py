"""Chunk building: user content in any form, to token text, token ids and model inputs.

A window's sequence is ``prefix · chunk · chunk · … · question · tail``. Rendering the template with a
marker for the user's content finds the borders, so any template that keeps the user's content in one
piece works; others are refused by name.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from PIL import Image
from torch import nn

from kamera.content.borders import common_prefix
from kamera.content.chunk import POSITION_INPUTS, TOKEN_TYPES, Chunk
from kamera.content.items import (
    Turn,
    as_messages,
    as_turns,
    check_role,
    items_of,
    make_turns,
    own_entries,
    strings_in,
    text_turns,
)
from kamera.content.limits import DEFAULT_LIMITS, SIZES, MediaLimits, check_sizes
from kamera.content.media_tokens import MediaTokens
from kamera.content.plain import hold_tokenizer
from kamera.content.template import ChatTemplate, Seams, missing_text_error
from kamera.content.video import Clip, load_media
from kamera.errors import (
    EmptyChunk,
    IncompatibleChunk,
    ModalityNotSupported,
    ProcessorRequired,
    RoleNotSupported,
    UnsafeText,
    quote,
)

_MARK = "KAMERAMARK"
_START = "KAMERASTART"
_SOMETHING = "KAMERATEXT"


class PromptText(NamedTuple):
    """Rendered text; ``word`` replaces each of ``hidden``, texts that spell special tokens."""

    text: str
    word: str = ""
    hidden: tuple[str, ...] = ()


class PromptFormat(ChatTemplate):
    """A chat template that writes the parts of a window: its beginning, chunks and questions."""

    def __init__(self, processor: Any, media: Sequence[int] = ()) -> None:
        super().__init__(processor, media)
        self._unnumbered: set[tuple[tuple[str, ...], ...]] = set()

    def content_text(self, items: Sequence[dict[str, Any]]) -> str:
        """Token text of one chunk's content, placeholders unexpanded.

        ``items`` are ``{"type": "text", "text": …}``, ``{"type": "image"}`` or ``{"type": "video"}``.
        """
        if not self.has_template:
            tokens = {
                "image": getattr(self.processor, "image_token", ""),
                "video": getattr(self.processor, "video_token", ""),
            }
            return "".join(i["text"] if i["type"] == "text" else tokens[i["type"]] for i in items)
        if all(i["type"] == "text" for i in items):
            return "".join(i["text"] for i in items)
        return self._dialogue_text([{"role": "user", "content": list(items)}])

    def chunk(self, turns: Sequence[Turn]) -> PromptText:
        """A chunk, which begins and ends within a window's open user turn.

        Raises RoleNotSupported for a role that the template lacks, as all here, and ModalityNotSupported for
        a template that writes it otherwise behind others: a chunk has no number.
        """
        bare = self._is_bare(turns, "user")
        text = self._guard(turns, self._turn_text if bare else self._dialogue_text)
        if self.has_template and (
            not bare or any("text" not in item for turn in turns for item in items_of(turn))
        ):
            self._check_number(turns)
        return text

    def question(self, turns: Sequence[Turn], tail: str) -> PromptText:
        """A question within the user's open turn, up to the answer; ``tail`` follows one turn of the user."""
        bare = self._is_bare(turns, "user")
        return self._guard(turns, partial(self._turn_text, tail=tail) if bare else self._question_text)

    def opening(self, turns: Sequence[Turn]) -> PromptText:
        """The beginning of a window: a system prompt or messages, then the opening of the user's turn."""
        bare = self._is_bare(turns, "system")
        return self._guard(turns, self._opening_text if self.has_template or not bare else self._turn_text)

    def token_ids(self, written: PromptText, *, special: bool = False) -> torch.Tensor:
        """Token ids, int64 ``[tokens]``; ``special`` lets the tokenizer add its BOS."""
        ids = torch.tensor(self.ids(written.text, special=special), dtype=torch.int64)
        return self.plain.splice(ids, written.word, written.hidden, {})[0] if written.hidden else ids

    # -- inside --------------------------------------------------------------------------------

    def _guard(self, turns: Sequence[Turn], render: Callable[[list[Turn]], str]) -> PromptText:
        """``turns`` rendered; if texts spell a special token, alone or joined, one replaces each text."""
        for turn in map(self._shape_calls, turns):
            rest = {name: value for name, value in turn.items() if name not in ("role", "content")}
            rest |= {n: item[n] for item in items_of(turn) for n in self.entries & item.keys()}
            if not all(map(self.plain.is_plain, strings_in(rest))):
                raise UnsafeText(
                    f"{', '.join(map(str, rest))[:80]} of a {turn['role']} message spells a special token: "
                    "take it out"
                )
        parts = [item.get("text") for turn in turns for item in items_of(turn)]
        texts = tuple(text for text in parts if text)
        if self.plain.is_plain("".join(texts)):
            return PromptText(render(list(turns)))
        word = self.plain.unused_special_token(render([_with_text(turn, _SOMETHING) for turn in turns]))
        return PromptText(render([_with_text(turn, word) for turn in turns]), word, texts)

    def _turn_text(self, turns: list[Turn], tail: str = "") -> str:
        return self.content_text([item for turn in turns for item in items_of(turn)]) + tail

    def _dialogue_text(self, turns: list[Turn]) -> str:
        # A question always follows a chunk, and templates render media before text differently from
        # media alone (LLaVA, SmolVLM): render both.
        text, rest = self._from_open_turn(_with_mark(turns, _MARK), last=_MARK)
        if rest != self.seams(None).tail:
            raise _split_error()
        return text

    def _question_text(self, turns: list[Turn]) -> str:
        return self._from_open_turn(turns)[0]

    def _opening_text(self, turns: list[Turn]) -> str:
        whole = self.render(_with_mark(turns, _MARK), generation=True)
        text, mark, _ = whole.partition(_MARK)
        if not mark:
            raise missing_text_error()
        return text

    def _from_open_turn(self, turns: list[Turn], last: str = "") -> tuple[str, str]:
        """The text of ``turns`` from within an open user turn up to ``last``, and the text after it."""
        is_open = turns[0]["role"] == "user"
        whole = self.render(turns if is_open else [*make_turns("user", _START), *turns], generation=True)
        head, _, rest = whole.partition(last) if last else (whole, "", "")
        if is_open:
            return self._behind_prefix(head), rest
        _, mark, text = head.partition(_START)
        if not mark:
            raise missing_text_error()
        return text, rest

    def _behind_prefix(self, rendered: str) -> str:
        """``rendered`` without the window's prefix, with which it begins."""
        prefix = self.seams(None).prefix
        length = common_prefix(rendered, prefix)
        if prefix[length:].strip():  # whitespace may differ
            raise _split_error()
        return rendered[length:]

    def _is_bare(self, turns: Sequence[Turn], role: str) -> bool:
        """True if the turns are one message of this role with content alone.

        Raises RoleNotSupported for roles that the template lacks.
        """
        if all(turn == {"role": role, "content": turn.get("content")} for turn in turns) and len(turns) < 2:
            return True
        roles = [check_role(turn["role"]) for turn in turns]
        if not self.has_template:
            raise RoleNotSupported(
                f"no chat template writes the roles {quote(roles)}: give their text as content"
            )
        for role in dict.fromkeys(roles):
            if role not in ("user", "system"):
                self._check_kept(role)
        if any(turn.get("tool_calls") for turn in turns):
            self.check([*(make_turns("user", _START) if roles[0] != "user" else []), *turns])
        return False

    def _check_number(self, turns: Sequence[Turn]) -> None:
        """Refuse a template whose text of the turns depends on what is before them: numbers of pictures, say.

        Asks once for turns of these roles and kinds of items.
        """
        shape = tuple((turn["role"], *[item["type"] for item in items_of(turn)]) for turn in turns)
        if shape in self._unnumbered:
            return
        kinds = dict.fromkeys(i["type"] for turn in turns for i in items_of(turn) if i["type"] != "text")
        media: list[dict[str, Any]] = [{"type": kind, kind: ""} for kind in kinds]
        text, mark = ([{"type": "text", "text": word}] for word in (_SOMETHING, _MARK))
        asked, seen = ({"role": "user", "content": content} for content in (text, media + text))
        answer, marked = ({"role": "assistant", "content": word} for word in (_SOMETHING, _MARK))
        is_open = turns[0]["role"] == "user"
        opened: list[Turn] = [*turns] if is_open else [asked, *turns]
        groups: list[list[list[Turn]]] = [
            [[asked, marked, *opened], [seen, marked, *opened], [asked, answer, asked, marked, *opened]]
        ]
        if is_open:
            first, *rest = opened
            contents = [[*before, *mark, *items_of(first)] for before in (text, media + text)]
            groups.append([[{**first, "content": content}, *rest] for content in contents])
        for group in groups:
            try:
                pieces = [self.render(one, generation=False).partition(_MARK) for one in group]
            except RoleNotSupported:
                continue  # the template refuses this probe
            for _, found, other in pieces:
                if found and other != pieces[0][2]:
                    at = other.rfind("\n", 0, common_prefix(other, pieces[0][2])) + 1
                    one, other = (quote(piece[at : at + 24]) for piece in (pieces[0][2], other))
                    raise ModalityNotSupported(
                        f"the chat template writes {one}, and {other} behind others: a chunk of a window has "
                        "no number; use ChatSession, or build the chunk with chunk_from_tensors"
                    )
        self._unnumbered.add(shape)

    def _check_kept(self, role: str) -> None:
        """Refuse a template that drops the role's text or renders it as the user's."""

        def render_as(by: str) -> str:
            return self.render([*make_turns("user", "a"), *make_turns(by, _MARK)], generation=False)

        try:
            text = render_as(role)
        except RoleNotSupported:
            return  # the template refuses this probe: the message itself decides
        try:
            same = text == render_as("user")
        except RoleNotSupported:
            same = False
        if same or _MARK not in text:
            raise RoleNotSupported(
                f"the chat template does not write role {quote(role)}: give the text as a user's, or "
                "token ids"
            )


def _split_error() -> ModalityNotSupported:
    return ModalityNotSupported(
        "the chat template does not keep a user's media and text in one piece: build the chunk with "
        "chunk_from_tensors"
    )


def _with_text(turn: Turn, word: str) -> Turn:
    """The turn with ``word`` for each of its texts."""
    content = turn["content"]
    if isinstance(content, str):
        return {**turn, "content": word if content else ""}
    return {**turn, "content": [{**i, "text": word} if i.get("text") else i for i in content]}


def _with_mark(turns: Sequence[Turn], mark: str) -> list[Turn]:
    """``turns`` with ``mark`` at the end of the user's turn."""
    if not turns or turns[-1]["role"] != "user":
        return [*turns, {"role": "user", "content": mark}]
    content = turns[-1]["content"]
    more = content + mark if isinstance(content, str) else [*content, {"type": "text", "text": mark}]
    return [*turns[:-1], {**turns[-1], "content": more}]


Content = Any
"""A string, a picture, a path, frames, one chat content item, a list of items, or chat messages.

A string that names a picture or a video (its path, a data url) is that; any other is text.
"""

Spoken = str | torch.Tensor | Sequence[int] | Mapping[str, Any] | Sequence[Mapping[str, Any]]
"""Text, token ids ``[tokens]``, or chat messages."""

_GRIDS = {"pixel_values": "image_grid_thw", "pixel_values_videos": "video_grid_thw"}

_NO_CONTENT = {
    "inputs_embeds": "its embeddings are those of its token ids",
    "labels": "nothing is trained",
    "logits_to_keep": "a question asks for logits",
    "mm_encoder_outputs": "its pictures are encoded once, and kept",
    "past_key_values": "a window has the KV in front of it",
    "position_ids": "a window gives it positions, which are the model's own",
    "use_audio_in_video": "it has no sound",
    "use_cache": "its KV is always kept",
}
"""Arguments of a model's forward that are no content, and why."""


class ChunkBuilder:
    """Turns content into chunks for one model and processor.

    ``sees`` is True if the model has a vision tower, ``limits`` bound its media.
    """

    def __init__(
        self, model: nn.Module, processor: Any | None, *, sees: bool, limits: MediaLimits = DEFAULT_LIMITS
    ) -> None:
        self.model, self.limits = model, limits
        forward: Any = model.forward
        self.accepted = [
            n
            for n, p in inspect.signature(forward).parameters.items()
            if p.kind is not inspect.Parameter.VAR_KEYWORD
        ]
        self.takes_pixels = sees and "pixel_values" in self.accepted
        config: Any = model.config
        self.image_token = _first(config, "image_token_id", "image_token_index")
        self.video_token = _first(config, "video_token_id", "video_token_index")
        both = (self.image_token, self.video_token)
        self.vision_tokens = tuple(token for token in both if token is not None)
        """Ids of the tokens that picture and clip features replace."""
        self.format = None if processor is None else PromptFormat(processor, self.vision_tokens)
        self._media = None if self.format is None else MediaTokens(self.format)

    @property
    def generation_config(self) -> Any:
        """The model's own settings of its answers; None for a model without."""
        return getattr(self.model, "generation_config", None)

    @property
    def token_count(self) -> int:
        """Number of token ids of the model: valid ones are below it."""
        return int(self.model.get_input_embeddings().weight.shape[0])  # type: ignore[operator, union-attr, arg-type]

    def from_content(self, content: Content, fingerprint: str) -> Chunk:
        """Build a chunk from chat content or messages, an image, frames, a video file or text.

        A single user message gives its content only, because a window is within the user's turn. Messages of
        other roles close that turn, and the chunk opens it again.
        """
        turns = as_turns(content)
        items = [item for turn in turns for item in items_of(turn)]
        if not items and not any(turn.keys() > {"role", "content"} for turn in turns):
            raise EmptyChunk(f"content {quote(content)} is empty: give text, an image or a video")
        if self.format is None:
            raise ProcessorRequired(
                "this backbone has no processor, so content cannot be tokenised: pass one "
                "(Backbone(model, processor)) or use chunk_from_tensors"
            )
        media = [i["type"] for i in items if i["type"] != "text"]
        if media and not (self.takes_pixels and "image" in self.format.kinds):
            raise ModalityNotSupported(
                f"{type(self.model).__name__} with {type(self.format.processor).__name__} takes text "
                f"only, the content holds {sorted(set(media))}: "
                + (self.format.lacks(media) or "use a vision-language backbone")
            )
        if any(map(own_entries, items)) and self.format.has_template:
            self.format.read_entries(turns)
        turns = [
            turn if isinstance(turn["content"], str) else {**turn, "content": self._load(turn["content"])}
            for turn in turns
        ]
        return self._process(turns, fingerprint)

    def question_ids(self, question: Spoken, tail: str) -> torch.Tensor:
        """Token ids of a question, int64 ``[tokens]``; ``tail`` follows text, the template ends messages.

        Special tokens spelt in text are text (`PlainText`); ids are checked against the vocabulary.
        """
        messages = as_messages(question)
        if messages is None and not isinstance(question, str):
            return self.check_ids(question)
        template = self._template_for(str(question))
        turns = make_turns("user", str(question)) if messages is None else text_turns(messages, "question")
        return template.token_ids(template.question(turns, tail))

    def anchor_ids(self, system: Spoken | None) -> torch.Tensor:
        """Token ids of the anchor for this system prompt, int64 ``[tokens]``.

        Without a processor, None gives no tokens and text raises ProcessorRequired.
        """
        messages = None if system is None else as_messages(system)
        if system is not None and not isinstance(system, str) and messages is None:
            return self.check_ids(system)
        if self.format is None and not system:
            return torch.empty(0, dtype=torch.int64)
        template = self._template_for(str(system))
        turns = text_turns(messages, "system prompt") if messages else []
        turns = make_turns("system", system) if isinstance(system, str) else turns
        # without a template the tokenizer's own BOS opens the sequence
        return template.token_ids(template.opening(turns), special=not template.has_template)

    def seams(self, system: str | None) -> Seams:
        """The chat template's text before the first chunk, after a question, and after an answer."""
        return Seams(system or "", "", "") if self.format is None else self.format.seams(system)

    def check_ids(self, given: Any) -> torch.Tensor:
        """Token ids ``[tokens]`` as int64 on the CPU. Raises ValueError unless they are ids of this model."""
        try:
            ids = torch.as_tensor(given)
        except (TypeError, ValueError, RuntimeError):
            raise ValueError(f"{quote(given)} of {type(given).__name__}: give integer ids [tokens]") from None
        if ids.dim() == 2 and ids.shape[0] == 1:
            ids = ids[0]
        if ids.numel() == 0:
            return torch.empty(0, dtype=torch.int64)  # of any dtype: torch makes an empty list floats
        if ids.dim() != 1 or ids.is_floating_point() or ids.dtype == torch.bool:
            raise ValueError(f"input_ids of shape {tuple(ids.shape)}, {ids.dtype}: give integer ids [tokens]")
        size = self.token_count
        if int(ids.min()) < 0 or int(ids.max()) >= size:
            raise ValueError(
                f"token id {int(ids.min()) if int(ids.min()) < 0 else int(ids.max())} is outside the "
                f"vocabulary of {size}: tokenise with this backbone's tokenizer"
            )
        return ids.to(device="cpu", dtype=torch.int64, copy=True)

    def from_tensors(
        self,
        input_ids: Any,
        inputs: Mapping[str, Any],
        fingerprint: str,
        label: str = "",
        picture: Image.Image | None = None,
    ) -> Chunk:
        """Build a chunk from token ids ``[tokens]`` (or ``[1, tokens]``) and the model's own inputs.

        Tokens that an ``attention_mask`` hides at either end are pads, and dropped. Token types are those
        given, else the processor's; without either they are read off the ids. Raises IncompatibleChunk for
        what is no content or does not belong together, ModalityNotSupported for an input of other models.
        """
        ids = self.check_ids(input_ids)
        given = {name: value for name, value in inputs.items() if value is not None}
        shown = _shown_tokens(given.pop("attention_mask", None), ids)
        length, ids = ids.shape[0], ids[shown]
        if ids.numel() == 0:
            raise EmptyChunk("a chunk of no tokens: give at least one token id")
        tensors: dict[str, torch.Tensor] = {}
        for name, value in given.items():
            if name not in self.accepted:
                raise ModalityNotSupported(
                    f"{type(self.model).__name__} takes no {quote(name)}; it takes "
                    f"{[n for n in self.accepted if 'pixel' in n or 'grid' in n] or 'text only'}"
                )
            if not _is_content(name):
                why = _NO_CONTENT.get(name, "a chunk is token ids, pictures and clips")
                raise IncompatibleChunk(f"{name} is no content of a chunk: {why}; leave it out")
            tensors[name] = _tensor(name, value)
            if name in TOKEN_TYPES:
                kinds = tensors[name].reshape(-1).to(torch.int64)
                if kinds.shape[0] != length:
                    raise ValueError(f"{name} has {kinds.shape[0]} entries for {length} tokens")
                tensors[name] = kinds[shown]
        self._check_grids(tensors)
        if any(name.startswith("pixel_values") for name in tensors):
            tensors |= self._token_types(ids, tensors)
        elif marked := [name for name in TOKEN_TYPES if name in tensors and bool(tensors[name].any())]:
            raise IncompatibleChunk(f"{marked[0]} says that tokens are pictures, and no pixels are given")
        return Chunk(ids, tensors, fingerprint, label, picture)

    def tokenize(self, text: str, *, special: bool = False) -> torch.Tensor:
        """Token ids of trusted ``text``, int64 ``[tokens]``: special tokens in it count.

        ``special`` lets the tokenizer add its BOS.
        """
        return self._template_for(text).token_ids(PromptText(text), special=special)

    def detokenize(self, ids: torch.Tensor) -> str | None:
        """Text of token ids, without special tokens; None without a tokenizer."""
        if self.format is None:
            return None
        with hold_tokenizer(self.format.tokenizer):
            return str(self.format.tokenizer.decode(ids, skip_special_tokens=True))

    def _template_for(self, text: str) -> PromptFormat:
        """What writes ``text``. Raises ProcessorRequired, naming it."""
        if self.format is None:
            raise ProcessorRequired(
                f"this backbone has no processor to tokenise {quote(text)}: pass token ids, or "
                "Backbone(model, processor)"
            )
        return self.format

    def _check_grids(self, inputs: Mapping[str, torch.Tensor]) -> None:
        for pixels, grid in _GRIDS.items():
            if pixels not in self.accepted or grid not in self.accepted:
                continue
            for name, partner in ((pixels, grid), (grid, pixels)):
                if name in inputs and partner not in inputs:
                    raise IncompatibleChunk(
                        f"{name} without {partner}: {type(self.model).__name__} needs both, as its "
                        "processor gives them"
                    )
            if grid in inputs:
                sizes, rows = inputs[grid], inputs[pixels].shape[:1].numel()
                if sizes.dim() != 2 or sizes.shape[1] != 3 or int(sizes.prod(1).sum()) != rows:
                    raise IncompatibleChunk(
                        f"{grid}={sizes.tolist()} for {rows} rows of {pixels}: give both as the processor "
                        "made them, a row of three numbers for each picture or clip"
                    )

    def _token_types(self, ids: torch.Tensor, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Types of tokens that ``inputs`` lack. Raises IncompatibleChunk for some that are not the ids'."""
        places = torch.isin(ids, torch.tensor(self.vision_tokens, dtype=ids.dtype))
        own: dict[str, torch.Tensor] = {}
        for name in [n for n in TOKEN_TYPES if n in self.accepted]:
            kinds = inputs.get(name)
            if kinds is None:
                kinds = own[name] = self._read_types(name, ids)
            if not bool(kinds[places].all()):
                raise IncompatibleChunk(
                    f"{name} says that {int((kinds[places] == 0).sum())} tokens of pictures are text: give "
                    "what the processor made of these ids, or leave it out"
                )
        return own

    def _read_types(self, name: str, ids: torch.Tensor) -> torch.Tensor:
        """Types of tokens as the processor makes them of ids, else of the tokens that the config names."""
        processor = None if self.format is None else self.format.processor
        make = getattr(processor, f"create_{name}", None)
        if make is not None and len(inspect.signature(make).parameters) == 1:
            return torch.as_tensor(make([ids.tolist()]))[0].to(torch.int64)
        if name == "moe_mm_token_type_ids":
            raise IncompatibleChunk(
                f"no {name}: {type(self.model).__name__} sends tokens around a picture to its vision "
                "experts, too, and the ids do not say which; give those that the processor made"
            )
        kinds = torch.zeros_like(ids)
        if self.image_token is not None:
            kinds[ids == self.image_token] = 1
        if self.video_token is not None:
            kinds[ids == self.video_token] = 2
        return kinds

    def _load(self, items: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Items with their pictures and clips in memory, in their requested sizes.

        For processors without a video part a clip becomes its frames, one picture each.
        """
        assert self.format is not None
        out, processor = list[dict[str, Any]](), self.format.processor
        for item in items:
            kind = item["type"]
            if kind == "text":
                out.append(item)
                continue
            rest = {name: item[name] for name in item if name in self.format.entries}
            media = load_media({n: item[n] for n in item if n not in rest}, processor, self.limits)
            rest["sized"] = any(item.get(name) is not None for name in SIZES)
            if kind == "image" or "video" in self.format.kinds:
                out.append({**rest, "type": kind, kind: media})
            else:
                assert isinstance(media, Clip)
                out += [{**rest, "type": "image", "image": frame} for frame in media.frames]
        return out

    def _process(self, turns: list[Turn], fingerprint: str) -> Chunk:
        assert self.format is not None and self._media is not None
        items = [item for turn in turns for item in items_of(turn)]
        prompt = self.format.chunk(turns)
        label = "".join(i.get("text", f"<{i['type']}>") for i in items)[:80]
        images = [i["image"] for i in items if i["type"] == "image"]
        clips: list[Clip] = [i["video"] for i in items if i["type"] == "video"]
        if (images or clips) and not self._media.stands_beside([*images, *clips]):
            raise ModalityNotSupported(
                f"{type(self.format.processor).__name__} writes a picture in other tokens beside others than "
                "alone, and a chunk of a window stands beside others: use ChatSession, or build the chunk "
                "with chunk_from_tensors"
            )
        if not images and not clips:
            ids = self.format.token_ids(prompt)
            if ids.shape[0] == 0:
                raise EmptyChunk(f"content {quote(label)} has no tokens: give at least one")
            return self.from_tensors(ids, {}, fingerprint, label)
        inputs: dict[str, Any] = self.format.process(prompt.text, images, clips)
        check_sizes(self.format.processor, items, inputs)
        ids = torch.as_tensor(inputs.pop("input_ids"))[0]
        inputs.pop("attention_mask", None)  # of one prompt: no pads
        if prompt.hidden:
            ids, inputs = self.format.plain.splice(ids, prompt.word, prompt.hidden, inputs)
        inputs = {name: value for name, value in inputs.items() if name in self.accepted}
        first = next(i for i in items if i["type"] != "text")
        picture = first["image"] if first["type"] == "image" else first["video"].frames[0].copy()
        return self.from_tensors(ids, inputs, fingerprint, label, picture)


def _is_content(name: str) -> bool:
    """True for an input that a processor makes of pictures and clips, and for types of tokens."""
    parts = "pixel", "image", "video", "frame"
    return name in POSITION_INPUTS or (name not in _NO_CONTENT and any(part in name for part in parts))


def _tensor(name: str, value: Any) -> torch.Tensor:
    try:
        return torch.as_tensor(value).detach().cpu()
    except (TypeError, ValueError, RuntimeError):
        raise IncompatibleChunk(f"{name}={quote(value)} is no tensor: give what the processor made") from None


def _shown_tokens(mask: Any, ids: torch.Tensor) -> slice:
    """The tokens that a mask ``[tokens]`` or ``[1, tokens]`` shows, which follow each other."""
    if mask is None:
        return slice(None)
    shown = _tensor("attention_mask", mask)
    shown = shown[0] if shown.dim() == 2 and shown.shape[0] == 1 else shown
    if shown.shape != ids.shape or not bool(torch.isin(shown, torch.tensor([0, 1], dtype=shown.dtype)).all()):
        raise IncompatibleChunk(
            f"attention_mask of shape {tuple(shown.shape)} for {ids.shape[0]} tokens: give a 1 or 0 for each"
        )
    places = shown.nonzero().flatten().tolist()
    start, stop = (places[0], places[-1] + 1) if places else (0, 0)
    if len(places) != stop - start:
        raise IncompatibleChunk(
            f"attention_mask hides {stop - start - len(places)} tokens between others: a chunk is read "
            "whole; take them out of input_ids"
        )
    return slice(start, stop)


def _first(config: Any, *names: str) -> int | None:
    for name in names:
        value = getattr(config, name, None)
        if isinstance(value, int):
            return value
    return None
