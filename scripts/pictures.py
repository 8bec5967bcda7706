# Takes docs/first_screen.png and docs/first_screen_dark.png: what `servanda check --report`
# writes for an example, in headless Chromium.  `make pictures` runs it; with OF=RUN_DIR, such as
# one of `make demo-real`, it takes the report of that run instead.

import argparse
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
LARGEST = 300_000  # bytes of a picture in the repository


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


def report_of(run_dir: Path, folder: Path) -> Path:
    """The report of a run that was measured before."""
    page = folder / "report.html"
    command = [sys.executable, "-m", "servanda", "tools", "report", str(run_dir), "-o", str(page)]
    subprocess.run(command, check=True)
    return page


def picture(browser: str, page: Path, target: Path, *options: str) -> None:
    command = [browser, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    command += ["--disable-dev-shm-usage", f"--window-size={SIZE}", *options]
    command += [f"--screenshot={target}", page.as_uri()]
    subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
    if target.stat().st_size > LARGEST:
        sys.exit(f"{target} has {target.stat().st_size:,} bytes; {LARGEST:,} are allowed")


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--of", type=Path, metavar="RUN_DIR")
    options.add_argument("--to", type=Path, default=ROOT / "docs", metavar="FOLDER")
    given = options.parse_args()
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        sys.exit(f"none of {', '.join(BROWSERS)} is installed")
    with tempfile.TemporaryDirectory() as folder:
        page = report_of(given.of, Path(folder)) if given.of else report(Path(folder))
        picture(browser, page, given.to / "first_screen.png")
        picture(browser, page, given.to / "first_screen_dark.png", DARK)


if __name__ == "__main__":
    main()
