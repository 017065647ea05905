"""Pictures of a report for the docs: `python -m tests.evaluation.screenshots runs/demo/report.html`."""

from __future__ import annotations

import io
import sys
import tempfile
from pathlib import Path

from PIL import Image

from tests.evaluation.browser import Browser

PLACE = Path(__file__).parents[2] / "docs" / "img"
PICTURES = {"report.png": (1280, 800, "light"), "report-dark-phone.png": (390, 844, "dark")}


def small(png: bytes) -> bytes:
    """The same picture with 128 colours: a page of text and lines needs no more."""
    out = io.BytesIO()
    Image.open(io.BytesIO(png)).convert("RGB").quantize(128).save(out, "PNG", optimize=True)
    return out.getvalue()


def main(page: Path) -> None:
    with tempfile.TemporaryDirectory() as profile, Browser(Path(profile)) as browser:
        for name, (width, height, theme) in PICTURES.items():
            browser.size(width, height)
            browser.theme(theme)
            browser.open(page.resolve())
            picture = small(browser.screenshot())
            (PLACE / name).write_bytes(picture)
            print(f"{PLACE / name}: {len(picture):,} bytes")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
