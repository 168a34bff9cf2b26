"""What the pages of the documentation hold: their links, anchors and blocks of code."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
LAB = ROOT / "lab" / "docs"
RESULTS = LAB / "results"  # of studies, a folder each
EXCERPT = "excerpt"  # in a block's heading, as in ```python excerpt: it shows a part, and isn't run
_ATTRIBUTE = re.compile(r'<(?:a|img|source)\b[^>]*?\b(?:href|src|srcset)="([^"]+)"')
_ID = re.compile(r'\b(?:id|name)="([^"]+)"')


@dataclass(frozen=True)
class Block:
    """A block of code: fenced, or indented (of no language)."""

    page: Path
    line: int
    language: str
    excerpt: bool
    text: str

    @property
    def where(self) -> str:
        """Where it stands, for messages."""
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def pages() -> list[Path]:
    """Return every page, those at the top of the repository first."""
    return [
        page
        for found in (ROOT.glob("*.md"), ROOT.glob("contrib/*.md"), DOCS.rglob("*.md"), LAB.rglob("*.md"))
        for page in sorted(found)
    ]


@lru_cache(maxsize=512)
def parsed(text: str) -> list[Token]:
    """Return a page's Markdown as tokens, which nobody may change: who looks at a page looks at it several times."""
    return MarkdownIt("commonmark").enable("table").parse(text)


def title(text: str) -> str:
    """Return a page's first heading, without its marks."""
    return next(_plain(inline) for _, inline in _headings(text))


def anchors(text: str) -> set[str]:
    """Return what links to a page can name after ``#``: headings as GitHub writes them, and ids in HTML."""
    found: list[str] = []
    for _, inline in _headings(text):
        place = slug(_plain(inline))
        twice = sum(re.fullmatch(re.escape(place) + r"(-\d+)?", other) is not None for other in found)
        found.append(f"{place}-{twice}" if twice else place)
    return {*found, *_ID.findall(text)}


def slug(heading: str) -> str:
    """Return a heading's anchor, as GitHub writes it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def links(text: str) -> list[str]:
    """Return where a page links to and which pictures it shows, as written."""
    found = []
    for token in parsed(text):
        for part in (token, *(token.children or [])):
            if part.type in ("link_open", "image"):
                found.append(str(part.attrs["href" if part.type == "link_open" else "src"]))
            elif part.type in ("html_block", "html_inline"):
                found += _ATTRIBUTE.findall(part.content)
    return found


def blocks(page: Path) -> Iterator[Block]:
    """Yield a page's blocks of code, in their order."""
    for token in parsed(page.read_text(encoding="utf-8")):
        if token.type in ("fence", "code_block"):
            language, _, rest = token.info.strip().partition(" ")
            yield Block(page, (token.map or [0])[0] + 1, language, EXCERPT in rest.split(), token.content)


def _headings(text: str) -> Iterator[tuple[Token, Token]]:
    tokens = parsed(text)
    for token, following in pairwise(tokens):
        if token.type == "heading_open":
            yield token, following


def _plain(inline: Token) -> str:
    return "".join(part.content for part in inline.children or [] if part.type in ("text", "code_inline"))
