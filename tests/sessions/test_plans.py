"""A turn is planned once and run by that plan; an edit under "auto" compares plans and runs one of them."""

from __future__ import annotations

import pytest

from kamera import ChatSession, ChunkStore, KameraWindow, ReusePolicy, testbed
from kamera.edits import policies
from kamera.engines.hf import HfEngine
from kamera.reuse import Reuser
from kamera.trust import GUARANTEES
from kamera.window import Plan, policy_in_force, run, stage
from tests.sessions.test_price import OPTIONS, shown

POLICIES = {
    "default": ReusePolicy(),
    "exact": ReusePolicy.exact(),
    "streaming": ReusePolicy(),
}


@pytest.fixture(scope="module")
def backbone() -> HfEngine:
    return HfEngine(*testbed.load())


@pytest.fixture(scope="module")
def frames() -> list:
    return [frame.image for frame in testbed.World(seed=3).episode(0, legends=6).frames]


@pytest.fixture
def seen(monkeypatch) -> dict[str, list[Plan]]:
    """The plans that windows make, and those that are run; both still do what they do."""
    made, ran = list[Plan](), list[Plan]()
    planned, acted = stage.planned, run._PlanRun.run_steps

    def making(request, view):
        made.append(planned(request, view))
        return made[-1]

    def running(of):
        ran.append(of.plan)
        return acted(of)

    monkeypatch.setattr(stage, "planned", making)
    monkeypatch.setattr(run._PlanRun, "run_steps", running)
    return {"made": made, "ran": ran}


def admitted(plan: Plan, window: KameraWindow) -> bool:
    return plan.request.on_leave == "exact" or all(
        GUARANTEES.index(worth) <= GUARANTEES.index(policy_in_force(window).minimum)
        for worth in plan.after.worths
    )


@pytest.mark.parametrize("reuse", [False, True])
@pytest.mark.parametrize("policy", POLICIES)
def test_an_appended_turn_makes_one_plan_and_runs_it(backbone, frames, seen, policy, reuse):
    session = ChatSession(backbone, ChunkStore.open("memory://"), policy=POLICIES[policy], reuse=reuse)
    for i, frame in enumerate(frames[:4]):
        session.send([*session.messages, shown(frame)], **OPTIONS)
        assert len(seen["made"]) == len(seen["ran"]) == i + 1
        assert seen["made"][-1].steps is seen["ran"][-1].steps
    session.flush()


@pytest.mark.parametrize("policy", POLICIES)
def test_an_edited_turn_runs_one_of_the_plans_it_compared(backbone, frames, seen, policy):
    session = ChatSession(
        backbone,
        ChunkStore.open("memory://"),
        policy=POLICIES[policy],
        edit_policy=policies.keep_last_images(2),
    )
    for frame in frames[:5]:
        made, ran = len(seen["made"]), len(seen["ran"])
        session.send([*session.messages, shown(frame)], **OPTIONS)
        compared = seen["made"][made:]
        (done,) = seen["ran"][ran:]
        assert any(done.steps is plan.steps for plan in compared) and len(compared) <= 3
        assert done.cost.tokens == min(p.cost.tokens for p in compared if admitted(p, session.window))
    session.flush()


def test_a_prompt_of_a_reuser_is_planned_once(backbone, frames, seen):
    reuser = Reuser(backbone, ChunkStore.open("memory://"), POLICIES["streaming"])
    for count in (1, 2):
        plan = reuser.prepare([shown(frame) for frame in frames[:count]])
        assert len(seen["made"]) == count and len(seen["ran"]) == count - 1
        plan.run()
        assert seen["ran"][-1].steps is seen["made"][-1].steps
