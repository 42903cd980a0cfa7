"""Brings what lives outside docs/ into the site: pages, pictures and sources, at their own place in the repository.

The Markdown files are read in two places. On a code host, and in an editor, a link such as ``../examples/fsdp2.py`` has
to lead to that file; MkDocs knows the files below docs/ only. So nothing is copied or rewritten in the repository:
when the site is built, the pages of `PAGES` are added to it, and so is every file that a page links to (Markdown as a
page, pictures and HTML as they are, any other text as a page with its source), and the links are made to fit.

A notebook below docs/ is a page as well, see `notebook`.

The first page says at its end which version it is of.

A link whose target does not exist is left as it is: MkDocs warns of it, which ends a strict build.
"""

from __future__ import annotations

import posixpath
import re
import sys
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

sys.path.insert(0, str(Path(__file__).parent))
from notebook import markdown as notebook_markdown

ROOT = Path(__file__).resolve().parents[2]
DOCS = "docs/"

#: Pages outside docs/, at the same paths in the site. A strict build asks for each of them in the navigation.
PAGES = ("benchmarks/results/*.md", "recipes/README.md")

#: Folders, and which page stands for them.
FOLDERS = {"benchmarks/results": "docs/benchmarks.md"}

#: Linked files that are shown as they are.
MEDIA = (".gif", ".html", ".jpg", ".png", ".svg")

_FENCED = r"^(?P<fence>```+|~~~+).*?^(?P=fence)[^\S\n]*$"
_INDENTED = r"^\n(?:(?: {4}|\t)[^\n]*\n)+"
_CODE = r"(?P<ticks>`+)(?!`).*?(?<!`)(?P=ticks)(?!`)"
_LINK = r"(?P<inline>\]\()(?P<target>[^\s()<>]+)(?=[\s)])"
_DEFINITION = r"^(?P<label>\[[^\]\n]+\]:[^\S\n]+)(?P<defined>\S+)"
_TOKEN = re.compile("|".join((_FENCED, _INDENTED, _CODE, _LINK, _DEFINITION)), re.MULTILINE | re.DOTALL)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add `PAGES`, notebooks, and whatever pages link to, directly or through one another."""
    for path in sorted((ROOT / DOCS).glob("*.ipynb")):
        files.remove(files.get_file_from_path(path.name))
        place = path.with_suffix(".md").name
        files.append(File.generated(config, place, content=notebook_markdown(path)))
    waiting = [DOCS + file.src_uri for file in files.documentation_pages()]
    for pattern in PAGES:
        for path in sorted(ROOT.glob(pattern)):
            waiting.append(_name(path))
            files.append(_file(waiting[-1], config))
    seen = set(waiting)
    while waiting:
        page = waiting.pop()
        path = ROOT / page
        source = path.with_suffix(".ipynb")
        text = path.read_text(encoding="utf-8") if path.exists() else notebook_markdown(source)
        for target in links(page, text):
            if target in seen or files.get_file_from_path(_place(target)):
                continue
            seen.add(target)
            added = _file(target, config)
            added.inclusion = InclusionLevel.NOT_IN_NAV
            files.append(added)
            if target.endswith(".md"):
                waiting.append(target)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Make links fit that lead out of docs/, or into it."""
    if page.file.generated_by is None or (ROOT / DOCS / page.file.src_uri).with_suffix(".ipynb").exists():
        name = DOCS + page.file.src_uri
        if name == DOCS + "index.md":
            markdown = _with_version(markdown)
    elif page.file.src_uri.startswith("source/"):
        return markdown
    else:
        name = page.file.src_uri

    def fitted(link: str) -> str:
        target = resolve(name, link)
        if target is None:
            return link
        anchor = urlsplit(link).fragment
        path = posixpath.relpath(_place(target), posixpath.dirname(page.file.src_uri) or ".")
        return f"{path}#{anchor}" if anchor else path

    return _with_links(markdown, fitted)


def links(page: str, markdown: str) -> list[str]:
    """The files of the repository that a page links to, as paths from its root; `FOLDERS` for folders."""
    targets: list[str] = []

    def note(link: str) -> str:
        target = resolve(page, link)
        if target is not None:
            targets.append(target)
        return link

    _with_links(markdown, note)
    return targets


def resolve(page: str, link: str) -> str | None:
    """Where a page's link leads, as a path from the root; None if to another host, inside the page, or nowhere."""
    parts = urlsplit(link)
    if parts.scheme or parts.netloc or not parts.path or parts.path.startswith("/"):
        return None
    target = posixpath.normpath(posixpath.join(posixpath.dirname(page), parts.path))
    target = FOLDERS.get(target, target)
    inside = not target.startswith("..")
    return target if inside and (ROOT / target).is_file() else None


def _with_version(markdown: str) -> str:
    """The first page with the version of the package at its end."""
    source = (ROOT / "lightning_gqsgd" / "version.py").read_text(encoding="utf-8")
    (version,) = re.findall(r'^__version__ = "(.+)"$', source, re.MULTILINE)
    return f"{markdown.rstrip()}\n\nThis page is of version {version}.\n"


def _with_links(markdown: str, change: Callable[[str], str]) -> str:
    """The text with every link's target changed, code left alone."""

    def replace(match: re.Match[str]) -> str:
        if match["target"] is not None:
            return match["inline"] + change(match["target"])
        if match["defined"] is not None:
            return match["label"] + change(match["defined"])
        return match[0]

    return _TOKEN.sub(replace, markdown)


def _place(target: str) -> str:
    """Path in the site of a file of the repository."""
    if posixpath.dirname(target) + "/" == DOCS and target.endswith(".ipynb"):  # `on_files` makes a page of it
        return posixpath.basename(target).removesuffix(".ipynb") + ".md"
    return target.removeprefix(DOCS) if target.endswith((".md", *MEDIA)) else f"source/{target}.md"


def _file(target: str, config: MkDocsConfig) -> File:
    place = _place(target)
    path = ROOT / target
    if not place.startswith("source/"):
        return File.generated(config, place, abs_src_path=str(path))
    text = path.read_text(encoding="utf-8")
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    language = {".py": "python", ".yaml": "yaml", ".toml": "toml", ".json": "json"}.get(path.suffix, "text")
    head = f"---\nhide: [toc]\nsearch: {{exclude: true}}\n---\n\n# {target}\n"
    return File.generated(config, place, content=f"{head}\n{fence}{language}\n{text.rstrip()}\n{fence}\n")


def _name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()
