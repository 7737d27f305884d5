"""A session writes what its windows do, under one name."""

from __future__ import annotations

from kamera.edits import policies
from kamera.window import read_trace
from kamera.window.view import lives
from tests.content.templates import screens
from tests.sessions.rig import seeing, session


def test_a_session_is_one_life_however_many_windows_it_had(tmp_path):
    path = tmp_path / "trace.jsonl"
    chat = session(seeing(), trace=path, edit_policy=policies.keep_last_images(1))
    reports = [chat.send(screens(n), max_new_tokens=2).report for n in (1, 2, 3)]
    other = session(seeing(), trace=path)
    other.send(screens(1), max_new_tokens=2)
    events = list(read_trace(path))
    first, second = lives(events)
    assert [len(first.deeds), len(second.deeds)] == [3, 1] and first.name != second.name
    assert len({event.window for event in events if event.session == first.name}) == 3
    told = [deed.tokens for deed in first.deeds]
    spent = [report.tokens_recomputed for report in reports]
    assert told[1:] == spent[1:]  # the first turn's has the system prompt, too
    assert first.deeds[-1].left
    assert b"image" not in path.read_bytes()
