"""The live page in a real browser: it draws, fits a phone, asks nobody else, and switches the server with the key.

Bug classes: a chart that fails on real numbers (the browser's console must stay empty), a page that needs the network,
text that runs out of a phone's screen, a control that sends what the server refuses, prompt text that leaks. Screenshots
are kept in pytest's temporary folder. Where Chromium is missing the tests of a browser say so and are skipped; the page's
promises about its own source are checked without one (tests/serving/test_routes.py).
"""

from __future__ import annotations

import re
import shutil
import time

import httpx
import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
needs_browser = pytest.mark.skipif(
    not (CHROMIUM and DRIVER), reason="no Chromium with its driver here (Debian: apt install chromium chromium-driver)"
)
SECRET = "the miller counted his hidden sacks"
CARDS = ("over-time", "by-load", "forecast", "cost", "acceptance", "reliability", "speed")


@pytest.fixture(scope="module")
def served(watched):
    """The watched server when it has seen few requests at once, then many, in two modes."""
    for mode, count in (("static", 2), ("compact", 1), ("compact", 12)):
        settings = {"verify_mode": mode, "min_window": int(mode == "compact")}
        httpx.post(watched.url + "/dspark/config", json=settings, headers={"Authorization": "Bearer the-admin-key"})
        watched.generate([SECRET] * count, max_new_tokens=40, ignore_eos=True, temperature=1)
        watched.generate(["x"] * count, max_new_tokens=20, ignore_eos=True, temperature=0)
    return watched


@pytest.fixture(scope="module")
def browser():
    from selenium import webdriver
    from selenium.webdriver.chrome.options import Options
    from selenium.webdriver.chrome.service import Service

    options = Options()
    options.binary_location = CHROMIUM
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    return tmp_path_factory.mktemp("screenshots")


def look(browser, server, width: int, height: int, scheme: str) -> None:
    """Open the page as a screen of this size and scheme, and wait until it has drawn."""
    screen = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
    browser.execute_cdp_cmd(
        "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    )
    browser.get_log("browser"), browser.get_log("performance")  # forget what an earlier test left
    browser.get(server.url + "/dspark")
    wait(lambda: browser.execute_script("return document.body.dataset.ready") == "yes")


def wait(condition, seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the page did not get there"
        time.sleep(0.1)


def keep(browser, path, width: int) -> None:
    height = browser.execute_script("return document.documentElement.scrollHeight")
    browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600},
    )
    time.sleep(0.3)
    assert browser.save_screenshot(str(path)) and path.stat().st_size > 20_000


@needs_browser
@pytest.mark.parametrize(
    ("width", "height", "scheme"), [(1200, 900, "light"), (1200, 900, "dark"), (375, 800, "light"), (375, 800, "dark")]
)
def test_every_chart_draws_in_light_and_dark_on_a_desk_and_on_a_phone(browser, served, pictures, width, height, scheme):
    look(browser, served, width, height, scheme)
    for card in CARDS:
        marks = browser.execute_script(
            "return document.querySelectorAll('#' + arguments[0] + ' svg :is(rect, circle, polyline)').length", card
        )
        assert marks > 0, card
    assert browser.get_log("browser") == []
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width, "it runs out of the screen"
    background = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
    brightness = sum(map(int, re.findall(r"\d+", background)[:3])) / 3
    assert brightness > 200 if scheme == "light" else brightness < 60
    keep(browser, pictures / f"{width}-{scheme}.png", width)


@needs_browser
def test_no_number_on_the_page_is_broken_and_no_prompt_text_is_on_it(browser, served):
    look(browser, served, 1200, 900, "light")
    text = browser.execute_script("return document.documentElement.outerHTML")
    shown = browser.execute_script(
        "return document.querySelector('main').innerText + [...document.querySelectorAll('svg')].map(s => s.outerHTML)"
    )
    assert not re.search(r"NaN|undefined|Infinity|\[object", shown)
    assert "miller" not in text and SECRET not in text


@needs_browser
def test_the_page_asks_nobody_but_its_own_server(browser, served):
    look(browser, served, 1200, 900, "light")
    urls = re.findall(
        r'"url":"((?:https?|wss?):[^"]+)"', str([entry["message"] for entry in browser.get_log("performance")])
    )
    assert urls and all(url.startswith(served.url) for url in urls), set(urls)


@needs_browser
def test_the_page_says_in_words_what_runs_and_why_windows_are_as_they_are(browser, served):
    look(browser, served, 1200, 900, "light")
    served.generate(["more"] * 12, max_new_tokens=60, ignore_eos=True, temperature=1)
    wait(lambda: "running" in browser.find_element("id", "why").text)
    why = browser.find_element("id", "why").text
    assert re.search(r"requests? (is|are) running|requests are running", why), why
    assert re.search(r"window|drafts", why)


def submit(browser, mode: str, key: str) -> str:
    browser.execute_script("document.querySelector('select[name=verify_mode]').value = arguments[0]", mode)
    field = browser.find_element("id", "adminkey")
    field.clear()
    field.send_keys(key)
    browser.execute_script(
        "document.querySelector('#answer').textContent = ''; document.querySelector('#settings').requestSubmit()"
    )
    wait(lambda: browser.find_element("id", "answer").text)
    return browser.find_element("id", "answer").text


@needs_browser
def test_the_control_switches_the_mode_with_the_admin_key_and_only_with_it(browser, served, pictures):
    look(browser, served, 1200, 900, "light")

    def mode() -> str:
        return served.get("/dspark/status")["ranks"][0]["config"]["verify_mode"]

    assert mode() == "compact"
    assert "key" in submit(browser, "cap-accept", "wrong") and mode() == "compact"
    assert submit(browser, "cap-accept", "the-admin-key") == "Switched." and mode() == "cap-accept"
    wait(lambda: browser.find_element("id", "mode").text == "cap-accept")
    browser.execute_script(
        "document.querySelector('input[name=min_window]').value = 3; document.querySelector('input[name=max_window]').value = 2"
    )
    assert "--min-window 3 is above --max-window 2" in submit(browser, "compact", "the-admin-key")
    assert browser.execute_script("return [localStorage.length, sessionStorage.length, document.cookie]") == [0, 0, ""]
    keep(browser, pictures / "control.png", 1200)


def test_the_page_is_served_with_a_policy_that_forbids_other_resources(served):
    answer = httpx.get(served.url + "/dspark")
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/html")
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "connect-src 'self'" in policy and "frame-ancestors 'none'" in policy
