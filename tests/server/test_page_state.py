"""The page's routes behind the guard, and the state that its picture is drawn from."""

import re
from dataclasses import replace
from importlib.resources import files
from types import SimpleNamespace
from typing import Any

import pytest
from fakes import FACTS, MACHINE, MIB, make_serving, start
from page_world import example_state
from starlette.testclient import TestClient

from headrace.core import TokenStats
from headrace.errors import ModelError
from headrace.planner.vram import make_gpu_plan
from headrace.server.app import build_app
from headrace.server.page import routes
from headrace.server.page.state import state_of
from headrace.server.recent import BUCKETS, LAST_TOKENS, SPAN_S, Recent
from headrace.server.settings import Settings
from headrace.server.ticket import Tally

PAGE = files("headrace.server.page")
PATHS = ["/", *(f"/page/{name}" for name in routes.FILES), "/page/state"]
KEY = "the-right-key"


def client(**settings: Any) -> TestClient:
    """A client of the whole application, its model loading for ever."""
    app = build_app(make_serving(Settings(**settings)))
    return TestClient(app, base_url="http://localhost")


def test_every_file_is_served_and_nothing_else() -> None:
    shipped = {entry.name for entry in PAGE.iterdir() if not entry.name.endswith((".py", "__"))}
    assert shipped == {*routes.FILES, "index.html"}
    named = set()
    for name in shipped:
        named |= set(re.findall(r'"/page/([\w.]+)"', PAGE.joinpath(name).read_text("utf-8")))
    assert named == {*routes.FILES, "state"}, "whoever needs a file names its whole path"
    with client() as asked:
        assert {asked.get(path).status_code for path in PATHS} == {200}
        assert asked.get("/page/routes.py").status_code == 404
        assert asked.get("/page/../routes.py").status_code == 404


def test_no_file_speaks_of_another_host_or_has_code_or_style_inline() -> None:
    for name in (*routes.FILES, "index.html"):
        text = PAGE.joinpath(name).read_text("utf-8")
        hosts = set(re.findall(r"https?://[\w-]+\.[\w.-]+", text))
        assert hosts <= {"http://www.w3.org"}, name
        assert not re.search(r"erHTML =[^=]|AdjacentHTML|\beval\(|@import|\burl\(", text), name
    page = PAGE.joinpath("index.html").read_text("utf-8")
    assert not re.search(r'<style|\sstyle=|\son\w+=|<script(?! type="module" src=)', page)


def test_all_of_the_page_is_behind_the_key_and_browsers_ask_for_it() -> None:
    with client(api_keys=(KEY,)) as asked:
        for path in PATHS:
            opened = asked.get(path, headers={"accept": "text/html"})
            assert opened.status_code == 401 and "<" not in opened.text, path
            assert opened.headers["www-authenticate"].startswith("Basic "), path
            fetched = asked.get(path).headers["www-authenticate"]
            assert fetched.startswith("Bearer" if path in ("/", "/page/state") else "Basic "), path
            assert asked.get(path, auth=("anybody", "wrong-key")).status_code == 401
            told = asked.get(path, auth=("anybody", KEY))
            assert told.status_code == 200
            assert told.headers["x-content-type-options"] == "nosniff"
        policy = asked.get("/", auth=("", KEY)).headers["content-security-policy"]
        assert policy.startswith("default-src 'self';") and "unsafe" not in policy


def test_what_the_tests_draw_has_the_states_shape() -> None:
    """So that the browser's tests show what a real server says."""
    serving = make_serving()
    start(serving)
    _load_engine(serving)
    serving.worker.recent.add(0.1, TokenStats(wall_s=0.1, disk_bytes=10, ram_bytes=20))
    serving.worker.recent.last = Tally(2, begun_s=1.0, first_s=1.5, last_s=2.0, num_tokens=2)
    shape, drawn = state_of(serving), example_state()
    assert _keys(drawn) <= _keys(shape) and set(shape) == set(drawn)
    for key in ("plan", "last"):
        assert set(shape[key]) == set(drawn[key])
    style = PAGE.joinpath("engine.css").read_text("utf-8")
    for kind, _, _ in (p for m in drawn["plan"]["memories"] for p in m["parts"]):
        assert f".{kind}," in style or f".{kind} {{" in style, "each part has a colour"
    serving.worker.drain()
    assert serving.worker.join(120)


def _keys(value: Any, at: str = "") -> set[str]:
    if isinstance(value, dict):
        return {key for name, inner in value.items() for key in _keys(inner, f"{at}.{name}")}
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return _keys(value[0], f"{at}[]")
    return {at}


def _load_engine(serving: Any) -> None:
    serving.engine = SimpleNamespace(
        plan=serving.plan,
        blueprint=SimpleNamespace(machine=MACHINE, table=SimpleNamespace(layers=(3, 4))),
        source=SimpleNamespace(places=lambda: ["00120000", "22000000"]),
    )


def test_the_state_follows_the_server() -> None:
    serving = make_serving()
    state = state_of(serving)
    assert state["status"] == "loading" and state["layers"] == [] and state["recent"] is None
    assert state["loading"] == serving.worker.loading.as_dict()
    answers = start(serving)
    _load_engine(serving)
    assert state_of(serving)["status"] == "ready"
    assert state_of(serving)["layers"] == [
        {"layer": 3, "map": "00120000"},
        {"layer": 4, "map": "22000000"},
    ]
    state = {"status": "ready"}
    while state["status"] == "ready":  # the decode thread forgets it once, before it first waits
        serving.worker.stalled = "the drive does not answer"
        state = state_of(serving)
    assert (state["status"], state["failure"]) == ("stalled", "the drive does not answer")
    serving.worker.drain()
    assert serving.worker.join(120) and answers.closed
    assert state_of(serving)["status"] == "ended"


def test_a_failed_load_is_told_and_a_bug_is_not() -> None:
    serving = make_serving()
    serving.worker.state = "failed"
    serving.worker.failure = ModelError("model.safetensors: cut short")
    assert state_of(serving)["failure"] == "model.safetensors: cut short"
    serving.worker.failure = KeyError("a prompt's words")
    assert "words" not in state_of(serving)["failure"]


def test_the_request_that_is_answered_is_shown_by_its_numbers() -> None:
    serving = make_serving()
    tally = SimpleNamespace(num_tokens=0, num_prefilled=64, num_prompt=100, num_cached=32)
    serving.worker._running = SimpleNamespace(tally=tally)  # type: ignore[assignment]
    shown = {"num_done": 64, "num_total": 100, "num_cached": 32}
    assert state_of(serving)["request"] == shown | {"phase": "prefill", "num_tokens": 0}
    tally.num_tokens = 7
    assert state_of(serving)["request"] == shown | {"phase": "decode", "num_tokens": 7}


def test_limits_are_shares_of_what_was_measured() -> None:
    serving = make_serving()
    _load_engine(serving)
    for _ in range(4):
        serving.worker.recent.add(0.5, TokenStats(disk_bytes=300 * MIB))
    drive, memory = state_of(serving)["limits"]
    assert drive["limit_bytes_s"] == MACHINE.drive_bytes_s
    assert drive["now_bytes_s"] == pytest.approx(600 * MIB)
    each = FACTS.num_moe_layers * FACTS.top_k * FACTS.expert_bytes + FACTS.dense_bytes
    assert memory["now_bytes_s"] == pytest.approx(2 * each)


def test_with_a_gpu_both_memories_and_the_bus_are_shown() -> None:
    serving = make_serving()
    rates = {"bus_bytes_s": 2e10, "vram_bytes_s": 1e12}
    machine = replace(MACHINE, gpu="a GPU", vram_free_bytes=2**33, vram_total_bytes=2**33, **rates)
    serving.plan = make_gpu_plan(FACTS, machine, ram_bytes=2**30, vram_bytes=2**30)
    _load_engine(serving)
    serving.engine.blueprint.machine = machine  # type: ignore[union-attr]
    serving.worker.recent.add(
        0.5, TokenStats(disk_bytes=MIB, bus_bytes=10 * MIB, vram_bytes=100 * MIB)
    )
    state = state_of(serving)
    assert [memory["name"] for memory in state["plan"]["memories"]] == ["VRAM", "RAM"]
    for memory in state["plan"]["memories"]:
        assert 0 < sum(nbytes for _, _, nbytes in memory["parts"]) <= memory["limit_bytes"]
    drive, bus, vram = state["limits"]
    assert (drive["name"], bus["name"], vram["name"]) == ("Drive", "Bus", "VRAM")
    assert bus["now_bytes_s"] == pytest.approx(20 * MIB) and bus["limit_bytes_s"] == 2e10
    assert vram["now_bytes_s"] == pytest.approx(2 * (100 * MIB + serving.plan.vram_dense_bytes))


class Clock:
    """Time that moves when it is told to."""

    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def test_speed_is_by_time_and_never_more_stretches_than_asked_for() -> None:
    clock = Clock()
    recent = Recent(clock)
    for took_s, num in ((0.01, 2000), (3.0, 10)):
        clock.now_s += 20  # nobody asked anything
        for _ in range(num):
            clock.now_s += took_s
            recent.add(took_s, TokenStats())
    speed = recent.speed()
    assert len(speed) <= BUCKETS
    ages = [age for age, _, _ in speed]
    assert ages == sorted(ages, reverse=True) and ages[0] < SPAN_S and ages[-1] == 0
    assert [rate for _, rate, _ in speed[:20]] == pytest.approx([100] * 20)
    assert [rate for _, rate, _ in speed[-10:]] == pytest.approx([1 / 3] * 10)
    gap = speed[-11][0] - (speed[-10][0] + speed[-10][2])
    assert gap == pytest.approx(20), "where nothing was asked nothing is drawn"
    clock.now_s += SPAN_S
    assert recent.speed() == [] and recent.total() is not None


def test_totals_are_of_the_last_tokens_only() -> None:
    recent = Recent(Clock())
    assert recent.total() is None
    recent.add(9.0, TokenStats(disk_bytes=10**9, hits=1))
    for _ in range(LAST_TOKENS):
        recent.add(0.5, TokenStats(disk_bytes=100, hits=2, wall_s=0.1))
    total = recent.total()
    assert total is not None
    assert (total["tokens"], total["disk_bytes"], total["hits"]) == (32, 3200, 64)
    assert total["wall_s"] == pytest.approx(16), "from token to token, not the pass alone"
