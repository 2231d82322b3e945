"""The chat page: its headers and files, and the page itself in a browser where one is installed."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
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
    answer = wait_for_answer(page)
    words = answer.inner_text().split()
    assert 1 < len(words) < 700
    page.reload()
    page.wait_for_selector(".assistant")
    assert page.locator(".user").inner_text() == "[long]"
    assert page.locator(".assistant").inner_text().split() == words
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
    assert page.locator(".user").inner_text() == "[long]"
    with page.expect_request("**/v1/chat/completions") as info:
        say(page, "[think]")
    roles = [message["role"] for message in info.value.post_data_json["messages"]]
    assert roles == ["user", "assistant", "user"]
    assert wait_for_answer(page).locator(".answer").inner_text() == "Forty-two."


def test_the_longest_answer_is_the_servers_unless_the_reader_wants_less(page: Any) -> None:
    for wanted, sent in (("", None), ("16384", LONGEST_ANSWER), ("7", 7)):
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
    assert "temperature" in wait_for_answer(page).locator(".fault").inner_text()
