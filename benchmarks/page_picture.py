"""The picture of the README: the live page of the demo pair beside a load that rises from 1 client to 16.

    python benchmarks/page_picture.py [--seconds 18] [--out docs/images/page.png]

Needs Chromium with its driver and the `test` extra, and about three minutes. The numbers on the picture are those of the
machine it was taken on, while it was taken: take it on an idle one.
"""

from __future__ import annotations

import argparse
import itertools
import shutil
import sys
import tempfile
import threading
import time
from pathlib import Path

import httpx
from PIL import Image

sys.path.insert(0, str(Path(__file__).parents[1]))

from sglang_dspark.bench.traffic import traffic
from tests.server.live import Server, start

CLIENTS = (1, 2, 4, 8, 16)
CLASSES = ("chat", "prose", "code", "math")
WIDTH, HEIGHT = 1100, 1400


class Load:
    """Clients that ask one question after another; `wanted` of them at a time."""

    def __init__(self, server: Server) -> None:
        rows = traffic(list(CLASSES), 40, 3, 0.8)
        self.rows = itertools.cycle(itertools.chain.from_iterable(zip(*rows.values())))
        self.server, self.wanted, self.answered = server, 0, 0
        self.lock, self.stopped = threading.Lock(), threading.Event()
        self.threads = [threading.Thread(target=self._client, args=(i,)) for i in range(max(CLIENTS))]
        for thread in self.threads:
            thread.start()

    def _client(self, number: int) -> None:
        while not self.stopped.wait(0.05):
            if number < self.wanted:
                with self.lock:
                    row = next(self.rows)
                body = {"model": "demo", "max_tokens": 96, "ignore_eos": True, **row}
                answer = httpx.post(self.server.url + "/v1/chat/completions", json=body, timeout=300)
                answer.raise_for_status()
                self.answered += 1

    def stop(self) -> None:
        self.stopped.set()
        for thread in self.threads:
            thread.join()


def screenshot(url: str, out: Path) -> None:
    """The page's top, in light, once it has drawn; at most 300 kB."""
    from selenium import webdriver
    from selenium.webdriver.chrome.options import Options
    from selenium.webdriver.chrome.service import Service

    options = Options()
    options.binary_location = shutil.which("chromium") or shutil.which("google-chrome") or ""
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"):
        options.add_argument(argument)
    browser = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    try:
        screen = {"width": WIDTH, "height": HEIGHT, "deviceScaleFactor": 1, "mobile": False}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
        browser.get(url + "/dspark")
        deadline = time.monotonic() + 60
        while browser.execute_script("return document.body.dataset.ready") != "yes":
            if time.monotonic() > deadline:
                raise TimeoutError("the page did not draw")
            time.sleep(0.2)
        time.sleep(5)  # a second look at the status, so that rates are there
        out.parent.mkdir(parents=True, exist_ok=True)
        browser.save_screenshot(str(out))
    finally:
        browser.quit()
    for colours in (256, 128, 64, 32):
        Image.open(out).convert("RGB").quantize(colours).save(out, optimize=True)
        if out.stat().st_size <= 300_000:
            return
    raise RuntimeError(f"{out} is larger than 300 kB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=18.0, help="at each number of clients")
    parser.add_argument("--out", type=Path, default=Path("docs/images/page.png"))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        server = start(
            Path(folder) / "server.log", "--max-running-requests", "32", "--log-level", "error", common=(), timeout=600
        )
        load = None
        try:
            load = Load(server)
            for clients in (4, *CLIENTS):  # some requests first, so that calibration and costs have seen work
                load.wanted = clients
                time.sleep(options.seconds)
            screenshot(server.url, options.out)
        finally:
            if load is not None:
                load.stop()
            server.stop()
    print(f"{options.out}, {load.answered} answers")


if __name__ == "__main__":
    main()
