"""``python -m lab.reuse recovery``."""

from __future__ import annotations

import json

import pytest

from kamera.reuse import DEFAULT_RULE, RULES
from lab.agent_traces import trace
from lab.reuse.__main__ import main
from tests.cli.run import files, run


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    path = tmp_path_factory.mktemp("traces") / "trace.json"
    path.write_text(json.dumps(trace(seed=1, requests=4, only=("rag", "screens"))))
    return path


def test_a_trace_is_counted_per_service_and_rule(capsys, made):
    before = files(made.parent)
    done = run(capsys, main, "recovery", made, "--rule", "low", "--rule", "high", "--format", "json")
    assert (done.code, done.err) == (0, "")
    rows = {(r["rule"], r["service"]): r for r in done.document["recovery"]}
    assert set(rows) == {(r, s) for r in ("low", "high") for s in ("rag", "screens", "(all)")}
    for rule in ("low", "high"):
        parts = [rows[rule, "rag"], rows[rule, "screens"]]
        for name in ("requests", "tokens", "exact_prefix", "recovered", "novel"):
            assert rows[rule, "(all)"][name] == sum(part[name] for part in parts)
        assert rows[rule, "(all)"]["requests"] == 8
        assert rows[rule, "rag"]["recovered"] > 0
    assert files(made.parent) == before


def test_the_default_rule_and_every_rule(capsys, made):
    done = run(capsys, main, "recovery", made)
    assert done.code == 0
    assert DEFAULT_RULE in done.out
    every = run(capsys, main, "recovery", made, "--rule", "every", "--format", "json")
    assert list(every.document["rules"]) == list(RULES)


def test_media_tokens_and_sink_change_the_counts(capsys, made):
    def tokens(*options: object) -> tuple[int, int]:
        done = run(capsys, main, "recovery", made, *options, "--format", "json")
        (row,) = [r for r in done.document["recovery"] if r["service"] == "(all)"]
        return row["tokens"], row["recovered"]

    assert tokens("--media-tokens", 2_000)[0] > tokens("--media-tokens", 1)[0]
    assert tokens("--sink", 100_000)[1] == 0 < tokens("--sink", 0)[1]


def test_the_result_goes_to_a_file(capsys, made, tmp_path):
    target = tmp_path / "result.json"
    done = run(capsys, main, "recovery", made, "--format", "json", "--output", target, "-q")
    assert (done.code, done.out, done.err) == (0, "", "")
    assert json.loads(target.read_text())["trace"] == str(made)


def test_holes_fail_in_one_line_or_are_counted(capsys, tmp_path):
    path = tmp_path / "holes.json"
    held = trace(seed=1, requests=2, only=("rag",))
    del held["resourceSpans"][0]["scopeSpans"][0]["spans"][1]["attributes"][2]
    path.write_text(json.dumps(held))
    refused = run(capsys, main, "recovery", path)
    assert (refused.code, refused.out) == (1, "")
    assert refused.err.count("\n") == 1
    assert "not captured" in refused.err
    done = run(capsys, main, "recovery", path, "--skip-holes", "--format", "json")
    assert done.code == 0
    assert done.document["recovery"][0]["requests"] == 1
    assert len(done.document["left_out"]) == 1


def test_a_tokenizer_counts_its_own_tokens(capsys, made, tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    path = tmp_path / "tokenizer.json"
    tokenizer.save(str(path))
    own = run(capsys, main, "recovery", made, "--tokenizer", path, "--format", "json").document
    words = run(capsys, main, "recovery", made, "--format", "json").document
    assert own["tokenizer"] == str(path)
    assert own["recovery"][0]["tokens"] < words["recovery"][0]["tokens"]


@pytest.mark.parametrize(
    ("options", "code", "named"),
    [
        (["--rule", "nonsense"], 2, "nonsense"),
        (["--media-tokens", 0], 2, "--media-tokens"),
        (["--tokenizer", __file__], 2, "tokenizer.json"),
    ],
)
def test_bad_usage_is_told_in_one_line(capsys, made, options, code, named):
    done = run(capsys, main, "recovery", made, *options)
    assert (done.code, done.out) == (code, "")
    assert named in done.err
    assert "Traceback" not in done.err


def test_help_says_the_common_options(capsys):
    done = run(capsys, main, "recovery", "--help")
    assert all(option in done.out for option in ("--format", "--output", "--quiet", "-q", "--rule"))
