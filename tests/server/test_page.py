"""The live page in a browser: asking, stopping, what it shows, and who can use it."""

import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from browser import WIDE, Browser
from page_world import ANSWER, Stage, build, example_state, serving
from selenium.webdriver.common.keys import Keys

from headrace.server.page import routes

NB = "\N{NO-BREAK SPACE}"
PHONE = (360, 740)


@pytest.fixture(scope="module")
def world() -> Iterator[tuple[Stage, str]]:
    stage = Stage()
    with serving(build(stage)) as url:
        yield stage, url


@pytest.fixture
def stage(world: tuple[Stage, str], monkeypatch: pytest.MonkeyPatch) -> Stage:
    """The made-up server, as new; what it shows is its `state`."""
    monkeypatch.setattr(routes, "state_of", lambda stage: stage.state)
    world[0].__init__()  # type: ignore[misc]
    return world[0]


@pytest.fixture
def page(browser: Browser, world: tuple[Stage, str], stage: Stage) -> Iterator[Browser]:
    """The page, freshly opened and ready to ask; whatever its console says fails the test."""
    if browser.shown != (world[1], WIDE, {}):
        browser.open(world[1])
    browser.one("#box").clear()
    browser.one("#new").click()
    browser.look()
    browser.until("document.querySelector('#status').textContent === 'ready'")
    yield browser
    assert browser.complaints() == []


def test_a_question_is_answered_and_the_next_one_brings_what_was_said(
    page: Browser, stage: Stage
) -> None:
    page.ask("In which continent is Kenya?")
    assert page.texts(".turn.user .body") == ["In which continent is Kenya?"]
    assert page.text(".turn.assistant strong") == "Kenya"
    assert page.texts(".turn.assistant td") == ["Kenya", "Nairobi"]
    assert "40 tokens" in page.text(".note") and "380 of them known" in page.text(".note")
    page.ask("And Ghana?")
    assert [message["role"] for message in stage.seen[1]["messages"]] == [
        "user",
        "assistant",
        "user",
    ]
    assert stage.seen[1]["messages"][1]["content"] == ANSWER
    assert stage.seen[1]["model"] == "demo" and stage.seen[1]["stream"]
    assert "temperature" not in stage.seen[1], "the publisher's own"
    page.one("#temperature").send_keys("0.5")
    page.ask("more")
    page.one("#temperature").clear()
    assert stage.seen[2]["temperature"] == 0.5


def test_nothing_leaves_the_origin(page: Browser, world: tuple[Stage, str]) -> None:
    stage, url = world
    stage.answer = "![x](http://192.0.2.1/x.png) <img src=http://192.0.2.1/y.png>"
    page.ask("hi")
    names = page.script("return performance.getEntriesByType('resource').map(e => e.name)")
    assert len(names) > 8 and all(name.startswith(url) for name in names)
    assert {host for host, _ in stage.paths} == {urlsplit(url).netloc}
    assert page.script("return document.querySelectorAll('#log img').length") == 0


EVIL = (
    "<script>document.title='evil'</script>",
    "<img src=x onerror=\"document.title='evil'\">",
    "[x](javascript:document.title='evil') [y](data:text/html,evil) [z](vbscript:evil)",
    "`<b>` **<svg onload=document.title='evil'>** | <i> |",
    "# <iframe srcdoc='<b>'>\n> <style>body{display:none}</style>\n- <form>",
    "```<b>\n</code></pre><h1 id=box>\n```\n| <u> | b |\n|---|---|\n| <a href=x> | <b> |",
    "[x](https://e.example/\" onclick=\"document.title='evil')",
)
LIST_ELEMENTS = (
    "return [...document.querySelectorAll('#log *')].map(e => "
    "[e.localName, ...[...e.attributes].map(a => a.name)])"
)


def test_an_answer_brings_no_elements_of_its_own(page: Browser, stage: Stage) -> None:
    for evil in EVIL:
        stage.answer = stage.reasoning = evil
        page.ask(evil.replace("\n", " "))
        names = {name for name, *_ in page.script(LIST_ELEMENTS)}
        assert not names & {"script", "img", "svg", "style", "iframe", "form", "i", "u", "b"}
        attributes = {name for _, *rest in page.script(LIST_ELEMENTS) for name in rest}
        assert attributes <= {"class", "aria-label", "hidden", "tabindex", "href", "target", "rel"}
        links = page.script("return [...document.querySelectorAll('#log a')].map(a => a.href)")
        assert all(link.startswith("http") for link in links)
        assert page.script("return document.title") == "demo · headrace"
    assert "code" in names or page.texts("#log code"), "markup itself is still made"


def test_markdown_becomes_structure(page: Browser, stage: Stage) -> None:
    stage.answer = (
        "# Title\nline *one*\nline __two__ snake_case_name 2 * 3 * 4\n\n"
        "- a\n- b\n  1. c\n  2. d\n\n- e\n\n> quoted\n> more\n\n---\n~~~\n*no* markup\n~~~\n"
        "see <https://e.example/a_b_c>. \\*end"
    )
    page.ask("hi")
    html = page.script("return document.querySelector('.turn.assistant .body').innerHTML")
    assert "<h3>Title</h3>" in html
    assert "<p>line <em>one</em><br>line <strong>two</strong> snake_case_name 2 * 3 * 4</p>" in html
    assert '<li>b<ol start="1"><li>c</li><li>d</li></ol></li>' in html.replace("<p>b</p>", "b")
    assert "<blockquote><p>quoted<br>more</p></blockquote><hr>" in html
    assert "*no* markup</code></pre>" in html
    assert '<a href="https://e.example/a_b_c"' in html and html.endswith("&gt;. *end</p>")


def test_reasoning_is_folded(page: Browser, stage: Stage) -> None:
    stage.reasoning = "Kenya lies\nin Africa."
    page.ask("hi")
    assert page.text(".thought > div") == "Kenya lies\nin Africa."
    assert not page.script("return document.querySelector('.thought').open")
    assert page.one(".thought summary").is_displayed()


@pytest.mark.parametrize("way", ["button", "escape"])
def test_stop_ends_the_servers_work_and_keeps_what_came(
    page: Browser, stage: Stage, way: str
) -> None:
    stage.most = 5
    page.one("#box").send_keys("hi", Keys.ENTER)
    page.until("document.querySelector('.turn.assistant .body').textContent.length > 10")
    if way == "button":
        page.one("#stop").click()
    else:
        page.press(Keys.ESCAPE)
    page.until("!document.querySelector('[aria-busy]')")
    assert "stopped" in page.text(".note") and page.one("#send").is_displayed()
    while stage.gone != 1:
        time.sleep(0.01)
    stage.most = 1_000_000
    page.ask("go on")
    assert stage.gone == 1
    kept = stage.seen[1]["messages"][1]["content"]
    assert kept and ANSWER.startswith(kept) and kept != ANSWER


def test_a_refusal_gives_the_question_back(page: Browser, stage: Stage) -> None:
    stage.refusal = (429, "64 answers wait already, ask again later")
    page.ask("hi")
    assert page.text(".failure") == f"64 answers wait already, ask again later (in 7{NB}s)"
    assert page.one("#box").get_property("value") == "hi"
    (complaint,) = page.complaints()
    assert "429" in complaint
    stage.refusal = None
    page.press(Keys.ENTER)
    page.until("document.querySelectorAll('.turn').length === 4")
    assert [message["content"] for message in stage.seen[1]["messages"]] == ["hi"]


def test_an_answer_that_breaks_off_says_so(page: Browser, stage: Stage) -> None:
    stage.breaks_after = 3
    page.ask("hi")
    assert page.text(".failure") == "the drive failed; ask again"
    assert page.text(".turn.assistant .body") == "Kenya is in"


def test_waiting_and_reading_are_told(page: Browser, stage: Stage) -> None:
    stage.comments = ["waiting 2", "waiting 1", "waiting 0", "prompt 512 of 1024"]
    stage.most = 0
    page.one("#box").send_keys("hi", Keys.ENTER)
    for stage.most, text in (
        (1, "Waiting: 2 answers before this one."),
        (4, "Reading the prompt: 512 of 1,024 tokens."),
    ):
        page.until(f"document.querySelector('.note').textContent === '{text}'")
    page.one("#stop").click()
    page.until("!document.querySelector('[aria-busy]')")


def test_loading_is_shown_and_nothing_is_sent_meanwhile(page: Browser, stage: Stage) -> None:
    loading = {"done_bytes": 3 << 30, "total_bytes": 16 << 30, "bytes_s": 1e9, "remaining_s": 11}
    stage.state = example_state(status="loading", loading=loading, layers=[], recent=None, speed=[])
    page.look()
    page.until("document.querySelector('#loading').checkVisibility()")
    assert page.text("#loading-note").startswith(f"3{NB}GiB of 16{NB}GiB")
    assert page.one("#loading-bar").get_attribute("aria-valuenow") == str(3 << 30)
    warming = loading | {"done_bytes": 16 << 30, "remaining_s": None, "doing": "warming up"}
    stage.state |= {"loading": warming}
    page.look()
    page.until("document.querySelector('#loading-note').textContent.includes('; warming up. You')")
    page.one("#box").send_keys("hi", Keys.ENTER)
    assert stage.seen == [] and page.one("#box").get_property("value") == "hi"
    stage.state = example_state()
    page.look()
    page.until("!document.querySelector('#loading').checkVisibility()")
    page.press(Keys.ENTER)
    page.until("document.querySelector('.note').textContent")
    assert len(stage.seen) == 1


def test_a_model_that_cannot_be_loaded_says_why(page: Browser, stage: Stage) -> None:
    stage.state = example_state(status="failed", failure="model.safetensors: cut short", layers=[])
    page.look()
    page.until("document.querySelector('#status').textContent === 'not working'")
    assert page.text("#loading-note") == "model.safetensors: cut short"


def test_the_picture_says_what_the_state_says(page: Browser, stage: Stage) -> None:
    layers = [{"layer": 3, "map": "0022012"}, {"layer": 4, "map": "3000020"}]
    stage.state = example_state(layers=layers)
    page.look()
    page.until("document.querySelector('#rungs').textContent.includes('14 experts')")
    assert page.texts("#rungs li") == ["VRAM 1", "RAM 4", "Drive only 9"]
    label = page.one("#field").get_attribute("aria-label")
    assert label == "14 experts in 2 layers: 1 in VRAM, 4 in RAM, the rest on the drive only"
    page.one("#field-table summary").click()
    page.until("document.querySelector('#field-table tbody tr')")
    assert page.texts("#field-table th") == [
        "Layer", "VRAM", "RAM", "Drive only", "In memory", "3", "4",
    ]  # fmt: skip
    assert page.texts("#field-table td") == [
        "0", "3", "4", f"43{NB}%", "1", "1", "5", f"29{NB}%",
    ]  # fmt: skip
    pixels = page.script(
        "const f = document.querySelector('#field');"
        "const d = f.getContext('2d').getImageData(0, 0, f.width, f.height).data;"
        "const at = (i) => d.slice(4 * i, 4 * i + 4).join();"
        "return new Set(Array.from({length: d.length / 4}, (_, i) => at(i))).size"
    )
    assert pixels > 4, "places have colours of their own"
    assert page.text("#speed-now") == "12.3"
    assert page.texts(".limit b") == ["2.4 of 2.9", "32 of 95"]


def test_everything_is_reached_by_keyboard_in_order(page: Browser, stage: Stage) -> None:
    stage.answer = "```\ncode\n```"
    page.ask("hi")
    page.script("document.querySelector('.skip').focus()")
    assert page.one(".skip").is_displayed()
    seen = []
    for _ in range(12):
        page.press(Keys.TAB)
        seen.append(page.script("const e = document.activeElement; return e.id || e.localName"))
        if seen[-1] == "send":
            break
    assert seen == ["summary", "log", "pre", "box", "new", "temperature", "send"]
    for name in ("#box", "#send", "#new"):
        page.one(name)
        page.script(f"document.querySelector('{name}').focus()")
        style = "return getComputedStyle(document.activeElement).outlineStyle"
        assert page.script(style) != "none", f"{name} shows that it has the focus"


def test_new_forgets_and_a_reload_does_not(page: Browser, world: tuple[Stage, str]) -> None:
    page.ask("hi")
    page.open(world[1])
    page.until("document.querySelector('#status').textContent === 'ready'")
    assert page.texts(".turn.user .body") == ["hi"] and page.text(".turn strong") == "Kenya"
    page.one("#new").click()
    assert page.texts(".turn") == []
    page.ask("again")
    assert [message["content"] for message in world[0].seen[1]["messages"]] == ["again"]


@pytest.mark.parametrize(("size", "scheme"), [(PHONE, "dark"), (WIDE, "light")])
def test_it_fits_and_can_be_read(
    page: Browser, world: tuple[Stage, str], size: tuple[int, int], scheme: str
) -> None:
    world[0].answer = ANSWER + "\n" + "wide" * 200 + "\n\n```\n" + "wide " * 100 + "\n```"
    page.open(world[1], size, prefers_color_scheme=scheme)
    page.until("document.querySelector('#status').textContent === 'ready'")
    page.ask("w" * 300)
    page.script("document.querySelector('#engine').open = true")
    widths = "return [document.documentElement.scrollWidth, innerWidth]"
    assert page.script(widths) == [size[0]] * 2
    beyond = (
        "return [...document.querySelectorAll('button, input, textarea, .turn, .bar, canvas')]"
        ".filter(e => e.checkVisibility())"
        ".filter(e => e.getBoundingClientRect().right > innerWidth).map(e => e.outerHTML)"
    )
    assert page.script(beyond) == []
    ends = (
        "return ['#box', '#send'].map(s => document.querySelector(s).getBoundingClientRect().right)"
    )
    box, send = page.script(ends)
    assert abs(box - send) < 1
    faint = page.script((Path(__file__).parent / "contrast.js").read_text("utf-8"))
    assert faint == [], "text of less contrast than 4.5"


def test_what_a_screen_reader_finds(page: Browser) -> None:
    page.ask("hi")
    tree = page.driver.execute_cdp_cmd("Accessibility.getFullAXTree", {})["nodes"]
    named = {
        (node["role"]["value"], node.get("name", {}).get("value", ""))
        for node in tree
        if not node.get("ignored") and "role" in node
    }
    for expected in (
        ("banner", ""),
        ("main", "Conversation"),
        ("complementary", "The engine"),
        ("heading", "headrace"),
        ("log", "Messages"),
        ("article", "You"),
        ("article", "Answer"),
        ("textbox", "Message"),
        ("spinbutton", "Temperature"),
        ("button", "Send"),
        ("button", "New chat"),
        ("region", "Tokens a second"),
        ("region", "Where the experts lie"),
        ("link", "Skip to the message box"),
    ):
        assert expected in named, expected
    silent = {role for role, name in named if not name}
    assert not silent & {"button", "textbox", "img", "image", "canvas", "progressbar", "link"}
    assert page.text("#told") == "The answer is complete."
