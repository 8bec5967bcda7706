# The hook of MkDocs that makes the site of docs/, and a check of the site it made: make docs
#
# Pages keep the places that they have in the repository while links are resolved, so one link
# works on a Git host and in the site: ../../examples/ci/gate.sh, ../README.md.  README.md is the
# start of the site, docs/README.md the list of its pages.  Other files that a page links to are
# copied as text.  llms.txt is written from the pages of the navigation.
#
#   python scripts/docs_site.py SITE    fails where a built file would load anything from elsewhere

from __future__ import annotations

import html
import posixpath
import re
import shutil
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
_VERSION = re.search(
    r'__version__ = "(.*)"', (ROOT / "src/servanda/_version.py").read_text(encoding="utf-8")
)
assert _VERSION
VERSION = _VERSION[1]
# pages outside docs/ -> their place in the site
PAGES = {
    "README.md": "index.html",
    "docs/README.md": "contents.html",
    "CONTRIBUTING.md": "contributing.html",
    "CHANGELOG.md": "changelog.html",
}
_PICTURES = (".png", ".svg", ".jpg")
_FENCE = re.compile(r"^(`{3,}|~{3,})")
_ITEM = re.compile(r"(?:[-*+]|\d+[.)]) ")
_LINK = re.compile(r"\]\(([^)\s#]+)(?:#[^)\s]*)?\)")
_IMAGE = re.compile(r"^!\[([^\]]*)\]\(([^)\s]+\.(?:svg|png))\)$", re.M)
_CELL = re.compile(r"<td( style=[^>]*)?>(.*?)</td>", re.S)
_CODE = re.compile(r"<code>([^<]+)</code>")
_SHORT_CELL, _LONG_CELL, _LONG_CODE = 12, 40, 20  # characters
_ATTRIBUTE = re.compile(r'(?<=\s)(src|srcset|href)="([^"#:]+)(#[^"]*)?"')
_SENTENCE = re.compile(r"(.+?[.!?])(?:\s|$)")
_SEARCH = 'data-md-component="search" role="dialog" aria-label="Search"'
_nav: Any = None  # of the build that goes on


# ---- the pages


def spaced(text: str) -> str:
    """The text with an empty line before each list: Git hosts need none, Markdown does.

    >>> spaced("Serve\\n- [one](1.md)\\n- two").split("\\n")
    ['Serve', '', '- [one](1.md)', '- two']
    """
    lines: list[str] = []
    fence, block_has_item = "", False
    for line in text.split("\n"):
        mark = _FENCE.match(line)
        if mark and not fence:
            fence = mark[1]
        elif fence and line.startswith(fence):
            fence = ""
        elif not fence and _ITEM.match(line):
            if lines and lines[-1].strip() and not block_has_item:
                lines.append("")
            block_has_item = True
        elif not line.strip():
            block_has_item = False
        lines.append(line)
    return "\n".join(lines)


def linked(page: str, text: str) -> Iterator[str]:
    """The paths in the repository that a page links to."""
    for target in _LINK.findall(text):
        if "://" not in target and not target.startswith("mailto:"):
            yield posixpath.normpath(posixpath.join(posixpath.dirname(page), target))


def place(path: str) -> str:
    """Where the site has a file of the repository.

    >>> place("docs/how-to/ci.md"), place("examples/promotion/README.md"), place("examples/a.py")
    ('how-to/ci.html', 'examples/promotion/index.html', 'examples/a.py.txt')
    """
    if path in PAGES:
        return PAGES[path]
    inside = path.startswith("docs/")
    path = path.removeprefix("docs/")
    if path.endswith("README.md"):
        return path.removesuffix("README.md") + "index.html"
    if path.endswith(".md"):
        return path.removesuffix(".md") + ".html"
    return path if inside or path.endswith(_PICTURES) else path + ".txt"


def summary(text: str) -> str:
    """The first sentence of a page, without marks.

    >>> summary("<!-- written -->\\n# Title\\n\\n![x](y.png)\\n\\nOne `a` is [b](c.md). Two.")
    'One a is b.'
    """
    text = re.sub(r"<!--.*?-->|^(`{3,}).*?^\1\s*$|^\|.*$", "", text, flags=re.M | re.S)
    for block in re.split(r"\n\s*\n", text):
        plain = re.sub(r"!\[[^\]]*\]\([^)]*\)", "", block)
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", plain)
        plain = " ".join(re.sub(r"[`*<>]", "", plain).split())
        if plain and not plain.startswith(("#", "- ", ":::", "---")):
            found = _SENTENCE.match(plain)
            return found[1] if found else plain
    return ""


# ---- the hook


def on_config(config: Any) -> Any:
    config.copyright = f"Servanda {VERSION} · Apache-2.0"
    config.extra["version_of_package"] = VERSION
    return config


def on_files(files: Any, config: Any) -> Any:
    from mkdocs.structure.files import File, Files  # pyright: ignore[reportMissingImports]

    ours = [one for one in files if one.src_dir == config.docs_dir]
    named = [f"docs/{one.src_uri}" for one in ours]
    named += [page for page in PAGES if page not in named]
    named += [str(p.relative_to(ROOT)) for p in sorted((ROOT / "examples").rglob("*.md"))]
    listed: dict[str, str] = {}
    for page in [one for one in named if one.endswith(".md")]:
        for path in linked(page, (ROOT / page).read_text(encoding="utf-8")):
            if (ROOT / path).is_dir():
                listed[path] = _listing(path)
            elif (ROOT / path).is_file() and path not in named:
                named.append(path)
    for path in listed:
        more = (str(p.relative_to(ROOT)) for p in sorted((ROOT / path).iterdir()) if p.is_file())
        named += [one for one in more if one not in named and not one.endswith(".parquet")]
    made = [
        File(path, str(ROOT), config.site_dir, False, dest_uri=place(path))
        for path in dict.fromkeys(named)
    ]
    for path, text in listed.items():
        if f"{path}/README.md" not in named:
            page = File.generated(config, f"{path}/README.md", content=text)
            page.dest_uri = place(page.src_uri)
            made.append(page)
    theme = [one for one in files if one.src_dir != config.docs_dir]
    return Files([*made, *theme])


def on_nav(nav: Any, **_: Any) -> Any:
    global _nav
    _nav = nav
    return nav


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    src, dest = page.file.src_uri, page.file.dest_uri
    if "description" not in page.meta:
        page.meta["description"] = summary(markdown)

    def attribute(found: re.Match[str]) -> str:
        name, target, anchor = found[1], found[2], found[3] or ""
        path = posixpath.normpath(posixpath.join(posixpath.dirname(src), target))
        if not (ROOT / path).exists():
            return found[0]
        return f'{name}="{posixpath.relpath(place(path), posixpath.dirname(dest))}{anchor}"'

    def folder(found: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(posixpath.dirname(src), found[1]))
        if not (ROOT / path).is_dir():
            return found[0]
        return found[0].replace(found[1], posixpath.join(found[1], "README.md"))

    def picture(found: re.Match[str]) -> str:
        alt, target = html.escape(found[1]), found[2]
        path = ROOT / posixpath.normpath(posixpath.join(posixpath.dirname(src), target))
        if path.parent.name == "concepts":
            # in the page itself it follows the toggle of light and dark
            return f'<div class="diagram">{path.read_text(encoding="utf-8").strip()}</div>'
        shown = {"in-any-light": target}
        if path.with_stem(f"{path.stem}_dark").exists():
            stem, _, suffix = target.rpartition(".")
            shown = {"only-light": target, "only-dark": f"{stem}_dark.{suffix}"}
        # larger than the page is wide: a click shows it as it is
        links = (
            f'<a class="{when}" href="{at}"><img src="{at}" alt="{alt}"></a>'
            for when, at in shown.items()
        )
        return f"<p>{''.join(links)}</p>"

    text = _LINK.sub(folder, spaced(markdown))
    # what is folded is Markdown too, as it is on a Git host
    text = text.replace("<details>", '<details markdown="1">')
    return _ATTRIBUTE.sub(attribute, _IMAGE.sub(picture, text))


def on_page_content(html: str, **_: Any) -> str:
    return cells(html)


def cells(text: str) -> str:
    """The HTML whose tables keep words whole: code breaks at its marks, numbers do not break, and
    long texts get room.

    >>> cells("<td><code>a/test_it_is_so_long.py</code></td>")
    '<td><code>a/<wbr>test_<wbr>it_<wbr>is_<wbr>so_<wbr>long.<wbr>py</code></td>'
    """

    def cell(found: re.Match[str]) -> str:
        style, inside = found[1] or "", found[2]
        size = len(html.unescape(re.sub(r"<[^>]+>", "", inside)))
        kind = " class=short" if size <= _SHORT_CELL else " class=long" * (size > _LONG_CELL)
        inside = _CODE.sub(lambda code: f"<code>{_broken(code[1])}</code>", inside)
        return f"<td{style}{kind}>{inside}</td>"

    return _CELL.sub(cell, text)


def _broken(code: str) -> str:
    code = code.replace(r"\|", "|")  # a Git host reads it so, too
    if len(code) <= _LONG_CODE:
        return code
    return re.sub(r"(?<=[/_.:,=])(?=[a-z_])", "<wbr>", code, flags=re.I)


def on_post_template(output: str, **_: Any) -> str:
    """Of 404.html, which is no page."""
    return on_post_page(output)


def on_post_page(output: str, **_: Any) -> str:
    """Name the theme's search dialog for screen readers."""
    return output.replace('data-md-component="search" role="dialog"', _SEARCH, 1)


def on_post_build(config: Any) -> None:
    site = Path(config.site_dir)
    (site / "llms.txt").write_text(llms(_nav), encoding="utf-8")
    for script in site.glob("assets/javascripts/*.js"):
        # parts of the theme that are never used here would load these from elsewhere
        text = script.read_text(encoding="utf-8")
        text = re.sub(r"https://(unpkg\.com/|api\.github\.com/|\$\{)", r"about:blank#\1", text)
        script.write_text(re.sub(r"\n?//# sourceMappingURL=.*", "", text), encoding="utf-8")
    for extra in site.glob("assets/**/*.map"):
        extra.unlink()
    shutil.rmtree(site / "assets/javascripts/lunr")  # of languages that no page has


def llms(nav: Any) -> str:
    """llms.txt: each page of the navigation with its first sentence."""
    lines = [
        "# Servanda",
        "",
        f"> Servanda {VERSION} finds training-inference mismatch in LLM reinforcement learning "
        "and serving: it judges a contract between the kernel that trains a policy and the "
        "kernel that serves it.",
    ]

    def walk(items: list[Any]) -> None:
        for item in items:
            if item.is_section:
                lines.extend(("", f"## {item.title}", ""))
                walk(item.children)
            elif item.is_page:
                about = item.meta.get("description", "")
                lines.append(f"- [{item.title}]({item.url}){': ' + about if about else ''}")

    walk(nav.items)
    return "\n".join(lines) + "\n"


def _listing(path: str) -> str:
    """A page for a folder that pages link to."""
    files = [p for p in sorted((ROOT / path).iterdir()) if p.is_file() and p.suffix != ".parquet"]
    rows = "\n".join(f"- [{p.name}]({p.name})" for p in files)
    return f"# {path}\n\nThis folder of the repository has the files:\n\n{rows}\n"


# ---- the check

_LOADS = {
    "script": ("src",),
    "img": ("src", "srcset"),
    "source": ("src", "srcset"),
    "iframe": ("src",),
    "video": ("src", "poster"),
    "audio": ("src",),
    "object": ("data",),
    "embed": ("src",),
    "use": ("href", "xlink:href"),
    "image": ("href", "xlink:href"),
    "form": ("action",),
}
_LINKS_THAT_LOAD = {"stylesheet", "icon", "preload", "prefetch", "preconnect", "dns-prefetch"}
_ELSEWHERE = re.compile(r"(?:https?:)?//")
_IN_CSS = re.compile(r"""(?:url\(|@import)\s*["']?((?:https?:)?//[^"')\s]+)""")
_IN_SCRIPT = re.compile(r"""https?://[^"'`\s)]+""")
# names of formats, and where a comment says that a part of the theme is from
_NAMES = (
    "http://www.w3.org/",
    "https://clipboardjs.com/",
    "https://fontawesome.com",
    "http://lunrjs.com",
    "http://tartarus.org/",
    "https://bit.ly/2s3ChXG",
)


class _Loads(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.local: list[str] = []
        self._style = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        names = _LOADS.get(tag, ())
        if tag == "link" and _LINKS_THAT_LOAD & set(given.get("rel", "").split()):
            names = ("href",)
        for name in names:
            parts = [part.strip() for part in given.get(name, "").split(",")]
            self.found += [part for part in parts if _ELSEWHERE.match(part)]
            self.local += [part.split()[0] for part in parts if part and ":" not in part]
        self.found += _IN_CSS.findall(given.get("style", ""))
        self._style = tag == "style"

    def handle_data(self, data: str) -> None:
        if self._style:
            self.found += _IN_CSS.findall(data)
        self._style = False


def loads(name: str, text: str) -> list[str]:
    """The addresses elsewhere that a built file would load something from; links are none.

    >>> loads("a.html", '<a href="https://x.org">x</a><script src="https://x.org/a.js"></script>')
    ['https://x.org/a.js']
    >>> loads("a.css", "@import 'https://x.org/a.css'; a {background: url(//x.org/b.png)}")
    ['https://x.org/a.css', '//x.org/b.png']
    >>> loads("a.js", 'f("https://x.org/a.js"); g("http://www.w3.org/2000/svg")')
    ['https://x.org/a.js']
    """
    if name.endswith(".html"):
        parser = _Loads()
        parser.feed(text)
        return parser.found
    if name.endswith(".css"):
        return _IN_CSS.findall(text)
    if name.endswith(".js"):
        return [one for one in _IN_SCRIPT.findall(text) if not one.startswith(_NAMES)]
    if name.endswith(".svg"):
        return re.findall(r"""href=["'](https?://[^"']+)""", text) + _IN_CSS.findall(text)
    return []


def missing(site: Path, page: Path, text: str) -> list[str]:
    """The files of its own that a page would load and the site lacks."""
    parser = _Loads()
    parser.feed(text)
    own = [at.partition("#")[0].partition("?")[0] for at in parser.local]
    return [at for at in own if at and not _at(site, page, at).is_file()]


def _at(site: Path, page: Path, target: str) -> Path:
    return site / target[1:] if target.startswith("/") else page.parent / target


def main(site: Path) -> int:
    """Print every address elsewhere that the site would load from, and every file that it lacks."""
    suffixes = (".html", ".css", ".js", ".svg")
    files = [one for one in sorted(site.rglob("*")) if one.suffix in suffixes]
    texts = {one: one.read_text(encoding="utf-8") for one in files}
    found = [f"{one}: loads {at}" for one, text in texts.items() for at in loads(one.name, text)]
    pages = [one for one in files if one.suffix == ".html"]
    found += [f"{one}: {at} is not there" for one in pages for at in missing(site, one, texts[one])]
    for line in found:
        print(line)
    print(f"{len(pages)} pages of Servanda {VERSION}, {len(found)} problems")
    return int(bool(found) or not pages)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
