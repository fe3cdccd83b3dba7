"""A real browser without a screen: Chromium or Chrome, driven by playwright.

Looked for on the machine; where there is none it is installed, by apt or by playwright: `make test` runs this file for
that before the tests. Without either the tests fail and say what to do: a page that nobody has opened is not tested.
"""

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time

from playwright.sync_api import sync_playwright

SECONDS = 300  # for each way to install one
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


def find_browser(playwright):
    """The path of a browser; installs one if there is none."""
    own = playwright.chromium.executable_path
    found = os.environ.get("HDET_BROWSER") or _look(own)
    failed = []
    for command in [] if found else install_commands():
        failed.append(f"{shlex.join(command)}: {_run(command)}")
        found = _look(own)
        if found:
            break
    if not found:
        raise RuntimeError(
            "the tests of the page need Chromium or Chrome, and it could be neither found nor installed; write "
            "`apt-get install chromium` or `playwright install chromium`, or set HDET_BROWSER to the path of one. "
            f"Tried: {'; '.join(failed)}"
        )
    return found


def install_commands():
    """What may bring a browser, one after the other."""
    apt = [*([] if os.geteuid() == 0 else ["sudo", "-n"]), "apt-get", "-qq", "-o", "DPkg::Lock::Timeout=60"]
    apt += ["-o", "Acquire::Retries=1", "-o", "Acquire::http::Timeout=20"]
    install = [*apt, "install", "-y", "chromium"]
    return [install, [*apt, "update"], install, [sys.executable, "-m", "playwright", "install", "chromium"]]


def _look(own):
    """Where a browser is: on the path, or where playwright puts its own."""
    return next(filter(None, map(shutil.which, NAMES)), None) or (own if os.path.exists(own) else None)


def _run(command):
    """How a command ended, in a few words. It is asked nothing, and killed with all that it has started in time."""
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    with tempfile.TemporaryFile() as said:
        try:
            child = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=said, stderr=said, env=environment, start_new_session=True
            )
        except OSError as error:
            return str(error)
        try:
            code = child.wait(SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
            return f"not done in {SECONDS} s"
        said.seek(0)
        lines = said.read().decode(errors="replace").strip().splitlines()
    return f"ended with {code}{f', {lines[-1][:200]!r}' if lines else ''}"


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
        self.wait("document.body.dataset.ready || 0")

    def ask(self, script):
        """What a JavaScript expression says."""
        return self.tab.evaluate(script)

    def wait(self, script, seconds=20):
        """Wait until a JavaScript expression is true. The page's policy forbids playwright's own way, which is eval."""
        end = time.monotonic() + seconds
        while not self.ask(script):
            assert time.monotonic() < end, f"it did not happen: {script}; the page said {self.errors}"
            time.sleep(0.02)

    def hover(self, chart, index):
        """Point at a round of a chart; the words of its legend, by label."""
        self.ask(f"""charts[{chart!r}].plot.root.scrollIntoView({{block: "center"}})""")
        self.tab.wait_for_timeout(60)  # uPlot notes where it is after a scroll
        x, y = self.ask(
            f"""() => {{ const u = charts[{chart!r}].plot, box = u.over.getBoundingClientRect();
            const x = u.valToPos(u.data[0][{index}], "x");
            return [box.left + Math.max(2, Math.min(x, box.width - 2)), box.top + box.height / 2]; }}"""
        )
        self.tab.mouse.move(x - 1, y - 1)
        self.tab.mouse.move(x, y)
        self.tab.wait_for_timeout(60)
        return self.ask(
            f"""() => Object.fromEntries([...charts[{chart!r}].plot.root.querySelectorAll(".u-series")].map(
            (row) => [row.querySelector(".u-label").textContent, row.querySelector(".u-value").textContent]))"""
        )

    def drawn(self, chart):
        """How many pixels of a chart are not empty."""
        return self.ask(
            f"""() => {{ const canvas = charts[{chart!r}].plot.ctx.canvas;
            const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
            return pixels.filter((x, i) => i % 4 == 3 && x).length; }}"""
        )

    def close(self):
        self.context.close()


if __name__ == "__main__":
    with sync_playwright() as driver:
        print(find_browser(driver))
