"""The chat page: its headers and files, and the page itself in a browser where one is installed."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import aiohttp
import pytest

from serve import HttpServer
from tests.serve.running import running_server
from tests.serve.scripted_runner import ScriptedRunner

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
LONGEST_ANSWER = 3600
RICH = (
    "# Title\n\nSome **bold** text, $e^{i\\pi} + 1 = 0$, costs $5 and $6.\n\n"
    "$$\\int_0^1 x\\,dx = \\frac12$$\n\n```python\ndef f(x):\n    return 'é'\n```\n\n| a | b |\n| - | - |\n| 1 | 2 |\n"
)
HOSTILE = (
    "<script>window.pwned = 1</script><img src=x onerror='window.pwned = 2'>\n\n"
    "[link](javascript:window.pwned=3) ![image](http://127.0.0.1:9/x.png)\n\n"
    "<iframe src='data:text/html,x'></iframe>\n\n"
    "$\\href{javascript:window.pwned=4}{x} \\includegraphics{http://127.0.0.1:9/y.png}$\n\n"
    "```html\n<script>window.pwned = 5</script>\n```\n"
)


async def test_the_page_loads_nothing_from_elsewhere(server: HttpServer) -> None:
    async with aiohttp.ClientSession(server.url) as session:
        async with session.get("/") as response:
            html = await response.text()
            policy = response.headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy and "script-src 'self'" in policy
        assert "unsafe-eval" not in policy and "http" not in policy
        files = re.findall(r'(?:src|href)="([^"]+)"', html)
        assert len(files) > 6
        for name in files:
            if name.startswith("data:"):
                continue
            async with session.get(f"/{name}") as response:
                assert response.status == 200
                assert response.headers["X-Content-Type-Options"] == "nosniff"
        for name in ("../app.py", "%2e%2e/app.py", "vendor", "nothing.js"):
            async with session.get(f"/page/{name}") as response:
                assert response.status == 404
        async with session.get("/page/vendor/LICENSES.txt") as response:
            text = await response.text()
        assert all(name in text for name in ("marked", "DOMPurify", "KaTeX", "highlight.js", "MIT License"))


@pytest.fixture(scope="module")
def slow_server() -> Iterator[HttpServer]:
    runner = ScriptedRunner(step_s=0.003)
    runner.answer("[rich]", RICH)
    runner.answer("[hostile]", HOSTILE)
    runner.answer("[think]", "<think>\nLet me see.\n</think>\n\nForty-two.")
    runner.answer("[long]", "word " * 700)
    with running_server(runner, max_output_tokens=LONGEST_ANSWER) as server:
        yield server


@pytest.fixture
def page(slow_server: HttpServer) -> Iterator[Any]:
    if BROWSER is None:
        pytest.skip("no Chromium is installed")
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        page = browser.new_page()
        faults: list[str] = []
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("console", lambda message: faults.append(message.text) if "Policy" in message.text else None)
        page.on(
            "response",
            lambda response: faults.append(f"{response.status} {response.url}") if response.status > 400 else None,
        )
        page.on(
            "request", lambda request: faults.append(request.url) if not _is_local(request.url, slow_server) else None
        )
        page.goto(slow_server.url)
        page.wait_for_selector("#model:has-text('scripted')")
        yield page
        browser.close()
        assert faults == []


def _is_local(url: str, server: HttpServer) -> bool:
    return url.startswith((server.url, "data:"))


def say(page: Any, text: str) -> None:
    page.fill("#message", text)
    page.press("#message", "Enter")


def wait_for_answer(page: Any) -> Any:
    page.wait_for_selector("#send:visible", timeout=20_000)
    return page.locator(".assistant").last


def test_type_and_stream(page: Any) -> None:
    say(page, "[rich]")
    page.wait_for_selector("#stop:visible")
    page.wait_for_selector(".assistant h1")
    assert page.locator("#stop").is_visible()  # it streams: the title is there before the end
    answer = wait_for_answer(page)
    assert answer.locator("strong").inner_text() == "bold"
    assert answer.locator(".katex").count() == 2
    assert answer.locator(".katex-display").count() == 1
    assert "costs $5 and $6." in answer.inner_text()
    assert answer.locator("pre .hljs-keyword").first.inner_text() == "def"
    assert answer.locator("td").all_inner_texts() == ["1", "2"]
    numbers = page.locator("#numbers").inner_text()
    assert re.fullmatch(r"\d+ prompt tokens · \d+ generated tokens · \d+\.\d s · \d+\.\d tokens/s", numbers)


def test_stop_and_reload(page: Any) -> None:
    say(page, "[long]")
    page.wait_for_selector(".assistant:has-text('word word')")
    page.click("#stop")
    words = wait_for_answer(page).locator(".answer").inner_text().split()
    assert 1 < len(words) < 700
    page.reload()
    page.wait_for_selector(".assistant")
    assert page.locator(".user .text").inner_text() == "[long]"
    assert page.locator(".assistant .answer").inner_text().split() == words
    say(page, "[think]")
    answer = wait_for_answer(page)
    assert answer.locator(".answer").inner_text() == "Forty-two."
    assert answer.locator(".reasoning").text_content() == "Let me see."
    page.click("#clear")
    assert page.locator(".turn").count() == 0


def test_a_reload_keeps_what_has_come_of_an_answer(page: Any) -> None:
    say(page, "[long]")
    page.wait_for_selector(".assistant:has-text('word word')")
    page.reload()
    page.wait_for_selector(".assistant:has-text('word word')")
    assert page.locator(".user .text").inner_text() == "[long]"
    with page.expect_request("**/v1/chat/completions") as info:
        say(page, "[think]")
    roles = [message["role"] for message in info.value.post_data_json["messages"]]
    assert roles == ["user", "assistant", "user"]
    assert wait_for_answer(page).locator(".answer").inner_text() == "Forty-two."


def test_the_longest_answer_is_the_servers_unless_the_reader_wants_less(page: Any) -> None:
    for wanted, sent in (("", LONGEST_ANSWER), ("16384", LONGEST_ANSWER), ("7", 7)):
        page.evaluate("document.getElementById('settings').open = true")
        page.fill("#max_tokens", wanted)
        with page.expect_request("**/v1/chat/completions") as info:
            say(page, "[think]")
        assert info.value.post_data_json.get("max_tokens") == sent
        assert wait_for_answer(page).locator(".fault").count() == 0


def test_model_text_cannot_act(page: Any) -> None:
    say(page, "[hostile]")
    answer = wait_for_answer(page)
    page.wait_for_timeout(200)
    assert page.evaluate("window.pwned") is None
    assert answer.locator("script, img, iframe").count() == 0
    links = answer.locator("a").evaluate_all("links => links.map(link => link.getAttribute('href'))")
    assert not [link for link in links if link and link.lower().startswith("javascript")]
    assert "<script>window.pwned = 1</script>" in answer.inner_text()


def test_faults_are_shown(page: Any, slow_server: HttpServer) -> None:
    page.click("summary")
    page.fill("#temperature", "-1")
    page.keyboard.press("Tab")
    page.click("summary")
    with page.expect_response("**/v1/chat/completions") as info:
        say(page, "x")
    assert info.value.status == 400
    fault = wait_for_answer(page).locator(".fault")
    assert "temperature" in fault.inner_text()
    assert is_in_view(page, fault)
    assert page.locator("#numbers").inner_text() == ""


WIDTHS = (320, 445, 800, 1400)


def is_in_view(page: Any, place: Any) -> bool:
    box, size = place.bounding_box(), page.viewport_size
    return (
        box is not None
        and box["x"] >= 0
        and box["y"] >= 0
        and box["x"] + box["width"] <= size["width"]
        and box["y"] + box["height"] <= size["height"]
    )


@pytest.mark.parametrize("width", WIDTHS)
def test_everything_fits_every_width(page: Any, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 700})
    for text in ("hi", "[rich]"):
        say(page, text)
        wait_for_answer(page)
    page.click("summary")
    for name in ("#send", "#message", "#clear", "summary", "#settings form", "#key"):
        assert is_in_view(page, page.locator(name)), name
    assert page.evaluate("document.documentElement.scrollWidth") == width
    bubble = page.locator(".user .text").first.bounding_box()
    assert bubble["width"] < 80  # two letters, not a row


def test_an_empty_page_says_what_it_is(page: Any) -> None:
    greeting = page.locator("#greeting").inner_text()
    assert "scripted" in greeting and "4,096 tokens of context" in greeting
    suggestion = page.locator("#suggestions button").first
    text = suggestion.inner_text()
    suggestion.click()
    assert page.input_value("#message") == text
    say(page, "hi")
    assert not page.locator("#welcome").is_visible()
    wait_for_answer(page)
    page.click("#clear")
    assert page.locator("#welcome").is_visible()


def sent_by(page: Any, act: Callable[[], None]) -> list[tuple[str, str]]:
    """The messages of the request that an act leads to."""
    with page.expect_request("**/v1/chat/completions") as info:
        act()
    wait_for_answer(page)
    return [(message["role"], message["content"]) for message in info.value.post_data_json["messages"]]


def test_copy_edit_and_retry(page: Any) -> None:
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    for text in ("first", "[rich]"):
        say(page, text)
        wait_for_answer(page)
    page.locator(".assistant .actions .copy").last.click()
    assert page.evaluate("navigator.clipboard.readText()") == RICH
    page.locator(".assistant pre .copy").click()
    assert page.evaluate("navigator.clipboard.readText()") == "def f(x):\n    return 'é'"
    page.evaluate("void (navigator.clipboard.writeText = () => Promise.reject(new Error('no clipboard')))")
    page.locator(".user .copy").first.click()
    page.wait_for_selector(".user .copy:has-text('Copied')")
    assert page.evaluate("navigator.clipboard.readText()") == "first"
    # The last answer again, and the first question in other words: what came after it goes.
    asked = [("user", "first"), ("assistant", "Hello!"), ("user", "[rich]")]
    assert sent_by(page, page.locator(".retry").last.click) == asked
    page.locator(".edit").first.click()
    assert page.input_value("#message") == "first"
    page.click("#keep")
    assert page.input_value("#message") == "" and page.locator(".turn").count() == 4
    page.locator(".edit").first.click()
    assert sent_by(page, lambda: say(page, "other")) == [("user", "other")]
    assert page.locator(".turn").count() == 2


def test_a_message_that_cannot_be_answered_spoils_nothing(page: Any) -> None:
    say(page, "first")
    wait_for_answer(page)
    say(page, "x" * 5000)
    assert "4096" in wait_for_answer(page).locator(".fault").inner_text()
    assert page.locator(".note").count() == 0
    asked = [("user", "first"), ("assistant", "Hello!"), ("user", "second")]
    assert sent_by(page, lambda: say(page, "second")) == asked
    assert page.locator(".assistant").last.locator(".fault").count() == 0


def test_the_oldest_turns_go_when_the_context_is_full(page: Any) -> None:
    for letter in "abc":
        say(page, letter * 1500)
        answer = wait_for_answer(page)
    assert answer.locator(".fault").count() == 0
    assert "oldest messages" in answer.locator(".note").inner_text()
    assert page.locator(".turn").count() == 6


def fulfilling(text: str) -> Callable[[Any], None]:
    return lambda route: route.fulfill(body=text)


def test_settings_offer_what_the_model_can_do(page: Any) -> None:
    page.click("summary")
    assert page.locator("#thinks").is_visible()
    assert page.get_attribute("#temperature", "placeholder") == "0.7"
    assert page.get_attribute("#top_p", "placeholder") == "0.95"
    assert page.get_attribute("#max_tokens", "max") == str(LONGEST_ANSWER)
    with page.expect_request("**/v1/chat/completions") as info:
        say(page, "hi")
    wait_for_answer(page)
    assert not {"temperature", "top_p"} & set(info.value.post_data_json)
    for recipe, chats in (("chatml", True), (None, False)):
        with running_server(ScriptedRunner(), recipe=recipe) as other:
            page.evaluate("document.getElementById('settings').open = false")
            state = page.request.get(f"{other.url}/health").json()
            assert (state["chat"], state["thinking"]) == (chats, False)
            page.route("**/health", fulfilling(json.dumps(state)))
            page.reload()
            page.wait_for_selector("#model:has-text('scripted')")
            page.click("summary")
            assert not page.locator("#thinks").is_visible()
            assert page.locator("#message").is_enabled() == chats
            page.unroute("**/health")


def test_a_server_that_is_gone_is_said(page: Any) -> None:
    page.route("**/v1/chat/completions", lambda route: route.abort())
    say(page, "hi")
    assert wait_for_answer(page).locator(".fault").inner_text() == "The server cannot be reached."
    page.click("#clear")
    page.route("**/health", lambda route: route.abort())
    page.reload()
    page.wait_for_selector("#greeting:has-text('cannot be reached')")
