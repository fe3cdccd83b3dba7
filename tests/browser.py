"""A real browser without a screen: Chromium or Chrome, driven by playwright.

Looked for on the machine; where there is none it is installed, by playwright or by apt. Without either the tests fail
and say what to do: a page that nobody has opened is not tested.
"""

import contextlib
import os
import shutil
import subprocess
import sys

from playwright.sync_api import sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


def find_browser(playwright):
    """The path of a browser; installs one if there is none."""
    own = playwright.chromium.executable_path
    found = os.environ.get("HDET_BROWSER") or next(filter(None, map(shutil.which, NAMES)), None)
    if found or os.path.exists(own):
        return found or own
    sudo = [] if os.geteuid() == 0 else ["sudo", "-n"]
    for command in (
        [sys.executable, "-m", "playwright", "install", "--with-deps", "chromium"],
        [*sudo, "apt-get", "install", "-y", "-qq", "chromium"],
    ):
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            subprocess.run(command, check=True, capture_output=True, timeout=200)
        found = next(filter(None, map(shutil.which, NAMES)), None) or (own if os.path.exists(own) else None)
        if found:
            return found
    raise RuntimeError(
        "the tests of the page need Chromium or Chrome, and it could be neither found nor installed; write "
        "`apt-get install chromium` or `playwright install chromium`, or set HDET_BROWSER to the path of one"
    )


@contextlib.contextmanager
def open_browser():
    """A browser that can be asked for pages."""
    with sync_playwright() as playwright:
        path = find_browser(playwright)
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


class Page:
    """One page, with what it logged and what it asked the network for."""

    def __init__(self, browser, url, width=1400, height=900, scheme="light"):
        self.context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
        self.tab = self.context.new_page()
        self.tab.set_default_timeout(20_000)
        self.errors, self.requests = [], []
        self.tab.on("console", lambda said: self.errors.append(said.text) if said.type in ("error", "warning") else 0)
        self.tab.on("pageerror", lambda error: self.errors.append(str(error)))
        self.tab.on("dialog", lambda dialog: (self.errors.append(f"dialog {dialog.message}"), dialog.dismiss()))
        self.tab.on("request", lambda request: self.requests.append(request.url))
        self.tab.goto(url)
        self.tab.wait_for_selector("body[data-ready=yes]")

    def ask(self, script):
        """What a JavaScript expression says."""
        return self.tab.evaluate(script)

    def hover(self, chart, index):
        """Point at a round of a chart; the words of its legend, by label."""
        x, y = self.ask(
            f"""() => {{ const u = charts[{chart!r}].plot, b = u.over.getBoundingClientRect();
            u.root.scrollIntoView({{block: "center"}}); const c = u.over.getBoundingClientRect();
            return [c.left + u.valToPos(u.data[0][{index}], "x"), c.top + b.height / 2]; }}"""
        )
        self.tab.mouse.move(x, y)
        self.tab.wait_for_timeout(100)
        return self.ask(
            f"""() => Object.fromEntries([...charts[{chart!r}].plot.root.querySelectorAll(".u-series")].map(
            (row) => [row.querySelector(".u-label").textContent, row.querySelector(".u-value").textContent]))"""
        )

    def drawn(self, chart):
        """How many pixels of a chart are not empty."""
        return self.ask(
            f"""() => {{ const c = charts[{chart!r}].plot.ctx.canvas;
            return c.getContext("2d").getImageData(0, 0, c.width, c.height).data.filter((x, i) => i % 4 == 3 && x).length; }}"""
        )

    def close(self):
        self.context.close()
