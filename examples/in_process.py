"""Kamera as a model of litellm and of smolagents, in their own process: no server, no URL.

pip install -e '.[serve]' smolagents litellm
python examples/in_process.py --framework smolagents
python examples/in_process.py --framework litellm
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Iterator
from typing import Any

from kamera import Backbone, ReusePolicy, testbed
from kamera.serve import Refusal, Service, Within


def provider(service: Service) -> Any:
    """A ``litellm.CustomLLM``, to stand in ``litellm.custom_provider_map``."""
    from litellm import CustomLLM, ModelResponse
    from litellm.llms.custom_llm import CustomLLMError

    within = Within(service)

    def asked(given: dict[str, Any]) -> dict[str, Any]:
        options = {**given["optional_params"]}
        for name in ("stream", "stream_options"):
            options.pop(name, None)
        try:
            return within.complete({"model": given["model"], "messages": given["messages"], **options})
        except Refusal as refusal:
            raise CustomLLMError(refusal.status, refusal.message) from None

    class Provider(CustomLLM):
        def completion(self, **given: Any) -> ModelResponse:
            return ModelResponse(**asked(given))

        async def acompletion(self, **given: Any) -> ModelResponse:
            return await asyncio.to_thread(self.completion, **given)

        def streaming(self, **given: Any) -> Iterator[dict[str, Any]]:
            """The whole answer, then its calls one by one."""
            made = asked(given)
            (choice,) = made["choices"]
            calls = choice["message"].get("tool_calls") or [None]
            for index, call in enumerate(calls):
                last = index == len(calls) - 1
                yield {
                    "text": "" if index else choice["message"]["content"] or "",
                    "tool_use": call and {**call, "index": index},
                    "is_finished": last,
                    "finish_reason": choice["finish_reason"] if last else "",
                    "usage": made["usage"] if last else None,
                    "index": 0,
                }

    return Provider()


def model(service: Service, model_id: str, **options: Any) -> Any:
    """A ``smolagents.Model``; ``options`` go into each request."""
    import smolagents
    from smolagents.models import ChatMessage
    from smolagents.monitoring import TokenUsage

    within = Within(service)

    class Model(smolagents.Model):
        def generate(
            self, messages, stop_sequences=None, response_format=None, tools_to_call_from=None, **more
        ):
            given = (messages, stop_sequences, response_format, tools_to_call_from)
            more = {"convert_images_to_image_urls": True, "tool_choice": "auto", **more}
            made = within.complete(
                {"model": self.model_id, **self._prepare_completion_kwargs(*given, **more)}
            )
            usage = TokenUsage(made["usage"]["prompt_tokens"], made["usage"]["completion_tokens"])
            return ChatMessage.from_dict(made["choices"][0]["message"], made, usage)

    return Model(model_id=model_id, **options)


def main() -> None:
    """Two turns about one picture; the second finds the first one's cache."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--framework", choices=["smolagents", "litellm"], default="smolagents")
    parser.add_argument("--model", help="id or directory of a vision model (default: the shipped small one)")
    given = parser.parse_args()
    backbone = Backbone.from_pretrained(given.model or "testbed")
    service = Service(backbone, ReusePolicy.exact())
    frame = testbed.World(seed=3).episode(0, legends=4).frames[0].image
    first = [{"type": "image", "image": frame}, {"type": "text", "text": "What is the value of tag 3?"}]
    if given.framework == "smolagents":
        asked, ask = (
            model(service, "testbed", max_tokens=6, temperature=0),
            [{"role": "user", "content": first}],
        )
        answer = asked(ask)
        print(answer.content, answer.raw["kamera"])
        ask += [
            {"role": "assistant", "content": answer.content},
            {"role": "user", "content": "And of tag 4?"},
        ]
        answer = asked(ask)
        print(answer.content, answer.raw["kamera"])
        return
    import litellm

    litellm.custom_provider_map = [{"provider": "kamera", "custom_handler": provider(service)}]
    talk: list[Any] = []
    for text in ("What is the value of tag 3?", "And of tag 4?"):
        talk.append({"role": "user", "content": text})
        answer = litellm.completion("kamera/testbed", talk, max_tokens=6, temperature=0)
        print(answer.choices[0].message.content, answer.kamera)
        talk.append({"role": "assistant", "content": answer.choices[0].message.content})


if __name__ == "__main__":
    main()
