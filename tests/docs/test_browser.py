"""The site in a real browser, opened from the disk: search finds things, nothing complains, and nothing is too wide.

A page of ours shows the site in frames, 1400 and 390 pixels wide (windows of Chromium are never that narrow), types
into the search box, and writes what it saw into itself.
"""

import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
WIDTHS = (1400, 390)
HARNESS = """<!doctype html><meta charset="utf-8"><body><pre id="seen"></pre><script>
const widths = WIDTHS, pages = PAGES, seen = {search: {}, typed: {}, wide: []};
const show = (page, width) => new Promise((done) => {
  const frame = document.createElement("iframe");
  frame.style.cssText = `border:0;width:${width}px;height:900px`;
  frame.onload = () => done(frame);
  frame.src = page;
  document.body.append(frame);
});
const links = (frame) => [...frame.contentDocument.querySelectorAll("#search-results a")];
const found = (frame) => links(frame).map((link) => link.getAttribute("href"));
(async () => {
  for (const width of widths) {
    const frame = await show("index.html#search=EKFAC", width);
    seen.search[width] = found(frame);
    const inner = frame.contentDocument, box = inner.getElementById("search");
    box.value = "reduction factor";
    box.dispatchEvent(new frame.contentWindow.Event("input"));
    seen.typed[width] = found(frame);
    const key = (name) => inner.dispatchEvent(new frame.contentWindow.KeyboardEvent("keydown", {key: name}));
    box.focus(); key("ArrowDown");
    seen.focused = inner.activeElement.getAttribute("href");
    key("Escape");
    seen.closed = inner.getElementById("search-results").hidden;
    frame.remove();
    for (const page of pages) {
      const frame = await show(page, width), root = frame.contentDocument.documentElement;
      if (root.scrollWidth > root.clientWidth) seen.wide.push(`${page}: ${root.scrollWidth} of ${width}`);
      frame.remove();
    }
  }
  document.getElementById("seen").textContent = JSON.stringify(seen);
})();
</script>"""


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium binary was found")
def test_search_and_layout(site: Path, tmp_path: Path) -> None:
    folder = tmp_path / "site"
    shutil.copytree(site, folder)
    pages = sorted(page.name for page in site.glob("*.html"))
    text = HARNESS.replace("WIDTHS", json.dumps(WIDTHS), 1).replace("PAGES", json.dumps(pages), 1)
    (folder / "harness.html").write_text(text, encoding="utf-8")
    seen, complaints = dump(folder / "harness.html", tmp_path / "profile")
    assert complaints == []
    for width in map(str, WIDTHS):
        assert seen["search"][width][0] == "api.html#kfs.EKFAC"
        assert "ekfac.html" in seen["search"][width]
        assert "reduction_factors.html" in seen["typed"][width]
    assert seen["focused"] == seen["typed"][str(WIDTHS[-1])][0]
    assert seen["closed"] is True
    assert seen["wide"] == []


def dump(page: Path, profile: Path) -> tuple[Any, list[str]]:
    """Open a page; return what it has seen, and what the console said."""
    options = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--enable-logging=stderr")
    files = ("--allow-file-access-from-files", f"--user-data-dir={profile}", "--virtual-time-budget=60000")
    command = [str(CHROMIUM), *options, *files, "--window-size=1500,1000", "--dump-dom", page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    content = re.search(r'<pre id="seen">(.*?)</pre>', done.stdout, flags=re.DOTALL)
    assert content is not None
    assert content[1], "the page did not finish"
    return json.loads(unescape(content[1])), [line for line in done.stderr.splitlines() if "CONSOLE" in line]
