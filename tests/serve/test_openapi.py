"""The document at /openapi.json and the handlers agree; hundreds of hostile requests are refused."""

from __future__ import annotations

import copy
import functools
import json
import random
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator, validators

import kamera.serve
from kamera.errors import InvalidRequest
from tests.serve.rig import KEY, OTHER, Served, plain, serving
from tests.serve.test_reading import BODIES, read

DOCUMENT = json.loads((Path(kamera.serve.__file__).parent / "openapi.json").read_text())
SCHEMAS = DOCUMENT["components"]["schemas"]
PATHS = {"chat": "/v1/chat/completions", "messages": "/v1/messages", "responses": "/v1/responses"}
BEYOND = (
    "is no picture",
    "nothing is fetched",
    "JSON object",
    "printable",
    "JSON schema",
    "logprobs: true",
    "not here",
    "of this request",
    "start <= end",
    "leave it out",
    "decay",
)
"""What the document cannot say."""

VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, 2, -1, 10**30, 0.5, "", "x", "auto", "none", "user", "text", "exact", "a b"),
    *("é\u0000", "../../etc/passwd", "y" * 300, [], ["x"], [[]], {}, {"type": "text"}, {"type": "auto"}),
    *({"type": "text", "text": "t"}, {"role": "user", "content": "x"}, [{"type": "text", "text": "t"}]),
)


@functools.cache
def validator(name: str) -> Any:
    """A schema of the document, for which 1.0 is no whole number and true no number, as in Fields."""
    integer = lambda _, value: isinstance(value, int) and not isinstance(value, bool)  # noqa: E731
    kinds = Draft202012Validator.TYPE_CHECKER.redefine("integer", integer)
    strict = validators.extend(Draft202012Validator, type_checker=kinds)
    return strict({"$ref": f"#/components/schemas/{name}", "components": DOCUMENT["components"]})


def holders(value: Any) -> list[Any]:
    """All objects and lists in a body, itself first."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [value, *(h for one in inner if isinstance(one, dict | list) for h in holders(one))]


def properties(schema: Any) -> list[str]:
    """All names of a schema."""
    if isinstance(schema, list):
        return [name for one in schema for name in properties(one)]
    if not isinstance(schema, dict):
        return []
    return [*schema.get("properties", ()), *(n for one in schema.values() for n in properties(one))]


NAMES = sorted({*properties(list(SCHEMAS.values())), "nobody", "__class__", "conversation"})


def mutated(body: dict[str, Any], draw: random.Random) -> dict[str, Any]:
    """A body with one to three of its entries changed, taken out or added."""
    made = copy.deepcopy(body)
    for _ in range(draw.randint(1, 3)):
        holder, value = draw.choice(holders(made)), copy.deepcopy(draw.choice(VALUES))
        if isinstance(holder, dict):
            name = draw.choice([*holder, draw.choice(NAMES)])
            if draw.random() < 0.25:
                holder.pop(name, None)
            else:
                holder[name] = value
        elif holder and draw.random() < 0.6:
            holder[draw.randrange(len(holder))] = value
        else:
            holder.append(value)
    return made


@pytest.mark.few(1)
@pytest.mark.parametrize("api", PATHS)
def test_the_handlers_take_what_the_document_allows_and_refuse_the_rest(api):
    draw, taken, refused = random.Random(api), 0, 0
    assert validator(api).is_valid(BODIES[api])
    for _ in range(800):
        body = mutated(BODIES[api], draw)
        try:
            read(api, body)
            error = "" if body.get("messages") != [] else "no messages"  # its rendering says so
        except InvalidRequest as wrong:
            error = str(wrong)
        allowed = validator(api).is_valid(body)
        if allowed and error:
            assert any(word in error for word in BEYOND), (error, body)
        assert allowed or error, body
        taken, refused = taken + (not error), refused + bool(error)
    assert taken > 40 and refused > 300


def test_the_document_is_served_and_names_every_path(api_served):
    served = json.loads(plain().get(api_served.url + "/openapi.json").content)
    assert served == DOCUMENT
    others = {"/openapi.json", "/", "/events"}
    routes = {getattr(route, "path", "") for route in api_served.front.app().routes} - others
    assert routes == {
        path.replace("{name}", "{name:path}") if "models/" in path else path for path in served["paths"]
    }


@pytest.fixture(scope="module")
def api_served():
    with serving(keys={KEY: "one", OTHER: "two"}) as found:
        yield found


IDS = ("../../etc/passwd", "%2e%2e%2f", "x" * 5000, "a%09b", "resp_", "null", "é", "-1", "0' OR 1=1", "%00")


@pytest.mark.slow
def test_hundreds_of_hostile_requests_get_a_4xx_and_no_other_keys_words(api_served: Served):
    """Bodies changed at random, ids that are paths or huge, over all paths, by the other key."""
    secret = "a-secret-of-the-first-key"
    asked, first = {"model": "testbed", "input": secret, "max_output_tokens": 1}, {"x-api-key": KEY}
    kept = api_served.post(PATHS["responses"], asked, headers=first).json()["id"]
    draw, key, found = random.Random(7), {"authorization": f"Bearer {OTHER}"}, dict[int, int]()
    for number in range(400):
        api = draw.choice([*PATHS])
        if number % 10:
            body = {**BODIES[api], "model": "testbed", "tools": None}  # this model shows no tools
            body |= {"max_output_tokens": 1} if api == "responses" else {"max_tokens": 1}
            body |= {"previous_response_id": draw.choice([kept, *IDS])} if api == "responses" else {}
            answer = api_served.post(PATHS[api], mutated(body, draw), headers=key)
        else:
            name = draw.choice([kept, *IDS])
            answer = plain().request(
                draw.choice(["GET", "DELETE"]), f"{api_served.url}/v1/responses/{name}", headers=key
            )
        found[answer.status_code] = found.get(answer.status_code, 0) + 1
        assert answer.status_code == 200 or 400 <= answer.status_code < 500, answer.text
        assert secret not in answer.text
        if answer.status_code != 200:
            error = answer.json()["error"]
            assert error["message"] and "Traceback" not in error["message"]
    assert sum(count for status, count in found.items() if status != 200) > 280
    mine = plain().get(f"{api_served.url}/v1/responses/{kept}", headers=first)
    assert mine.json()["id"] == kept  # nobody else deleted it
