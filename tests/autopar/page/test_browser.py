"""The page in a real browser without a screen: nothing overflows, nothing fails, text can be read in both themes."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from html import escape, unescape
from pathlib import Path
from typing import Any

import pytest

import autopar
from autopar.models.loading import load_model
from autopar.page import page_text

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

pytestmark = pytest.mark.skipif(
    BROWSER is None and os.environ.get("CI") != "true", reason="there is no chromium here (apt-get install chromium)"
)

SIZES = {"layers": 4, "width": 256, "num_heads": 4, "seq_len": 32, "batch_size": 16, "vocab_size": 512}

BEFORE = """<script>
window.problems = [];
addEventListener("error", (event) => problems.push(String(event.message)));
addEventListener("securitypolicyviolation", (event) => problems.push("blocked: " + event.blockedURI));
</script>"""

AFTER = """<script>{
const pixel = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
function rgb(color) {  // of any form that CSS knows
  pixel.clearRect(0, 0, 1, 1);
  pixel.fillStyle = color;
  pixel.fillRect(0, 0, 1, 1);
  return [...pixel.getImageData(0, 0, 1, 1).data];
}
function luminance(color) {
  const [r, g, b] = color.map((c) => c / 255).map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}
function behind(node) {
  for (let at = node; at; at = at.parentElement) {
    const color = rgb(getComputedStyle(at).backgroundColor);
    if (color[3] === 255) return color;
  }
  return [255, 255, 255, 255];
}
function unreadable() {
  const found = [];
  for (const node of document.querySelectorAll("body *")) {
    const own = [...node.childNodes].some((child) => child.nodeType === 3 && child.textContent.trim());
    const box = node.getBoundingClientRect();
    if (!own || !box.width || node.closest("script, style, .numbers")) continue;
    const [one, other] = [luminance(rgb(getComputedStyle(node).color)), luminance(behind(node))];
    const contrast = (Math.max(one, other) + 0.05) / (Math.min(one, other) + 0.05);
    if (contrast < 4.5) found.push(`${node.tagName}.${node.className} ${contrast.toFixed(2)}`);
  }
  return [...new Set(found)];
}
function beyond() {  // what sticks out at the right, but for what scrolls by itself
  const edge = document.documentElement.clientWidth + 1;
  return [...document.querySelectorAll("body *")]
    .filter((node) => node.getBoundingClientRect().right > edge && !node.closest(".scroll, pre, svg"))
    .map((node) => `${node.tagName}.${node.className}`);
}
const results = {
  width: innerWidth, scrolls: document.documentElement.scrollWidth, beyond: beyond(), unreadable: unreadable(),
  paper: rgb(getComputedStyle(document.body).backgroundColor),
  requests: performance.getEntriesByType("resource").length,
};
const theme = document.getElementById("theme");
const paper = () => rgb(getComputedStyle(document.body).backgroundColor)[0];
theme.click();
results.light = paper();
theme.click();
results.dark = paper();
results.unreadable_dark = unreadable();
const button = [...document.querySelectorAll(".choice button")].at(-1);
button.click();
results.axis = button.dataset.axis;
results.places = [...document.querySelectorAll("#mesh .place")].map((place) => place.textContent);
results.pressed = document.querySelectorAll('.choice button[aria-pressed="true"]').length;
results.unnamed = [...document.querySelectorAll("button, summary, figure")].filter((each) => !each.textContent.trim())
  .length;
results.problems = problems;
const shown = document.createElement("pre");
shown.id = "results";
shown.textContent = JSON.stringify(results);
parent.document.body.append(shown);
}</script>"""


@pytest.fixture(scope="module")
def text() -> str:
    loaded = load_model("examples.models:gpt2", meta=True, **SIZES)
    program = autopar.compile(
        loaded.model,
        "8 a100-80g",
        example_inputs=loaded.inputs,
        loss_fn=loaded.loss_fn,
        constraints={"pp": 2, "dp": 2, "tp": 2, "micro_batches": 4},
    )
    return page_text(program)


def browse(text: str, folder: Path, width: int, *options: str) -> dict[str, Any]:
    """What measurements say in a frame of `width` pixels (windows have 500 at least), of the whole window for 0.
    Anything on the console fails."""
    assert BROWSER is not None, "CI needs a browser: apt-get install chromium"
    page = folder / "page.html"
    watched = text.replace("<head>", f"<head>{BEFORE}", 1).replace("</body>", f"{AFTER}</body>", 1)
    assert BEFORE in watched and AFTER in watched
    framed = f'<iframe style="border:0;width:{width}px;height:900px" srcdoc="{escape(watched)}"></iframe>'
    page.write_text(f"<!doctype html><title>frame</title><body>{framed}</body>" if width else watched)
    command = [BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'profile'}"]
    command += ["--enable-logging=stderr", "--window-size=1400,1000", *options, "--dump-dom", page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    found = re.search(r'<pre id="results">(.*?)</pre>', done.stdout, re.DOTALL)
    assert found is not None, done.stderr[-2000:]
    assert ":CONSOLE" not in done.stderr, done.stderr[-2000:]
    results: dict[str, Any] = json.loads(unescape(found[1]))
    return results


@pytest.mark.slow
@pytest.mark.parametrize("width", [390, 1280])
def test_in_light(text: str, width: int, tmp_path: Path) -> None:
    found = browse(text, tmp_path, width)
    assert found["width"] == width
    assert found["scrolls"] <= width and found["beyond"] == []
    assert found["unreadable"] == [] and found["unreadable_dark"] == []
    assert found["problems"] == [] and found["requests"] == 0 and found["unnamed"] == 0
    assert found["paper"][0] > 200 and found["light"] > 200 and found["dark"] < 60
    assert found["axis"] == "tp" and found["pressed"] == 1
    assert found["places"] == [f"tp {rank % 2}" for rank in range(8)]


@pytest.mark.slow
def test_in_the_dark_theme_of_the_system(text: str, tmp_path: Path) -> None:
    found = browse(text, tmp_path, 0, "--blink-settings=preferredColorScheme=0")
    assert found["paper"][0] < 60 and found["light"] > 200
    assert found["unreadable"] == [] and found["problems"] == []


@pytest.mark.slow
def test_without_scripts_and_on_paper(text: str, tmp_path: Path) -> None:
    """The page prints, and shows all of its text where no script runs: buttons that would do nothing are hidden."""
    assert BROWSER is not None, "CI needs a browser: apt-get install chromium"
    page, paper = tmp_path / "page.html", tmp_path / "page.pdf"
    page.write_text(re.sub(r"<script>.*?</script>", "", text, flags=re.DOTALL))
    command = [BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    command += ["--no-pdf-header-footer", f"--print-to-pdf={paper}", page.as_uri()]
    subprocess.run(command, capture_output=True, timeout=300, check=True)
    assert paper.read_bytes().startswith(b"%PDF") and paper.stat().st_size > 20_000
    assert text.count("<button") == text.count('<button type="button" data-axis') + 1
    assert re.search(r'id="theme"[^>]* hidden', text) and re.search(r'class="choice" hidden', text)
