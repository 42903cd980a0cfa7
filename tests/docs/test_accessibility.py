"""The site in a browser: axe-core finds no serious fault on any page, wide or narrow, light or dark.

    mkdocs build --strict --site-dir SITE
    npm install axe-core --prefix FOLDER
    GQSGD_SITE=SITE GQSGD_AXE=FOLDER/node_modules/axe-core/axe.min.js pytest -m slow tests/docs/test_accessibility.py

Without these two variables, the test is skipped; with them it needs Chromium or Google Chrome. A folder with a page
``comparison.html`` is a site as well. The workflow ``docs`` runs it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

#: Widths of windows, in CSS pixels.
WIDTHS = (1280, 390)
#: What Chromium calls the schemes that a page may ask for.
SCHEMES = {"dark": 0, "light": 1}

#: Loads each page in a frame, runs axe in it, and posts what it found.
HARNESS = """<!doctype html><title>axe</title><body><script>
async function check(page, width) {
  const frame = document.createElement('iframe');
  frame.style = `width:${width}px;height:900px;border:0`;
  frame.src = page;
  document.body.append(frame);
  await new Promise(done => frame.onload = done);
  const inside = frame.contentDocument;
  const axe = inside.createElement('script');
  axe.src = '/AXE.js';
  inside.head.append(axe);
  await new Promise(done => axe.onload = done);
  const {violations} = await frame.contentWindow.axe.run(inside, {resultTypes: ['violations']});
  frame.remove();
  return violations.filter(fault => ['serious', 'critical'].includes(fault.impact)).map(fault =>
    ({page, width, dark: matchMedia('(prefers-color-scheme: dark)').matches,
      fault: fault.id, count: fault.nodes.length, first: fault.nodes[0].html.slice(0, 200),
      why: fault.nodes[0].failureSummary.slice(0, 300)}));
}
(async () => {
  const {pages, widths} = await (await fetch('/WORK.json')).json();
  const faults = [];
  let checked = 0;
  for (const page of pages) for (const width of widths) {
    try { faults.push(...await check(page, width)); checked += 1; }
    catch (error) { faults.push({page, width, fault: String(error)}); }
  }
  await fetch('/DONE', {method: 'POST', body: JSON.stringify({checked, faults})});
})();
</script>"""


class _Handler(SimpleHTTPRequestHandler):
    """Serves the site, axe, the harness and the list of pages, and takes the result."""

    def do_GET(self) -> None:
        extra = self.server.extra.get(self.path)  # type: ignore[attr-defined]
        if extra is None:
            super().do_GET()
            return
        kind = {"js": "text/javascript", "json": "application/json"}.get(self.path.rpartition(".")[2], "text/html")
        self.send_response(200)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.end_headers()
        self.wfile.write(extra)

    def do_POST(self) -> None:
        self.server.result = json.loads(self.rfile.read(int(self.headers["Content-Length"])))  # type: ignore[attr-defined]
        self.send_response(204)
        self.end_headers()
        self.server.done.set()  # type: ignore[attr-defined]

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


@contextmanager
def serving(site: Path, axe: Path, pages: list[str]) -> Iterator[Any]:
    """A server of a site on a free port of this machine."""
    server: Any = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Handler, directory=str(site)))
    work = {"pages": pages, "widths": WIDTHS}
    server.extra = {"/AXE.js": axe.read_bytes(), "/WORK.json": json.dumps(work).encode(), "/AXE": HARNESS.encode()}
    server.done, server.result = threading.Event(), None
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def faults_of(site: Path, axe: Path, browser: Sequence[str], patience_s: float) -> dict[str, Any]:
    """Serious faults of all pages of a site, and how many cases were checked.

    Args:
        site: folder of the site; pages that only show a source are left out.
        axe: axe-core, as one file.
        browser: the command that starts Chromium.
        patience_s: seconds after which the browser has to be done.
    """
    pages = sorted(f"/{page.relative_to(site).as_posix()}" for page in site.rglob("*.html"))
    pages = [page for page in pages if not page.startswith("/source/") and page != "/404.html"]
    with serving(site, axe, pages) as server:
        url = f"http://127.0.0.1:{server.server_port}/AXE"
        window = subprocess.Popen([*browser, url], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            assert server.done.wait(patience_s), f"the browser has not answered within {patience_s:.0f} s"
        finally:
            window.kill()
            window.wait()
        return {"expected": len(pages) * len(WIDTHS), **server.result}


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_no_page_has_a_serious_fault(scheme: str, tmp_path: Path) -> None:
    site, axe = os.environ.get("GQSGD_SITE"), os.environ.get("GQSGD_AXE")
    if site is None or axe is None:
        pytest.skip("needs GQSGD_SITE and GQSGD_AXE; the head of the file has the commands")
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    assert chromium is not None, "neither chromium nor google-chrome is on the path"  # a skipped test checks nothing
    words = ["--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0", f"--user-data-dir={tmp_path}"]
    words.append(f"--blink-settings=preferredColorScheme={SCHEMES[scheme]}")
    found = faults_of(Path(site), Path(axe), [chromium, *words], 1100)
    assert found["expected"] > 0
    assert found["checked"] == found["expected"], found["faults"]
    assert not found["faults"], json.dumps(found["faults"], indent=1)
