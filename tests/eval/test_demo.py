"""The demo's table, on the shipped backbone, as its command gives it."""

import pytest

from tests.cli.run import kamera


@pytest.mark.slow
def test_the_demo_runs_its_new_tokens_and_answers_as_the_prefix_cache(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    clips = tmp_path / "clips"
    options = ("--clips", "1", "--questions", "4", "--video", clips, "--quiet", "--format", "json")
    done = kamera(capsys, "demo", *options)
    assert (done.code, done.err) == (0, "")
    demo = done.document
    assert (demo["clips"], demo["view"]) == (1, str(tmp_path / "kamera" / "demo.html"))
    assert (clips / "clip0.mp4").stat().st_size > 0
    rows = {(row["operation"], row["arm"]): row for row in demo["rows"]}
    operations = [name for name, arm in rows if arm == "kamera"]
    worth = dict(demo["guarantees"])
    for name in operations:
        own, cache = rows[name, "kamera"], rows[name, "prefix cache"]
        assert cache["right"] == cache["n"] == 4 and cache["kl"] == 0.0
        if name != "prepare orders":
            assert own["tokens"] <= cache["tokens"]
        if not name.startswith("worst"):
            assert own["right"] >= 3
        if "survivor" not in worth[name]:  # in this world a survivor is further off than blind reuse
            assert own["kl"] < 1e-3 and own["kl"] <= rows[name, "blind reuse"]["kl"] + 1e-6
    assert rows["look back", "kamera"]["tokens"] == rows["another order", "kamera"]["tokens"] == 0
    assert (
        rows["the second leaves", "kamera"]["tokens"]
        == 0
        < rows["the second leaves", "prefix cache"]["tokens"]
    )
    worst = operations[-1]
    strict = rows[worst, 'kamera, on_leave="exact"']
    assert strict["right"] == 4 and strict["tokens"] > 0 == rows[worst, "kamera"]["tokens"]
    assert "survivor" in worth[worst] and "exact" in worth["another order"]
