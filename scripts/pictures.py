# Takes docs/first_screen.png and docs/first_screen_dark.png: what `servanda check --report`
# writes for an example, in headless Chromium.  `make pictures` runs it.

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "tiny-bf16-positions.kernelcontract.yaml"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
SIZE = "1280,760"
DARK = "--blink-settings=preferredColorScheme=0"
LARGEST = 250_000  # bytes of a picture in the repository


def report(folder: Path) -> Path:
    """Measure the example afresh; that it is violated is the point of the picture."""
    page = folder / "report.html"
    # from the repository, so that the page shows no path of this machine
    command = [sys.executable, "-m", "servanda", "check", str(EXAMPLE.relative_to(ROOT))]
    command += ["--run-dir", str(folder / "run"), "--report", str(page)]
    done = subprocess.run(command, cwd=ROOT, check=False)
    if done.returncode != 1:
        sys.exit(f"{EXAMPLE.name} ended with {done.returncode}, not with 1")
    return page


def picture(browser: str, page: Path, target: Path, *options: str) -> None:
    command = [browser, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    command += ["--disable-dev-shm-usage", f"--window-size={SIZE}", *options]
    command += [f"--screenshot={target}", page.as_uri()]
    subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
    if target.stat().st_size > LARGEST:
        sys.exit(f"{target} has {target.stat().st_size:,} bytes; {LARGEST:,} are allowed")


def main() -> None:
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        sys.exit(f"none of {', '.join(BROWSERS)} is installed")
    with tempfile.TemporaryDirectory() as folder:
        page = report(Path(folder))
        picture(browser, page, ROOT / "docs" / "first_screen.png")
        picture(browser, page, ROOT / "docs" / "first_screen_dark.png", DARK)


if __name__ == "__main__":
    main()
