# The files of a release: what is refused before they are built, and what must not change them.
# `make release-check` builds them twice; `make test-installed` runs the wheel.

import json
import os
import re
import subprocess
import tarfile
import zipfile
from pathlib import Path

import pytest
from click.testing import CliRunner
from scripts import docs_site, release
from scripts.release import ReleaseError

from servanda.cli.main import main

ROOT = Path(__file__).parents[1]
HOME = "/" + "home/somebody/"  # in parts: this file is in the sdist, too
WHO = ("-c", "user.name=t", "-c", "user.email=t@localhost")


def git(root, *words):
    call = ["git", *WHO, *words]
    return subprocess.run(call, cwd=root, check=True, capture_output=True, text=True).stdout


@pytest.fixture
def repository(tmp_path):
    """One commit of a package of version 1.2.0, with a file that git ignores."""
    root = tmp_path / "repository"
    (root / "src/servanda").mkdir(parents=True)
    (root / "src/servanda/_version.py").write_text('__version__ = "1.2.0"\n')
    (root / "CHANGELOG.md").write_text(
        "# Changes\n\n## [1.2.0] - 2026-01-01\n\n- New.\n\n## [1.1.0]\n"
    )
    (root / ".gitignore").write_text("runs/\n")
    (root / "runs").mkdir()
    (root / "runs/left.json").write_text("{}")
    git(root.parent, "init", "--quiet", str(root))
    git(root, "add", ".")
    git(root, "commit", "--quiet", "-m", "one")
    return root


def test_every_file_that_is_not_the_commits_is_named(repository):
    release.clean(repository)

    (repository / "CHANGELOG.md").write_text("changed")
    (repository / "staged.py").write_text("")
    git(repository, "add", "staged.py")
    (repository / "new.py").write_text("")

    with pytest.raises(ReleaseError) as refused:
        release.clean(repository)
    assert str(refused.value) == (
        "the work tree differs from its commit:\n"
        "   M CHANGELOG.md\n"
        "  A  staged.py\n"
        "  ?? new.py\n"
        "commit, stash or remove these files; a release is built from a commit"
    )


def test_the_version_of_the_command_the_site_and_the_release_is_one():
    printed = CliRunner().invoke(main, ["--version"]).output

    assert printed == f"servanda, version {release.version(ROOT)}\n"
    assert release.version(ROOT) == docs_site.VERSION


def test_a_tag_of_another_version_is_refused_given_or_found_at_the_commit(repository):
    release.tagged(repository, "v1.2.0")
    release.tagged(repository)
    said = re.escape(
        "the tag is v1.3.0 and `servanda --version` prints 1.2.0; "
        "tag the commit v1.2.0, or change src/servanda/_version.py"
    )

    with pytest.raises(ReleaseError, match=said):
        release.tagged(repository, "v1.3.0")
    git(repository, "tag", "v1.3.0")
    with pytest.raises(ReleaseError, match=said):
        release.tagged(repository)


def test_a_tag_without_notes_is_refused(repository):
    assert release.notes(repository, "1.2.0") == "- New.\n"

    for number in ("1.1.0", "1.2"):  # an empty section; none
        with pytest.raises(ReleaseError, match=rf"has no section for {number}; rename '## \[Unr"):
            release.notes(repository, number)


@pytest.mark.parametrize("depth", [(), ("--depth", "1")], ids=["whole", "shallow"])
def test_a_clone_has_the_files_of_the_commit_and_no_ignored_ones(repository, tmp_path, depth):
    checkout = tmp_path / "checkout"  # of a tag, as CI has it
    git(repository, "tag", "v1.2.0")
    address = f"file://{repository}"
    git(tmp_path, "clone", "--quiet", *depth, "--branch", "v1.2.0", address, str(checkout))

    source = release.clone(checkout, tmp_path / "clone")

    files = {str(p.relative_to(source)) for p in source.rglob("*") if p.is_file()}
    assert {name for name in files if not name.startswith(".git/")} == {
        *(".gitignore", "CHANGELOG.md", "src/servanda/_version.py")
    }
    assert git(source, "rev-parse", "HEAD") == git(repository, "rev-parse", "HEAD")


def test_an_archive_depends_on_names_and_contents_only(tmp_path):
    names = ["b.html", "a/c.html", "a.html"]
    for place, order, mode in (("one", names, 0o600), ("other", names[::-1], 0o755)):
        for at, name in enumerate(order):
            path = tmp_path / place / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(name)
            path.chmod(mode)
            os.utime(path, (at, at))
        (tmp_path / f"{place}-out").mkdir()
        release.pack(tmp_path / place, tmp_path / f"{place}-out/site.tar.gz", 1_700_000_000)

    assert release.differing(tmp_path / "one-out", tmp_path / "other-out") == []
    with tarfile.open(tmp_path / "one-out/site.tar.gz") as tar:
        assert [entry.name for entry in tar] == ["site/a/c.html", "site/a.html", "site/b.html"]

    (tmp_path / "other/b.html").write_text("other")
    (tmp_path / "other-out/more").write_text("")
    release.pack(tmp_path / "other", tmp_path / "other-out/site.tar.gz", 1_700_000_000)
    found = release.differing(tmp_path / "one-out", tmp_path / "other-out")
    assert found == ["more", "site.tar.gz"]


def test_a_file_that_names_the_machine_of_its_build_is_found_in_every_archive(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.whl", "w") as wheel:
        wheel.writestr("fine.py", "a/root/b, {base}/home/x, https://example.org/home/a, my-builder")
        wheel.writestr("library.so", b"\x00\x01" + HOME.encode() + b"x.c\x00")
        wheel.writestr("log.txt", "built on builder.")
    (tmp_path / "notes.md").write_text(f"see {HOME}notes")
    with tarfile.open(tmp_path / "a.tar.gz", "w:gz") as sdist:
        sdist.add(tmp_path / "notes.md", "a/notes.md")

    assert release.leaks(tmp_path / "a.whl", ["builder"]) == [
        f"a.whl: library.so has {HOME[:-1]}",
        "a.whl: log.txt has builder",
    ]
    assert release.leaks(tmp_path / "a.tar.gz") == [f"a.tar.gz: a/notes.md has {HOME[:-1]}"]
    assert release.leaks(tmp_path / "notes.md") == [f"notes.md: notes.md has {HOME[:-1]}"]


def test_no_file_of_the_repository_names_the_machine_of_a_developer(tmp_path):
    """The sdist has these files; a build looks at the finished archives, too."""
    if not (ROOT / ".git").exists():
        pytest.skip("this is no clone: git lists no files")
    listed = git(ROOT, "ls-files", "-z").split("\0")
    with tarfile.open(tmp_path / "all.tar.gz", "w:gz", compresslevel=1) as everything:
        for name in filter(None, listed):
            if (ROOT / name).is_file():
                everything.add(ROOT / name, name)

    assert release.leaks(tmp_path / "all.tar.gz") == []


def test_a_package_that_constraints_do_not_pin_is_named(tmp_path):
    listed, pins = tmp_path / "bill.json", tmp_path / "constraints.txt"
    parts = [{"name": "Ruamel.yaml", "version": "1.0"}, {"name": "idna", "version": "3"}]
    listed.write_text(json.dumps({"components": parts}))
    pins.write_text("# ours\nruamel_yaml==1.0\nidna==2\n")

    with pytest.raises(ReleaseError, match=r"^constraints.txt does not pin idna==3; add these"):
        release.unpinned(listed, pins)
    pins.write_text("ruamel_yaml==1.0\nIDNA==3\n")
    release.unpinned(listed, pins)


def test_checksums_are_those_of_the_files_beside_them(tmp_path):
    (tmp_path / "a").write_text("")
    release.checksums(tmp_path)
    release.checksums(tmp_path)  # its own file is not listed

    empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    assert (tmp_path / "SHA256SUMS").read_text() == f"{empty}  a\n"
