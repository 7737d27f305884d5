"""Published layouts, filled with a few made pictures."""

from __future__ import annotations

import json

import pytest
from PIL import Image

from kamera.errors import TaskDataError
from kamera.eval.reuse import ReuseBench, draw_items
from kamera.eval.tasks.sample import Picture, Problem
from kamera.testbed import render_video
from kamera.testbed.benchmarks import write_mm_niah

score, decision = ReuseBench().score, ReuseBench().decision


def picture(path, colour):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (28, 28), colour).save(path)


def drawn(source, data, **options):
    made = list(draw_items(source, data, **{"count": 10, **options}))
    problems = [one for one in made if isinstance(one, Problem)]
    return {item.sample.id: item.sample for item in made if not isinstance(item, Problem)}, problems


@pytest.fixture
def ovo(tmp_path):
    frames = [Image.new("RGB", (32, 32), (20 * i, 0, 0)) for i in range(10)]
    (tmp_path / "COIN").mkdir()
    render_video(frames, tmp_path / "COIN" / "a.mp4", fps=1, hold=1)
    chosen = {"question": "What is it?", "options": ["a cup", "a hat"], "video": "COIN/a.mp4"}
    steps = [{"realtime": 5, "step": "pour", "type": 0}, {"realtime": 8, "step": "cut", "type": 1}]
    records = [
        {"id": 0, "task": "EPM", "realtime": 6, "gt": 1, **chosen},
        {"id": 1, "task": "SSR", "video": "COIN/a.mp4", "tutorial": "t"} | {"test_info": steps},
        {"id": 2, "task": "REC", "video": "COIN/a.mp4", "activity": "jump"}
        | {"test_info": [{"realtime": 9, "count": 3}]},
        {"id": 3, "task": "CRR", "video": "COIN/a.mp4", "question": "Why?", "answer": "so"}
        | {"test_info": [{"realtime": 7, "type": 1}]},
        {"id": 4, "task": "EPM", "realtime": 6, "gt": 1, **chosen, "video": "COIN/none.mp4"},
    ]
    (tmp_path / "ovo_bench_new.json").write_text(json.dumps(records))
    return tmp_path


def test_ovo_bench_gives_frames_up_to_the_question(ovo):
    items, problems = drawn("ovo-bench", ovo, units=4)
    assert sorted(items) == ["0", "1/0", "1/1", "2/0", "3/0"]
    assert len(problems) == 1 and "no video 'COIN/none.mp4'" in str(problems[0])
    item = items["0"]
    assert [part.caption for part in item.parts] == [
        *("Frame at 0.0 s.\n", "Frame at 2.0 s.\n", "Frame at 4.0 s.\n", "Frame at 6.0 s.\n")
    ]
    assert "A. a cup; B. a hat;" in item.question and item.answer == "B"
    assert (score("B.", item), score("(A)", item), score("no idea", item)) == (1.0, 0.0, 0.0)
    assert decision("The answer is (B)", item) == decision("b", item) == "B"
    assert [items[i].answer for i in ("1/0", "1/1", "2/0", "3/0")] == ["no", "yes", "3", "yes"]
    assert score("No, it is not.", items["1/0"]) == 1.0 and score("3 times", items["2/0"]) == 1.0


@pytest.fixture
def documents(tmp_path):
    for page in range(1, 8):
        picture(tmp_path / "pages" / f"a[1]_{page}.png", (0, 30 * page, 0))
        picture(tmp_path / "pages" / f"b_{page}.png", (0, 0, 30 * page))
    common = {"doc_type": "Report", "evidence_sources": "['Chart']"}
    records = [
        {"doc_id": "a[1].pdf", "question": "How many?", "answer": "12", "answer_format": "Int"}
        | {"evidence_pages": "[5, 7]", **common},
        {"doc_id": "b.pdf", "question": "Who?", "answer": "Not answerable", "answer_format": "None"}
        | {"evidence_pages": "[]", **common},
        {"doc_id": "c.pdf", "question": "Who?", "answer": "x", "answer_format": "Str"}
        | {"evidence_pages": "[1]", **common},
        {"doc_id": "b.pdf", "question": "Which?", "answer": "x", "answer_format": "Str"}
        | {"evidence_pages": "[1, 9]", **common},
    ]
    (tmp_path / "samples.json").write_text(json.dumps(records))
    return tmp_path


def test_mmlongbench_doc_gives_the_pages_around_the_evidence(documents):
    items, problems = drawn("mmlongbench-doc", documents, units=4)
    assert sorted(items) == ["0/a[1].pdf", "1/b.pdf"]
    shown = [part.caption for part in items["0/a[1].pdf"].parts]
    assert shown == ["Page 4.\n", "Page 5.\n", "Page 6.\n", "Page 7.\n"]
    assert [str(p).split(": ", 1)[1].split(":")[0] for p in problems] == ["TaskDataError", "TaskDataError"]
    assert "no pages of c.pdf" in str(problems[0]) and "evidence page 9" in str(problems[1])
    assert score("12", items["0/a[1].pdf"]) == 1.0 and score("not answerable", items["1/b.pdf"]) == 1.0


@pytest.mark.parametrize(
    "answer, form, response, value",
    [
        ("12", "Int", "12.0", 1.0),
        ("12", "Int", "about 12", 0.0),
        ("0.25", "Float", "25%", 1.0),
        ("0.25", "Float", "0.2524", 1.0),
        ("0.25", "Float", "0.26", 0.0),
        ("Pew Research", "Str", "pew research (2014)", 1.0),
        ("abcdefghij", "Str", "abcdefgxyz", 0.7),
        ("abcd", "Str", "xyzw", 0.0),
        ("2015-01-02", "Str", "2015-01-03", 0.0),
        ("['b', 'a']", "List", "['a', 'b']", 1.0),
        ("['a', 'b']", "List", "a", 0.0),
    ],
)
def test_documents_are_scored_by_the_format_of_the_label(answer, form, response, value):
    from kamera.eval.reuse.doc_score import score_document

    assert score_document(response, answer, form) == pytest.approx(value)


@pytest.fixture
def trajectories(tmp_path):
    for number, steps in (("7", 6), ("8", 4), ("9", 2)):
        done = []
        for step in range(steps):
            picture(tmp_path / "screenshots" / f"{number}_{step}.png", (step * 30, 99, 0))
            action = "CLICK" if step < steps - 1 else "COMPLETE"
            done.append(
                {"step": step, "screenshot": f"{number}_{step}.png", "action": action, "info": [[1, 2]]}
            )
        episode = {"episode_id": number, "steps": done, "step_length": steps}
        episode["task_info"] = {"category": "Web_Shopping", "instruction": "Buy a hat."}
        (tmp_path / "annotations").mkdir(exist_ok=True)
        (tmp_path / "annotations" / f"{number}.json").write_text(json.dumps(episode))
    return tmp_path


def test_gui_trajectories_give_screenshots_with_their_actions(trajectories):
    items, problems = drawn("gui-odyssey", trajectories, units=4)
    assert sorted(items) == ["7", "8"] and "2 steps" in str(problems[0])
    shown = [part.caption for part in items["8"].parts]
    assert shown == [*(f"Step {i}: CLICK [[1, 2]]\n" for i in range(3)), "Step 3: now\n"]
    assert score("COMPLETE", items["8"]) == 1.0 and score("complete.", items["8"]) == 1.0
    assert score("CLICK", items["8"]) == 0.0 and score("LONG_PRESS", items["7"]) == 0.0


def test_mm_niah_items_keep_their_own_order_scorer_and_prompt(tmp_path):
    data = write_mm_niah(tmp_path, episodes=2, questions=1, layouts=("LLLLI",))
    items, _ = drawn("mm-niah", data)
    assert len(items) == 4
    item = next(i for i in items.values() if i.task == "reasoning-text-val")
    assert item.meta["rule"] == "mm-niah" and score(f"It is {item.answer}.", item) == 1.0
    pictures = [part for part in item.parts if isinstance(part, Picture)]
    assert len(pictures) == 5 and item.question.endswith("using a single word or phrase.")
    few, _ = drawn("mm-niah", data, count=2)
    assert set(few) < set(items)


@pytest.mark.parametrize(
    "source, said",
    [
        ("mm-niah", "no MM-NIAH annotations"),
        ("muirbench", "no data/test"),
        ("ovo-bench", "no ovo_bench_new.json"),
        ("mmlongbench-doc", "no samples.json"),
        ("gui-odyssey", "no annotations there"),
    ],
)
def test_a_folder_that_is_not_the_set_is_refused(tmp_path, source, said):
    with pytest.raises(TaskDataError, match=said):
        list(draw_items(source, tmp_path, count=1))


def test_sources_are_refused_by_name():
    with pytest.raises(ValueError, match="'tv' is none of testbed, mm-niah, muirbench, ovo-bench"):
        list(draw_items("tv", None, count=1))
    with pytest.raises(ValueError, match="needs --data"):
        list(draw_items("ovo-bench", None, count=1))
    assert Problem("a", "b")
