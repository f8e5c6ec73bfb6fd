"""hooksink's page, of a real process, in a real Chromium."""
from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path

import psutil
import pytest
import requests
from playwright.sync_api import Browser, Page
from standardwebhooks import Webhook

from tests import chromium
from tests.processes import Site
from tests.servers import wait_until

SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
HOSTILE = """</pre><script>alert(1)</script><img src=http://127.0.0.1:1/x onerror=alert(2)>{{ 7 * 7 }}\u202e\u0007"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium.browser() as started:
        yield started
    wait_until(lambda: not [child for child in psutil.Process().children(recursive=True)
                            if child.name().startswith(("chrom", "node"))], what="no browser is left")


@pytest.fixture
def sink(tmp_path: Path) -> Iterator[Site]:
    with Site(tmp_path, CALLBACK_SECRETS=SECRET) as site:
        process = site.start_alone("hooksink")
        wait_until(lambda: _answers(site), what="hooksink answers")
        yield site
        assert process.stop() == 0


def _answers(site: Site) -> bool:
    try:
        return site.session.get(site.hook + "/", timeout=10).status_code == 200
    except requests.ConnectionError:
        return False


def send(site: Site, path: str = "/", webhook_id: str = "msg_1", secret: str = SECRET, **members: str) -> int:
    """A signed hook of a job; its answer's status."""
    now = datetime.now(timezone.utc)
    body = json.dumps({"type": "job.succeeded", "job_id": "j1", "status": "succeeded", **members}, ensure_ascii=False)
    headers = {"Content-Type": "application/json", "webhook-id": webhook_id,
               "webhook-timestamp": str(int(now.timestamp())),
               "webhook-signature": Webhook(secret).sign(webhook_id, now, body)}
    return site.session.post(site.hook + path, data=body.encode(), headers=headers, timeout=30,
                             allow_redirects=False).status_code


def send_all_sorts(site: Site) -> None:
    assert send(site) == 204 and send(site) == 204
    assert send(site, "/elsewhere", "msg_2", "whsec_" + "A" * 32) == 401
    assert send(site, "/flaky/1?retry_after=7", "msg_3", job_id="01a22930-2a90-70f5-af16-2480d1bbdc1b") == 503
    assert send(site, "/status/301", "msg_4", type="job.failed", status="failed") == 301
    assert send(site, "/<script>alert(3)</script>/\u202e", "msg_<b>5", **{"job_id": HOSTILE, "kind": HOSTILE}) == 204
    assert send(site, "//a//b", "msg_5") == 204
    assert send(site, "/" + "x" * 3000, "msg_" + "y" * 3000, job_id="z" * 3000, result="w" * 100_000) == 204


@contextlib.contextmanager
def looked_at(browser: Browser, site: Site, width: int = 1280, scheme: str = "light") -> Iterator[Page]:
    """The page as a person sees it; it does nothing that it should not."""
    odd: list[str] = []
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page = context.new_page()
    page.on("dialog", lambda dialog: (odd.append(f"dialog {dialog.message}"), dialog.dismiss()))
    page.on("console", lambda message: odd.append(f"console {message.text}"))
    page.on("pageerror", lambda error: odd.append(f"error {error}"))
    page.on("request", lambda request: request.url in (site.hook + "/", "data:,") or odd.append(request.url))
    try:
        page.goto(site.hook + "/", wait_until="load")
        yield page
        assert odd == []
    finally:
        context.close()


def test_the_empty_page_says_how_to_get_a_first_hook(browser: Browser, sink: Site) -> None:
    with looked_at(browser, sink) as page:
        assert f"curl -i http://127.0.0.1:{sink.port}/jobs" in page.inner_text("pre")
        assert f'"callback_url": "http://127.0.0.1:{sink.hook_port}/"' in page.inner_text("pre")
        assert page.locator("table").count() == 0


def test_the_page_shows_what_came_and_runs_none_of_it(browser: Browser, sink: Site) -> None:
    send_all_sorts(sink)
    with looked_at(browser, sink) as page:
        rows = [row.inner_text() for row in page.get_by_role("row").all()[1:]]
        assert page.inner_text("dl").split() == "received 8 valid 7 invalid 1 duplicates 1".split()
        assert page.get_by_role("columnheader").all_inner_texts() == [
            "time", "path", "job", "webhook id", "signature", "answer", "body"]
        assert page.get_by_role("rowheader").count() == len(rows) == 8
        huge, slashes, hostile, redirect, flaky, wrong, again, first = rows
        assert "msg_1" in first and "valid" in first and "duplicate" not in first and "204" in first
        assert "j1" in first and "succeeded (job.succeeded)" in first
        assert "duplicate" in again and "/a//b" in slashes
        assert "/elsewhere" in wrong and "invalid: no signature matches" in wrong and "401" in wrong
        assert "503 not yet; Retry-After: 7" in flaky and "?retry_after=7" in flaky
        assert "301; Location: /followed" in redirect and "failed (job.failed)" in redirect
        assert "/<script>alert(3)</script>/\\u202e" in hostile and HOSTILE[:40] in hostile and "msg_<b>5" in hostile
        assert "{{ 7 * 7 }}\\u202e\\u0007" in hostile
        page.locator("summary").nth(2).click()
        assert "{{ 7 * 7 }}\\u202e" in page.locator("pre:visible").inner_text()
        page.locator("summary").nth(0).click()
        assert len(page.locator("pre").nth(0).inner_text()) == 4096 and "Only the beginning" in page.inner_text("main")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_can_be_read_on_a_narrow_screen(browser: Browser, sink: Site, tmp_path: Path, scheme: str) -> None:
    send_all_sorts(sink)
    for width in (390, 1280):
        with looked_at(browser, sink, width, scheme) as page:
            for summary in page.locator("summary").all():
                summary.click()
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            for cell in page.locator("tbody td, tbody th").all():
                box = cell.bounding_box()
                assert box and box["x"] >= 0 and box["x"] + box["width"] <= width and box["width"] >= 40
            assert _contrast(page) >= 4.5
            page.screenshot(path=tmp_path / f"{scheme}-{width}.png", full_page=True)


def _contrast(page: Page) -> float:
    """The least contrast of a text with what is behind it (WCAG 2.2, 1.4.3)."""
    return page.evaluate("""() => {
        const canvas = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
        const rgb = colour => { canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1);
                                return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3); };
        const light = colour => rgb(colour).map(part => part / 255)
            .map(part => part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4)
            .reduce((sum, part, index) => sum + part * [0.2126, 0.7152, 0.0722][index], 0);
        const behind = element => {
            for (; element; element = element.parentElement) {
                const colour = getComputedStyle(element).backgroundColor;
                if (colour !== "rgba(0, 0, 0, 0)") return colour;
            }
            return "canvas";
        };
        document.documentElement.style.setProperty("background", "canvas");
        return Math.min(...[...document.querySelectorAll("main *")].map(element => {
            const [one, other] = [light(getComputedStyle(element).color), light(behind(element))];
            return (Math.max(one, other) + 0.05) / (Math.min(one, other) + 0.05);
        }));
    }""")
