"""Draws the images of docs/images anew: the report's page of two plans, in a browser without a screen.

python -m benchmarks.page_images          (apt-get install chromium)
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from html import escape
from pathlib import Path

import autopar
from autopar.models.loading import load_model
from autopar.page import page_text

FOLDER = Path(__file__).parents[1] / "docs" / "images"
SIZES = {"layers": 8, "width": 2048, "num_heads": 16, "seq_len": 1024, "batch_size": 64, "vocab_size": 32000}
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def main() -> None:
    """Write page-light.png, page-dark.png and page-phone.png."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        sys.exit("there is no chromium here (apt-get install chromium)")
    loaded = load_model("examples.models:gpt2", meta=True, **SIZES)
    program = autopar.compile(
        loaded.model,
        "2x8 h100-sxm",
        example_inputs=loaded.inputs,
        loss_fn=loaded.loss_fn,
        precision="bf16",
        constraints={"pp": 4, "tp": 2, "micro_batches": 8},
    )
    text = page_text(program)
    FOLDER.mkdir(exist_ok=True)
    draw(browser, text, FOLDER / "page-light.png", 1080, 1150)
    from_pipeline = re.sub(r"<section><h2>(?:Mesh|Step time|Memory)</h2>.*?</section>", "", text, flags=re.DOTALL)
    assert from_pipeline != text
    draw(browser, without_header(from_pipeline), FOLDER / "page-dark.png", 1080, 1250, is_dark=True)
    draw(browser, text, FOLDER / "page-phone.png", 390, 1500)


def without_header(text: str) -> str:
    """The page from its first section on."""
    return re.sub(r"<header>.*?</header>", "", text, flags=re.DOTALL)


def draw(browser: str, text: str, path: Path, width: int, height: int, is_dark: bool = False) -> None:
    """A picture of the page's beginning, in a window of this size, with few colours so that it is small."""
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "page.html"
        theme = 'lang="en" data-theme="dark"' if is_dark else 'lang="en" data-theme="light"'
        text = text.replace('lang="en"', theme, 1)
        framed = f'<iframe style="border:0;width:{width}px;height:{height}px" srcdoc="{escape(text)}"></iframe>'
        page.write_text(f'<!doctype html><body style="margin:0">{framed}</body>', encoding="utf-8")
        command = [browser, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        command += [f"--user-data-dir={folder}/profile", f"--screenshot={path}", f"--window-size={width},{height}"]
        subprocess.run([*command, page.as_uri()], check=True, capture_output=True, timeout=120)
    print(f"{path}: {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
