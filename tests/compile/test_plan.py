"""Plans are read whole or refused, every bad line by file and number, before any model is loaded."""

from __future__ import annotations

import json

import pytest

from kamera.compile import PlanError, read_plan
from kamera.compile.plan import ByContent, ById
from tests.compile.saved import pictures, write_plan

GOOD = {"chunks": ["hello"]}

BAD = {
    "truncated": ('{"chunks": ["a"', "not JSON"),
    "two_objects": ('{"chunks": ["a"]} {}', "not JSON"),
    "no_object": ('["a"]', "is not an object"),
    "unknown_key": ('{"chunks": ["a"], "sytem": "x"}', "'sytem'"),
    "no_chunks": ('{"system": "x"}', "chunks is null"),
    "empty_chunks": ('{"chunks": []}', "chunks is []"),
    "chunks_no_list": ('{"chunks": "a"}', "give a list"),
    "system_no_text": ('{"system": 3, "chunks": ["a"]}', "system 3"),
    "empty_text": ('{"chunks": ["a", ""]}', "chunks[1]: text"),
    "empty_item_list": ('{"chunks": [[]]}', "chunks[0]: an empty list"),
    "number": ('{"chunks": [7]}', "chunks[0]: 7"),
    "nested_list": ('{"chunks": [[["a"]]]}', "is not content"),
    "unknown_kind": ('{"chunks": [{"audio": "a.wav"}]}', "['audio']"),
    "picture_as_text": ('{"chunks": ["0.png"]}', "'0.png' names a picture"),
    "url_as_text": ('{"chunks": [["a", "https://x.org/a.png"]]}', "names a picture"),
    "two_kinds": ('{"chunks": [{"text": "a", "image": "0.png"}]}', "is not content"),
    "type_says_other": ('{"chunks": [{"type": "video", "image": "0.png"}]}', "is not content"),
    "unknown_option": ('{"chunks": [{"image": "0.png", "fps": 1}]}', "'fps'"),
    "missing_image": ('{"chunks": [{"image": "gone.png"}]}', "gone.png"),
    "missing_video": ('{"chunks": [{"video": "gone.mp4"}]}', "gone.mp4"),
    "missing_frame": ('{"chunks": [{"video": ["0.png", "gone.png"]}]}', "gone.png"),
    "no_frames": ('{"chunks": [{"video": []}]}', "no frames"),
    "image_no_path": ('{"chunks": [{"image": 1}]}', "image 1 is not a path"),
    "fps_zero": ('{"chunks": [{"video": ["0.png"], "fps": 0}]}', "fps is 0"),
    "fps_true": ('{"chunks": [{"video": ["0.png"], "fps": true}]}', "fps is true"),
    "id_no_text": ('{"chunks": [{"chunk_id": 1}]}', "chunk_id 1"),
    "id_and_more": ('{"chunks": [{"chunk_id": "ab", "text": "a"}]}', "'text'"),
    "id_in_a_list": ('{"chunks": [["a", {"chunk_id": "ab"}]]}', "one item of a list"),
    "rank_zero": ('{"chunks": ["a"], "rank": 0}', "rank is 0"),
    "rank_true": ('{"chunks": ["a"], "rank": true}', "rank is true"),
    "orbit_text": ('{"chunks": ["a"], "orbit": "yes"}', 'orbit is "yes"'),
    "layers_number": ('{"chunks": ["a"], "layers": 4}', "layers is 4"),
    "layers_backwards": ('{"chunks": ["a"], "layers": "4:2"}', "layers '4:2'"),
    "layers_negative": ('{"chunks": ["a"], "layers": [-1]}', "layers [-1]"),
    "basis": ('{"chunks": ["a"], "basis": "b"}', "unknown key 'basis'"),
    "deeply_nested": ('{"chunks": ' + "[" * 100_000, "not JSON"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_line_is_named_by_file_and_number(tmp_path, name):
    line, says = BAD[name]
    pictures(tmp_path, 1)
    path = tmp_path / "plan.jsonl"
    path.write_text(f"{json.dumps(GOOD)}\n\n{line}\n")
    with pytest.raises(PlanError) as refused:
        read_plan(path)
    (problem,) = refused.value.problems
    assert problem.startswith(f"{path}:3: ")
    assert says in problem


def test_every_bad_line_is_named_at_once(tmp_path):
    path = tmp_path / "plan.jsonl"
    path.write_text('{}\n{"chunks": ["a"]}\nnonsense\n')
    with pytest.raises(PlanError) as refused:
        read_plan(path)
    assert [p.split(": ")[0] for p in refused.value.problems] == [f"{path}:1", f"{path}:3"]


def test_all_content_is_read_with_paths_relative_to_the_plan(tmp_path, monkeypatch):
    folder = tmp_path / "deep"
    folder.mkdir()
    (name,) = pictures(folder, 1)
    monkeypatch.chdir(tmp_path)
    picture = str(folder / name)
    path = write_plan(
        folder,
        [
            "plain",
            {"text": "item"},
            {"type": "image", "image": name, "max_pixels": 512},
            {"image": picture},
            {"video": [name, name], "fps": 1},
            [{"image": f"file://{picture}"}, "caption"],
            {"chunk_id": "ab"},
        ],
        system=None,
    )
    (window,) = read_plan(path).windows
    assert window.where == f"{path}:1"
    assert window.system is None
    described = [list(c.items) for c in window.chunks if isinstance(c, ByContent)]
    assert described == [
        [{"type": "text", "text": "plain"}],
        [{"type": "text", "text": "item"}],
        [{"type": "image", "image": picture, "max_pixels": 512}],
        [{"type": "image", "image": picture}],
        [{"type": "video", "video": [picture, picture], "fps": 1}],
        [{"type": "image", "image": picture}, {"type": "text", "text": "caption"}],
    ]
    assert window.chunks[-1] == ById("ab")


def test_equal_descriptions_are_one_chunk_up_to_options(tmp_path):
    (name,) = pictures(tmp_path, 1)
    one, same, other = (
        read_plan(
            write_plan(
                tmp_path,
                [
                    {"image": name},
                    {"image": f"./{name}", "type": "image"},
                    {"image": name, "max_pixels": 512},
                ],
            )
        )
        .windows[0]
        .chunks
    )
    assert one == same
    assert one != other
