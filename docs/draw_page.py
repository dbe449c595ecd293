"""Take the README's picture: the page of `python -m specdec_ext demo --html`, as docs/demo.png.

    python docs/draw_page.py [options of the demo]

Needs Chromium (Debian: ``apt install chromium``).
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

PICTURE = Path(__file__).with_name("demo.png")
SIZE = "1060,1330"


def take(page: Path, picture: Path, size: str = SIZE) -> None:
    """Write a picture of a page, as Chromium shows it."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        raise SystemExit("needs chromium: apt install chromium")
    with tempfile.TemporaryDirectory() as profile:
        subprocess.run(
            [
                chromium,
                "--headless",
                "--no-sandbox",  # as root there is none; the page is our own file
                "--disable-gpu",
                "--hide-scrollbars",
                f"--user-data-dir={profile}",
                f"--window-size={size}",
                f"--screenshot={picture}",
                page.as_uri(),
            ],
            check=True,
            capture_output=True,
            timeout=120,
        )


def main() -> None:
    """Make the page, and take its picture."""
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "demo.html"
        subprocess.run(
            [sys.executable, "-m", "specdec_ext", "demo", f"--html={page}", *sys.argv[1:]],
            check=True,
        )
        take(page, PICTURE)
    print(f"wrote {PICTURE}")


if __name__ == "__main__":
    main()
