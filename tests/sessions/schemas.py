"""Schemas as clients send them, each with one value that fits it and one that does not."""

from __future__ import annotations

from typing import Any

Case = tuple[dict[str, Any], Any, Any]


def record(required: str = "", /, **properties: Any) -> dict[str, Any]:
    """An object of these properties alone; those named in ``required``, by default all, have to be there."""
    names = required.split() if required else [*properties]
    return {"type": "object", "properties": properties, "required": names, "additionalProperties": False}


TEXT, WHOLE, NUMBER, FLAG = ({"type": kind} for kind in ("string", "integer", "number", "boolean"))
TREE = {
    "$defs": {
        "node": record("name", name=TEXT, children={"type": "array", "items": {"$ref": "#/$defs/node"}})
    },
    "$ref": "#/$defs/node",
}
SHAPE = {
    "oneOf": [
        record(kind={"const": "circle"}, radius={"type": "number", "exclusiveMinimum": 0}),
        record(kind={"const": "square"}, side=WHOLE),
    ],
    "discriminator": {"propertyName": "kind"},
}

CASES: dict[str, Case] = {
    "a text": (TEXT, 'so "it" is', 3),
    "a whole number": (WHOLE, -12, 1.5),
    "a number": (NUMBER, 2.5e-3, "2"),
    "a flag": (FLAG, True, "true"),
    "nothing": ({"type": "null"}, None, False),
    "a constant": ({"const": {"a": [1]}}, {"a": [1]}, {"a": [2]}),
    "one of words": ({"enum": ["left", "right"]}, "right", "up"),
    "one of several kinds": ({"enum": [1, "1", None]}, None, 2),
    "two types": ({"type": ["string", "null"]}, None, 0),
    "a short text": ({"type": "string", "maxLength": 3}, "abc", "abcd"),
    "a long text": ({"type": "string", "minLength": 4}, "abcd", "abc"),
    "a text of an exact length": ({"type": "string", "minLength": 2, "maxLength": 2}, "éa", "é"),
    "a pattern": ({"type": "string", "pattern": "^[a-z]+-[0-9]{2}$"}, "tag-07", "tag-7"),
    "a pattern within a length": ({"type": "string", "pattern": "^a+$", "maxLength": 3}, "aa", "aaaa"),
    "a pattern inside": ({"type": "string", "pattern": "b"}, "abc", "ac"),
    "a date": ({"type": "string", "format": "date"}, "2026-11-29", "2026-13-29"),
    "a time of a day": ({"type": "string", "format": "date-time"}, "2026-11-29T22:42:00Z", "2026-11-29"),
    "an id": ({"type": "string", "format": "uuid"}, "12345678-1234-4234-8234-123456789abc", "1234"),
    "an address": ({"type": "string", "format": "ipv4"}, "127.0.0.1", "127.0.0.256"),
    "a format that is a note": ({"type": "string", "format": "password", "maxLength": 9}, "hunter2", 2),
    "within bounds": ({"type": "integer", "minimum": 3, "maximum": 12}, 11, 13),
    "above a bound": ({"type": "integer", "exclusiveMinimum": 0, "maximum": 9}, 1, 0),
    "a fraction within bounds": ({"type": "number", "minimum": 0, "maximum": 1}, 0.25, 1.5),
    "below zero": ({"type": "integer", "minimum": -5, "maximum": -2}, -4, 4),
    "a multiple": ({"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 99}, 35, 36),
    "a list": ({"type": "array", "items": WHOLE}, [1, 2, 3], [1, "2"]),
    "a list of a length": (
        {"type": "array", "items": FLAG, "minItems": 2, "maxItems": 3},
        [True, False],
        [True],
    ),
    "an empty list": ({"type": "array", "maxItems": 0}, [], [1]),
    "a tuple": (
        {"type": "array", "prefixItems": [TEXT, WHOLE], "items": False, "minItems": 2},
        ["a", 1],
        [1, "a"],
    ),
    "a tuple and more": (
        {"type": "array", "prefixItems": [TEXT], "items": WHOLE, "minItems": 1},
        ["a", 1],
        [1],
    ),
    "a list of lists": (
        {"type": "array", "items": {"type": "array", "items": NUMBER, "minItems": 1}},
        [[1], [2, 3]],
        [[]],
    ),
    "an object": (record(a=WHOLE, b=TEXT), {"a": 1, "b": "x"}, {"a": 1}),
    "what may be absent": (record("a", a=WHOLE, b=TEXT), {"a": 1}, {"b": "x"}),
    "nothing else": (record(a=WHOLE), {"a": 1}, {"a": 1, "b": 2}),
    "any names": ({"type": "object", "additionalProperties": WHOLE}, {"x": 1, "y": 2}, {"x": "1"}),
    "names of a pattern": (
        {"type": "object", "patternProperties": {"^n_": WHOLE}, "additionalProperties": False},
        {"n_a": 1},
        {"a": 1},
    ),
    "a count of names": (
        {"type": "object", "additionalProperties": FLAG, "minProperties": 1, "maxProperties": 2},
        {"a": True},
        {},
    ),
    "an object in an object": (
        record(a=record(b=record(c=FLAG))),
        {"a": {"b": {"c": True}}},
        {"a": {"b": 1}},
    ),
    "objects in a list": (
        record(steps={"type": "array", "items": record(what=TEXT, done=FLAG), "minItems": 1}),
        {"steps": [{"what": "look", "done": False}]},
        {"steps": []},
    ),
    "one that may be null": (
        record(name=TEXT, age={"anyOf": [{**WHOLE, "minimum": 0}, {"type": "null"}]}),
        {"name": "Ada", "age": None},
        {"name": "Ada", "age": -1},
    ),
    "any of": ({"anyOf": [{"type": "integer", "minimum": 0}, {"const": "none"}]}, "none", "some"),
    "one of shapes": (SHAPE, {"kind": "square", "side": 2}, {"kind": "square", "radius": 2}),
    "all of": (
        {"allOf": [{"type": "integer", "minimum": 2}, {"type": "integer", "maximum": 4}]},
        3,
        5,
    ),
    "all of objects": (
        {
            "allOf": [
                {"type": "object", "properties": {"a": TEXT}, "required": ["a"]},
                {"properties": {"b": WHOLE}, "required": ["b"], "additionalProperties": True},
            ]
        },
        {"a": "x", "b": 1},
        {"a": "x"},
    ),
    "a reference": (
        {"$defs": {"way": {"enum": ["in", "out"]}}, **record(way={"$ref": "#/$defs/way"})},
        {"way": "in"},
        {"way": "up"},
    ),
    "an older reference": (
        {"definitions": {"n": WHOLE}, "type": "array", "items": {"$ref": "#/definitions/n"}},
        [4],
        ["4"],
    ),
    "a tree": (
        TREE,
        {"name": "a", "children": [{"name": "b", "children": []}, {"name": "c"}]},
        {"name": "a", "children": [{}]},
    ),
    "notes": (
        {"title": "N", "description": "d", "default": 1, "examples": [2], "deprecated": True, **WHOLE},
        7,
        "7",
    ),
    "a draft of its own": (
        {"$schema": "http://json-schema.org/draft-07/schema#", **record(a=FLAG)},
        {"a": False},
        {},
    ),
    "uniqueness that is not asked": ({"type": "array", "items": WHOLE, "uniqueItems": False}, [1, 1], ["1"]),
    "names that have to be escaped": (record(**{'a "b"\n': WHOLE}), {'a "b"\n': 1}, {"a": 1}),
}
"""By what it says: a schema, a value that fits it, and one that does not."""

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a negation": (record(a={"not": TEXT}), "$.properties.a"),
    "unique entries": (record(a={"type": "array", "items": WHOLE, "uniqueItems": True}), "$.properties.a"),
    "a condition": ({"type": "array", "items": {"if": TEXT, "then": {"maxLength": 2}}}, "$.items"),
    "an entry somewhere": ({"anyOf": [WHOLE, {"type": "array", "contains": WHOLE}]}, "$.anyOf[1]"),
    "an expression": (
        record(a=record(b={"type": "string", "pattern": "^(?=x)y"})),
        "$.properties.a.properties.b",
    ),
    "a reference to nowhere": (record(a={"$ref": "#/$defs/none"}), "$.properties.a"),
    "what nothing fits": (
        record(a=WHOLE, b={"type": "integer", "minimum": 5, "maximum": 4}),
        "$.properties.b",
    ),
    "in a definition": (
        {
            "$defs": {"n": {"type": "object", "dependentRequired": {"a": ["b"]}}},
            **record(a={"$ref": "#/$defs/n"}),
        },
        "$.$defs.n",
    ),
}
"""By what it says: a schema that cannot be bound, and where its refusal says that this is."""
