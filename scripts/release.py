# The files of a release, built from a clone of the commit that is checked out: make release
#
#   python scripts/release.py [--tag v0.1.0] [--out dist]
#   python scripts/release.py --twice    builds from two clones and compares the files
#   python scripts/release.py --notes    prints the section of CHANGELOG.md for this version
#
# The bytes depend on the commit, on constraints.txt, constraints-docs.txt and
# constraints-release.txt, on the Python that runs this and on the C compiler.  They do not depend
# on the time, the folder, the umask, the locale or the user.

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VENVS = Path(os.environ.get("SERVANDA_VENVS") or ROOT / ".venvs").absolute()
SUMS = "SHA256SUMS"
_VERSION = re.compile(r'__version__ = "(.*)"')
# folders of a machine's users; in a public file they are those of the machine that built it
_HOMES = rb"/(?:root|home/\w+|Users/\w+)"
_LEAST_HOST = 5  # characters: a shorter name of a machine is also a word


class ReleaseError(Exception):
    """Why nothing is released, with the next move."""


# ---- what is checked before anything is built


def clean(root: Path) -> None:
    """Refuse a work tree that is not the commit.

    Raises:
        ReleaseError: a file is changed, staged or new; the message lists all of them.
    """
    listed = _git(root, "status", "--porcelain").splitlines()
    if listed:
        raise ReleaseError(
            "the work tree differs from its commit:\n"
            + "\n".join(f"  {line}" for line in listed)
            + "\ncommit, stash or remove these files; a release is built from a commit"
        )


def version(root: Path) -> str:
    """The version that the package states, without importing it."""
    found = _VERSION.search((root / "src/servanda/_version.py").read_text(encoding="utf-8"))
    if found is None:
        raise ReleaseError('src/servanda/_version.py has no line __version__ = "..."')
    return found[1]


def notes(root: Path, number: str) -> str:
    """The section of CHANGELOG.md for a version, without its heading.

    Raises:
        ReleaseError: there is none, or it is empty.
    """
    text = (root / "CHANGELOG.md").read_text(encoding="utf-8")
    found = re.search(rf"^## \[{re.escape(number)}\][^\n]*\n(.*?)(?=^## |\Z)", text, re.M | re.S)
    if found is None or not found[1].strip():
        raise ReleaseError(
            f"CHANGELOG.md has no section for {number}; "
            f"rename '## [Unreleased]' to '## [{number}] - YYYY-MM-DD'"
        )
    return found[1].strip() + "\n"


def tagged(root: Path, tag: str = "") -> None:
    """Refuse a tag of another version; without one, the tags of the commit are checked.

    Raises:
        ReleaseError: the tag is not v and the version, or the version has no notes.
    """
    number = version(root)
    tags = [tag] if tag else _git(root, "tag", "--points-at", "HEAD", "--list", "v*").split()
    for one in tags:
        if one != f"v{number}":
            raise ReleaseError(
                f"the tag is {one} and `servanda --version` prints {number}; "
                f"tag the commit v{number}, or change src/servanda/_version.py"
            )
        notes(root, number)


# ---- the parts


def clone(root: Path, to: Path) -> Path:
    """A clone of the commit that is checked out."""
    commit = _git(root, "rev-parse", "HEAD").strip()
    _git(root, "clone", "--quiet", "--shared", "--no-checkout", str(root), str(to))
    _git(to, "-c", "advice.detachedHead=false", "checkout", "--quiet", commit)
    return to


def packages(source: Path, out: Path, env: dict[str, str]) -> Path:
    """The sdist, and the wheel that is built from it; returns the wheel.

    Its library needs only glibc, so its tag becomes the oldest manylinux that has the symbols: a
    package index takes no wheel that is tagged linux_x86_64.
    """
    raw = out.parent / "raw"
    _run(source, env, sys.executable, "-m", "build", "--no-isolation", "--outdir", raw)
    (built,) = raw.glob("*.whl")
    if built.name.endswith("-any.whl"):
        raise ReleaseError("the wheel has no compiled library; install a C compiler, or set CC")
    _run(source, env, sys.executable, "-m", "auditwheel", "repair", "--wheel-dir", out, built)
    (sdist,) = raw.glob("*.tar.gz")
    shutil.move(sdist, out)
    (wheel,) = out.glob("*.whl")
    _run(source, env, sys.executable, "-m", "twine", "check", "--strict", wheel, out / sdist.name)
    return wheel


def site(source: Path, archive: Path, env: dict[str, str]) -> None:
    """The site of the documents, as `make docs` builds it, in one archive."""
    python, env = VENVS / "docs/bin/python", env | {"NO_MKDOCS_2_WARNING": "1"}
    _run(source, env, python, "-m", "mkdocs", "build", "--strict", "--quiet")
    _run(source, env, python, "scripts/docs_site.py", "site")
    pack(source / "site", archive, int(env["SOURCE_DATE_EPOCH"]))


def pack(folder: Path, archive: Path, epoch: int) -> None:
    """A .tar.gz whose bytes depend only on the names and the contents of the files."""
    top = archive.name.removesuffix(".tar.gz")
    with (
        archive.open("wb") as raw,
        gzip.GzipFile("", "wb", 9, raw, mtime=epoch) as zipped,
        tarfile.open(fileobj=zipped, mode="w", format=tarfile.GNU_FORMAT) as tar,
    ):
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                entry = tarfile.TarInfo(f"{top}/{path.relative_to(folder).as_posix()}")
                entry.size, entry.mtime, entry.mode = path.stat().st_size, epoch, 0o644
                with path.open("rb") as file:
                    tar.addfile(entry, file)


def bill(wheel: Path, source: Path, target: Path, env: dict[str, str]) -> None:
    """The bill of materials (CycloneDX JSON) of the wheel and of the packages that it needs.

    The wheel is installed with constraints.txt into an empty environment, and that environment is
    listed.  The tool validates what it wrote against the schema of CycloneDX.

    Raises:
        ReleaseError: the installed command has another version, or a package is not pinned.
    """
    number, home = version(source), target.parent.parent / "installed"
    _run(source, env, sys.executable, "-m", "venv", "--without-pip", home)
    pip = (sys.executable, "-m", "pip", "--python", home, "install", "--quiet")
    # by its name: an environment records the path of a wheel that was given by its path
    own = ("--no-deps", "--no-index", "--find-links", wheel.parent)
    _run(source, env, *pip, *own, f"servanda=={number}")
    pinned = source / "constraints.txt"
    _run(source, env, *pip, "--constraint", pinned, f"servanda=={number}")
    stated = _run(source, env, home / "bin/servanda", "--version").strip()
    if stated != f"servanda, version {number}":
        raise ReleaseError(f"the version is {number} and the installed command prints {stated!r}")
    # the tool reads a version only where it is not dynamic
    project = home / "pyproject.toml"
    text = (source / "pyproject.toml").read_text(encoding="utf-8")
    project.write_text(text.replace('dynamic = ["version"]', f'version = "{number}"'))
    tool = ("cyclonedx-py", "environment", "--sv", "1.6", "--output-reproducible", "--validate")
    named = ("--pyproject", project, "--output-file", target)
    _run(source, env, *tool, *named, home / "bin/python")
    unpinned(target, pinned)


def unpinned(listed: Path, constraints: Path) -> None:
    """Refuse a bill of materials that another day could change."""
    lines = constraints.read_text(encoding="utf-8").splitlines()
    pins = {_canonical(line) for line in lines if "==" in line}
    parts = json.loads(listed.read_text(encoding="utf-8"))["components"]
    found = [f"{part['name']}=={part['version']}" for part in parts]
    missing = [one for one in found if _canonical(one) not in pins]
    if missing:
        raise ReleaseError(f"constraints.txt does not pin {', '.join(missing)}; add these lines")


def _canonical(requirement: str) -> str:
    name, _, number = requirement.strip().partition("==")
    return f"{re.sub(r'[-_.]+', '-', name).lower()}=={number}"


def leaks(archive: Path, places: Iterable[str] = ()) -> list[str]:
    """Where a file of an archive names a folder of a machine's user, or one of these places."""
    given = b"|".join(re.escape(place.encode()) for place in places)
    marks = re.compile(rb"(?<![\w./}-])(?:%s)(?![\w-])" % (_HOMES + b"|" * bool(given) + given))
    found = []
    for name, content in _members(archive):
        for kind, text in (("is named", name.encode()), ("has", content)):
            hit = marks.search(text)
            if hit:
                found.append(f"{archive.name}: {name} {kind} {hit[0].decode()}")
    return found


def _members(archive: Path) -> Iterator[tuple[str, bytes]]:
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as whole:
            yield from ((name, whole.read(name)) for name in whole.namelist())
    elif archive.name.endswith(".tar.gz"):
        with tarfile.open(archive) as whole:
            for entry in whole:
                file = whole.extractfile(entry)
                yield entry.name, file.read() if file else b""
    else:
        yield archive.name, archive.read_bytes()


def checksums(out: Path) -> None:
    """SHA256SUMS of all files of a folder, checked with `sha256sum`."""
    files = sorted(path for path in out.iterdir() if path.name != SUMS)
    lines = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in files]
    (out / SUMS).write_text("".join(lines))
    _run(out, dict(os.environ), "sha256sum", "--check", "--quiet", "--strict", SUMS)


# ---- the whole


def release(root: Path, out: Path, tag: str = "") -> None:
    """Write every file of the release into `out`, which then holds nothing else.

    Raises:
        ReleaseError: the work tree, the tag or a built file is not fit to be released.
    """
    clean(root)
    tagged(root, tag)
    os.umask(0o022)  # a wheel keeps the permissions of the files that it was packed from
    with tempfile.TemporaryDirectory(prefix="servanda-release-") as folder:
        work = Path(folder).resolve()
        source, made = clone(root, work / "clone"), work / "dist"
        made.mkdir()
        number, env = version(source), _environment(source)
        wheel = packages(source, made, env)
        site(source, made / f"servanda-{number}-site.tar.gz", env)
        bill(wheel, source, made / f"servanda-{number}.cdx.json", env)
        found = [line for path in sorted(made.iterdir()) for line in leaks(path, _here(root, work))]
        if found:
            raise ReleaseError("a file names the machine that built it:\n  " + "\n  ".join(found))
        checksums(made)
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(made, out)


def twice(root: Path) -> None:
    """Build from two clones, in other folders, time zones, locales and umasks, and compare.

    Raises:
        ReleaseError: a file differs; the message names it.
    """
    clean(root)
    with tempfile.TemporaryDirectory(prefix="servanda-twice-") as folder:
        work, built = Path(folder), []
        variants = (("one", "UTC", "C.UTF-8", "0", 0o022), ("two/deeper", "JST-9", "C", "1", 0o077))
        for name, zone, locale, seed, umask in variants:
            source, out = clone(root, work / name), work / f"{name}-dist"
            varied = {"TZ": zone, "LC_ALL": locale, "PYTHONHASHSEED": seed}
            env = os.environ | varied | {"SERVANDA_VENVS": str(VENVS)}
            call = [sys.executable, str(source / "scripts/release.py"), "--out", str(out)]
            if subprocess.run(call, cwd=source, env=env, umask=umask).returncode:
                raise ReleaseError(f"the build {name!r} failed")
            built.append(out)
        found = differing(*built)
        if found:
            raise ReleaseError("two builds of one commit differ in " + ", ".join(found))
        print("two builds of one commit are byte-identical")


def differing(one: Path, other: Path) -> list[str]:
    """The names of the files that two folders do not share byte for byte."""
    names = sorted({path.name for folder in (one, other) for path in folder.iterdir()})

    def content(path: Path) -> bytes | None:
        return path.read_bytes() if path.is_file() else None

    return [name for name in names if content(one / name) != content(other / name)]


def _environment(source: Path) -> dict[str, str]:
    """What the tools of a build find around them."""
    dropped = ("PYTHONPATH", "PYTHONHOME")
    env = {name: value for name, value in os.environ.items() if name not in dropped}
    epoch = _git(source, "log", "-1", "--format=%ct").strip()
    return env | {
        "SOURCE_DATE_EPOCH": epoch,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }


def _here(root: Path, work: Path) -> list[str]:
    """The names of this machine and of the folders of this build."""
    host = socket.gethostname()
    places = [str(root), str(work), str(VENVS), sys.prefix]
    return places + [host] * (len(host) >= _LEAST_HOST and host != "localhost")


def _git(root: Path, *words: str) -> str:
    return _run(root, dict(os.environ), "git", *words)


def _run(folder: Path, env: dict[str, str], *words: str | Path) -> str:
    call = [str(word) for word in words]
    done = subprocess.run(call, cwd=folder, env=env, capture_output=True, text=True)
    if done.returncode:
        raise ReleaseError(
            f"`{' '.join(call)}` ended with {done.returncode}:\n{done.stdout}{done.stderr}"
        )
    return done.stdout


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Build the files of a release.")
    parser.add_argument("--tag", default="", help="the tag of the release, such as v0.1.0")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="the folder of the files")
    parser.add_argument("--twice", action="store_true", help="build twice and compare")
    parser.add_argument("--notes", action="store_true", help="print the notes of this version")
    asked = parser.parse_args(words)
    try:
        if asked.notes:
            print(notes(ROOT, version(ROOT)), end="")
        elif asked.twice:
            twice(ROOT)
        else:
            release(ROOT, asked.out.absolute(), asked.tag)
            print((asked.out / SUMS).read_text(), end="")
    except ReleaseError as error:
        print(f"release: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
