"""Prompts carried to vLLM: to an `LLM` of this process, or over HTTP by a client of OpenAI's API."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from PIL import Image

from kamera.engines.prompt import EngineCompletion, EnginePrompt, PromptPicture
from kamera.engines.vllm.serving import FIELD
from kamera.errors import EngineFailed, InvalidRequest, first_line

LATER = 1
"""vLLM's priority of prompts that no answer waits for; answers have 0, and go first."""


class Offline:
    """Prompts for a ``vllm.LLM``. ``placeholders`` are the token ids that pictures replace.

    With an ``adapter``, vLLM's ``LoRARequest``, it answers them under that.
    """

    def __init__(self, llm: Any, placeholders: Collection[int], *, adapter: Any = None) -> None:
        self._llm, self._placeholders, self._adapter = llm, frozenset(placeholders), adapter

    def stream(self, prompt: EnginePrompt) -> Iterator[EngineCompletion]:
        """The answer, in one piece."""
        from vllm import SamplingParams

        request: dict[str, Any] = {"prompt_token_ids": _collapse(prompt.ids, self._placeholders)}
        if prompt.pictures:
            request["multi_modal_data"] = {"image": [picture.image for picture in prompt.pictures]}
            request["multi_modal_uuids"] = {"image": [picture.name for picture in prompt.pictures]}
        if prompt.recipe.context.tenant:
            request["cache_salt"] = prompt.recipe.context.tenant
        extra = {"kv_transfer_params": {FIELD: prompt.recipe.to_json()}}
        options: dict[str, Any] = {
            name: list(v) if name == "stop" else v for name, v in prompt.sampling.options().items()
        }
        if "structured_outputs" in options:
            from vllm.sampling_params import StructuredOutputsParams

            options["structured_outputs"] = StructuredOutputsParams(**options["structured_outputs"])
        sampling = SamplingParams(max_tokens=prompt.max_new_tokens, extra_args=extra, **options)
        policy = self._llm.llm_engine.vllm_config.scheduler_config.policy
        more: dict[str, Any] = {"priority": [LATER]} if prompt.later and policy == "priority" else {}
        (out,) = self._llm.generate([request], sampling, use_tqdm=False, lora_request=self._adapter, **more)
        answer = out.outputs[0]
        yield EngineCompletion(
            answer.text, tuple(answer.token_ids), len(out.prompt_token_ids), out.num_cached_tokens or 0
        )


class Http:
    """Prompts for vLLM's server by an ``openai.OpenAI`` client, which knows nothing of Kamera.

    The server renders the messages itself. A prompt whose tokens it renders otherwise than the recipe says is
    computed. ``priorities``: the server was started with ``--scheduling-policy priority``. Raises
    EngineFailed where the server does not answer, and InvalidRequest where it takes no such schema.
    """

    def __init__(self, client: Any, model: str, *, priorities: bool = False) -> None:
        self._client, self._model, self._priorities = client, model, priorities

    def stream(self, prompt: EnginePrompt) -> Iterator[EngineCompletion]:
        api = self._client.chat.completions if prompt.messages else self._client.completions
        try:
            with api.create(**self._body(prompt)) as events:
                for event in events:
                    usage, choice = event.usage, next(iter(event.choices), None)
                    details = None if usage is None else usage.prompt_tokens_details
                    piece = getattr(choice, "text", None) or getattr(choice, "delta", None)
                    yield EngineCompletion(
                        piece if isinstance(piece, str) else getattr(piece, "content", None) or "",
                        tuple(getattr(choice, "token_ids", None) or ()),
                        0 if usage is None else usage.prompt_tokens,
                        0 if details is None else details.cached_tokens or 0,
                    )
        except Exception as error:  # the client's own kinds, whichever client it is
            if prompt.sampling.structured_outputs and getattr(error, "status_code", None) == 400:
                raise InvalidRequest(
                    f"vLLM cannot bind the answer: {first_line(error)}: ask for less"
                ) from error
            raise EngineFailed(f"vLLM gave no answer: {type(error).__name__}: {first_line(error)}") from error

    def _body(self, prompt: EnginePrompt) -> dict[str, Any]:
        pictures, options = iter(prompt.pictures), prompt.sampling.options()
        body: dict[str, Any] = {
            "kv_transfer_params": {FIELD: prompt.recipe.to_json()},
            "return_token_ids": True,
        }
        body |= {name: options.pop(name) for name in ("top_k", "structured_outputs") if name in options}
        if prompt.recipe.context.tenant:
            body["cache_salt"] = prompt.recipe.context.tenant
        if prompt.later and self._priorities:
            body["priority"] = LATER
        if prompt.tools and prompt.messages:  # the template shows them; calls are read out of the text
            options |= {"tools": list(prompt.tools), "tool_choice": "none"}
        if prompt.messages:
            options["messages"] = [_message(message, pictures) for message in prompt.messages]
            options["max_completion_tokens"] = prompt.max_new_tokens
        else:
            options |= {"prompt": list(prompt.ids), "max_tokens": prompt.max_new_tokens}
        return {
            "model": self._model,
            "stream": True,
            "stream_options": {"include_usage": True},
            "extra_body": body,
            **options,
        }


def _message(message: Mapping[str, Any], pictures: Iterator[PromptPicture]) -> dict[str, Any]:
    """A message as the server takes it."""
    fields, content = dict(message), message.get("content")
    if not isinstance(content, str | None):
        fields["content"] = [_part(part, pictures) for part in content]
    if message.get("tool_calls"):
        fields["tool_calls"] = [_call(call) for call in message["tool_calls"]]
    return fields


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = dict(call["function"])
    if not isinstance(function["arguments"], str):
        function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
    return {"id": "", "type": "function", **call, "function": function}


def _part(part: Mapping[str, Any], pictures: Iterator[PromptPicture]) -> dict[str, Any]:
    """A part of a message as the server takes it: a picture inline under its id, or by its id alone."""
    if part["type"] != "image":
        return dict(part)
    picture = next(pictures)
    url = None if picture.image is None else {"url": _inline(picture.image)}
    return {"type": "image_url", "image_url": url, "uuid": picture.name}


def _inline(image: Image.Image) -> str:
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def _collapse(ids: tuple[int, ...], placeholders: frozenset[int]) -> list[int]:
    """Token ids with one placeholder for each picture, which vLLM expands."""
    pairs = zip(ids, (None, *ids), strict=False)
    return [token for token, previous in pairs if token not in placeholders or token != previous]
