"""The site is built from nothing but the repository: every public name is in it, and a broken link is an error."""

import pathlib
import re
import subprocess
import sys

import pytest

import hdet

ROOT = pathlib.Path(__file__).parent.parent


def build(into):
    command = [sys.executable, ROOT / "docs" / "build.py", "--into", into]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)


def test_the_site_is_built_and_needs_no_network(tmp_path, browser):
    done = build(tmp_path)
    assert done.returncode == 0, done.stderr
    guides = {path.stem for path in (ROOT / "docs").glob("*.md")}
    assert guides <= {path.stem for path in (tmp_path / "docs").glob("*.html")}
    navigation = (ROOT / "mkdocs.yml").read_text()
    assert all(f"docs/{guide}.md" in navigation for guide in guides), "a guide that nobody finds"
    api = (tmp_path / "api.html").read_text()
    shown = set(re.findall(r'<h3 id="hdet\.([\w.]+)"', api))
    packages = {"checkpoint", "controllers", "records"}
    public = set(hdet.__all__) - packages | set(hdet.records.trackers.__all__)
    public |= {name for package in packages for name in getattr(hdet, package).__all__} - {"trackers", "OnRound"}
    assert {name.rpartition(".")[2] for name in shown} >= public
    assert "::</p>" not in api
    asked, said = [], []
    tab = browser.new_page()
    tab.on("request", lambda request: asked.append(request.url))
    tab.on("console", lambda message: said.append(message.text) if message.type == "error" else None)
    for page in ("index.html", "api.html", "docs/machines.html"):
        tab.goto((tmp_path / page).as_uri())
        assert tab.evaluate("document.querySelectorAll('.md-nav__link').length") > 10
    assert asked
    assert all(url.startswith(("file:", "blob:", "data:")) for url in asked), asked
    assert said == []


@pytest.mark.soak
def test_a_broken_link_is_an_error(tmp_path):
    page = ROOT / "docs" / "made-up.md"
    page.write_text("# Made up\n\n[nowhere](method.md#nowhere)\n")
    try:
        done = build(tmp_path)
    finally:
        page.unlink()
    assert done.returncode == 1
    assert "does not contain an anchor '#nowhere'" in done.stderr
