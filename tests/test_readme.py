"""The README's example runs as it stands, and the counts in its comments are the counts."""

from __future__ import annotations

import ast
import re
from pathlib import Path

_README = Path(__file__).parents[1] / "README.md"
_COUNTS = re.compile(r"# (\d+) forwards, (\d+) vision encodes")
_NOW = r"now (\d+) forwards of (\d+) tokens, (\d+) vision encodes"
_LATER = r"; later (\d+) forwards of (\d+) tokens"


def _example() -> str:
    text = _README.read_text(encoding="utf-8")
    block = text.split("<!-- example -->\n```python\n")[1]
    return block.split("```")[0]


def test_the_readmes_example_runs_and_its_counts_are_true(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    # as for a user: nobody has certified the model
    monkeypatch.setenv("KAMERA_CERTIFIED", "1")
    monkeypatch.setenv("KAMERA_CERTIFICATES", str(tmp_path / "none"))
    source = _example()
    lines = source.splitlines()
    names: dict[str, object] = {}
    seen = []
    for statement in ast.parse(source).body:
        exec(compile(ast.Module([statement], []), "README.md", "exec"), names)
        said = _COUNTS.search("\n".join(lines[statement.lineno - 1 : statement.end_lineno]))
        if said:
            report = names["report"]
            seen.append((report.forwards, report.vision_encodes))
            assert seen[-1] == (int(said[1]), int(said[2])), lines[statement.lineno - 1]
    assert len(seen) == 5
    guarantees, answer, usage = capsys.readouterr().out.splitlines()
    (told,) = re.findall(f"# {_NOW}{_LATER}", source)
    assert re.findall(f"^{_NOW}, [0-9.]+ s{_LATER}", usage) == [told]
    truth = names["testbed"].World(seed=0).episode(0, legends=3).questions[0]
    assert truth.text in source and answer == truth.answer
    said = re.findall(r"for slot in window\]\)  # ([a-z, ]+)", source)
    assert [ast.literal_eval(guarantees)] == [re.split(", ", each) for each in said]
