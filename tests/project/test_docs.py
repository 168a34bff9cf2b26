"""The documentation's pages: links lead somewhere, code in them works, and what is made from the code is up to date."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tools.docs.api import docstring
from tools.docs.pages import DOCS, ROOT, anchors, links, pages
from tools.docs.reference import PAGES
from tools.docs.site import SECTIONS, SHIM, finish, lay_out, place_of

NAMES = [str(page.relative_to(ROOT)) for page in pages()]


def test_every_link_leads_to_a_file_and_to_a_place_in_it():
    texts = {page: page.read_text(encoding="utf-8") for page in pages()}
    places = {page: anchors(text) for page, text in texts.items()}
    wrong = []
    for page, text in texts.items():
        for url in links(text):
            if re.match(r"(https?|mailto):", url):
                continue
            path, _, anchor = url.partition("#")
            target = (page.parent / path).resolve() if path else page
            if not target.exists() or (anchor and anchor not in places.get(target, set())):
                wrong.append(f"{page.relative_to(ROOT)}: {url}")
    assert not wrong, "\n".join(wrong)


def test_what_is_no_link_is_found_to_be_none():
    text = '# A b: `c`, d\n## A b: `c`, d\n[x](y.md#a) and ![z](z.png)\n\n```\n[no](link.md)\n```\n<img src="w.svg">\n'
    assert links(text) == ["y.md#a", "z.png", "w.svg"]
    assert anchors(text) == {"a-b-c-d", "a-b-c-d-1"}


@pytest.mark.slow
def test_the_site_holds_every_page_and_no_link_leaves_it(tmp_path):
    lay_out(tmp_path / "built")
    docs = tmp_path / "built" / "docs"
    for page in docs.rglob("*.md"):
        text = page.read_text(encoding="utf-8")
        for url in links(text) if page.name != "examples.md" else []:
            if not re.match(r"(https?|mailto):|#", url):
                target = (page.parent / url.partition("#")[0]).resolve()
                assert target.is_relative_to(docs.resolve()), f"{page}: {url}"
                assert target.exists(), f"{page}: {url}"
    settings = (tmp_path / "built" / "zensical.toml").read_text(encoding="utf-8")
    for page in docs.rglob("*.md"):
        inside = page.relative_to(docs)
        assert f'"{inside.as_posix()}"' in settings or inside.parts[0] == "lab", f"{inside} isn't in the menu"
    assert "https://" not in settings
    assert not [page for page in docs.rglob("*.md") if "```python excerpt" in page.read_text(encoding="utf-8")]


def test_a_link_to_what_the_site_lacks_is_refused():
    with pytest.raises(ValueError, match="isn't in the site"):
        place_of(ROOT / "src", "")
    assert place_of(ROOT / "examples" / "own_model.py", "") == (Path("examples.md"), "examples-own-model-py")


def test_every_folder_of_pages_is_a_section():
    folders = {Path(name).parts[1] for name in NAMES if name.startswith("docs/") and len(Path(name).parts) > 2}
    assert folders <= {*SECTIONS}


@pytest.mark.parametrize("page", [page for page in PAGES if page.suffix == ".md"], ids=lambda page: page.name)
def test_pages_that_are_made_from_the_code_say_what_it_says(page):
    assert page.read_text(encoding="utf-8") == PAGES[page](), "run: python -m tools.docs"


def test_arguments_of_a_docstring_are_what_stands_at_the_first_indentation():
    text = """Do it.

    Args:
        one, *two: a long line that goes on, by
            default: all.
        three: that.

    Raises:
        BadInput: it can't.
    """
    assert [line for line in docstring(text) if line][2:] == [
        "- `one, *two`: a long line that goes on, by",
        "  default: all.",
        "- `three`: that.",
        "**Raises**",
        "- `BadInput`: it can't.",
    ]


def test_every_page_of_an_attack_is_of_one_that_there_is():
    assert {*(DOCS / "reference" / "attacks").iterdir()} <= {*PAGES}


def test_a_finished_site_takes_nothing_from_the_web(tmp_path):
    page = tmp_path / "how-to" / "x.html"
    page.parent.mkdir()
    page.write_text(f'<script src="{SHIM}"></script><a href="https://example.org">elsewhere</a>', encoding="utf-8")
    finish(tmp_path)
    assert '<script src="../offline.js">' in page.read_text(encoding="utf-8")
    page.write_text('<link rel="stylesheet" href="https://example.org/font.css">', encoding="utf-8")
    with pytest.raises(ValueError, match="takes something from the web"):
        finish(tmp_path)
