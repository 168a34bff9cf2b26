"""Lays out what the site is built of: the pages of docs/ and lab/docs/, and what they link to elsewhere.

The generator sees one folder. So the pages at the top of the repository and the examples are copied into it, and links
to them are written anew. What is in the menu follows from the folders; SECTIONS says what comes first in each.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from tools.docs.pages import DOCS, EXCERPT, LAB, ROOT, pages, title

# The sections of the menu: a folder each, and the pages that come first in it; the others follow by title.
SECTIONS: dict[str, tuple[str, tuple[str, ...]]] = {
    "tutorials": ("Tutorials", ("pytorch-model", "flower-app", "compare-defences", "gate-ci", "differential-privacy")),
    "how-to": (
        "How-to guides",
        (
            "install",
            "own-data",
            "own-model",
            "scans",
            "own-attack",
            "your-own-loop",
            "language-model",
            "flower",
            "nvflare",
            "guard",
            "join",
            "statement",
            "check-data",
        ),
    ),
    "explanation": (
        "Explanation",
        ("threat-models", "verdicts", "controls", "ceiling", "what-decides", "epsilon", "limits"),
    ),
    "reference": ("Reference", ("scenario", "cli", "python", "results", "glossary")),
    "data-protection": ("Data protection", ("report", "sharing", "gdpr", "standards", "impact-assessment")),
    "evidence": ("Evidence", ("claims", "performance", "robustness")),
    "project": ("Project", ()),
}
EXAMPLES = "examples.md"
_SHOWN = ("examples", "contrib")  # folders whose files are on that page
_LANGUAGES = {".py": "python", ".yaml": "yaml", ".yml": "yaml", ".toml": "toml", ".patch": "diff", ".ipynb": ""}
_LINK = re.compile(r"(\]\(|\b(?:href|src|srcset)=\")([^)\s\"]+)")
SHIM = "https://unpkg.com/iframe-worker/shim"
_MARK = re.compile(rf"^(```\w+) {EXCERPT}$", re.MULTILINE)  # the generator takes such a block for none
_FENCE = re.compile(r"^(```+|~~~+).*?^\1[ \t]*$", re.MULTILINE | re.DOTALL)


def lay_out(folder: Path) -> None:
    """Fill ``folder`` with what the generator takes: pages and zensical.toml; what was there goes."""
    shutil.rmtree(folder, ignore_errors=True)
    docs = folder / "docs"
    shutil.copytree(DOCS, docs)
    shutil.copytree(LAB, docs / "lab")
    (docs / "project").mkdir()
    shutil.copy(ROOT / "LICENSE", docs / "project" / "LICENSE.txt")
    (docs / EXAMPLES).write_text(examples(), encoding="utf-8")
    for page in pages():
        if page != ROOT / "README.md":  # the site's home is docs/index.md
            inside, _ = place_of(page, "")
            (docs / inside).write_text(moved(page.read_text(encoding="utf-8"), page, inside), encoding="utf-8")
    settings = (Path(__file__).with_name("zensical.toml")).read_text(encoding="utf-8")
    settings = settings.replace("[project]\n", f"[project]\nnav = {menu(docs)}\n", 1)
    (folder / "zensical.toml").write_text(settings, encoding="utf-8")
    for name in ("site.css", "offline.js"):
        shutil.copy(Path(__file__).with_name(name), docs)


def finish(site: Path) -> None:
    """Let the pages of a built site search from the disk with our own script, where the generator names one of the web.

    Raises:
        ValueError: a page still takes something from the web.
    """
    for page in site.rglob("*.html"):
        own = os.path.relpath(site / "offline.js", page.parent)
        text = page.read_text(encoding="utf-8").replace(SHIM, own)
        if re.search(r"<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)=\"?(?:https?:)?//", text):
            raise ValueError(f"{page} takes something from the web")
        page.write_text(text, encoding="utf-8")


def moved(text: str, original: Path, inside: Path) -> str:
    """Return a page with its links as they are within the site.

    Args:
        text: the page.
        original: its file in the repository.
        inside: its path in the site's folder.
    """

    def link(match: re.Match[str]) -> str:
        before, url = match.groups()
        if re.match(r"[a-z]+:|#", url):
            return match[0]
        path, mark, anchor = url.partition("#")
        place, anchor = place_of((original.parent / path).resolve(), anchor)
        return before + os.path.relpath(place, inside.parent) + (f"#{anchor}" if mark or anchor else "")

    parts, end = [], 0
    for fence in _FENCE.finditer(text):
        parts += [_LINK.sub(link, text[end : fence.start()]), _MARK.sub(r"\1", fence[0], count=1)]
        end = fence.end()
    return "".join([*parts, _LINK.sub(link, text[end:])])


def place_of(target: Path, anchor: str) -> tuple[Path, str]:
    """Return where a file of the repository, or a place in it, is in the site.

    Raises:
        ValueError: it isn't in the site.
    """
    if target.is_relative_to(DOCS):
        return target.relative_to(DOCS), anchor
    if target.is_relative_to(LAB):
        return Path("lab") / target.relative_to(LAB), anchor
    if target == ROOT / "README.md":
        return Path("index.md"), ""
    if target.parent == ROOT and target.suffix == ".md":
        return Path("project") / target.name, anchor
    if target == ROOT / "contrib" / "README.md":
        return Path("project/contrib.md"), anchor
    if target == ROOT / "LICENSE":
        return Path("project/LICENSE.txt"), ""
    if any(target.is_relative_to(ROOT / name) for name in _SHOWN):
        return Path(EXAMPLES), _slug(str(target.relative_to(ROOT)))
    raise ValueError(
        f"a page links to {target}, which isn't in the site; "
        "link to docs/, lab/docs/, examples/, contrib/ or a page at the top"
    )


def examples() -> str:
    """Return a page with the files of examples/ and contrib/, folder by folder; of a notebook its cells."""
    lines = ["# Examples", "", "The files in `examples/`, as the tests run them, and in `contrib/`.", ""]
    found = [file for top in _SHOWN for file in (ROOT / top).rglob("*") if file.is_file() and file.stat().st_size]
    files = [file for file in found if file.suffix in _LANGUAGES or file.name == "Dockerfile"]
    for folder in sorted({file.parent for file in files}):
        lines += [_heading("##", folder), ""]
        for file in sorted(file for file in files if file.parent == folder):
            lines += [_heading("###", file), "", *_shown(file), ""]
    return "\n".join(lines)


def _heading(level: str, path: Path) -> str:
    name = str(path.relative_to(ROOT))
    return f"{level} `{name}` {{: #{_slug(name)} }}"


def _shown(file: Path) -> Iterator[str]:
    text = file.read_text(encoding="utf-8")
    if file.suffix != ".ipynb":
        yield from (f"````{_LANGUAGES.get(file.suffix, 'docker')}", text.rstrip(), "````")
        return
    for cell in json.loads(text)["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "code":
            yield from ("````python", source, "````", "")
        else:
            yield from (re.sub(r"^#+ (.*)$", r"**\1**", source, flags=re.MULTILINE), "")


def menu(docs: Path) -> str:
    """Return the menu, as TOML: the home page and the quick start, then a section for each folder."""
    top: list[dict[str, object]] = []
    for name, label in (("index.md", "Home"), ("quick-start.md", "Quick start")):
        if (docs / name).is_file():
            top.append({label: name})
    for folder, (label, first) in SECTIONS.items():
        entries = list(_entries(docs, folder, first))
        if folder == "tutorials":
            entries.append({"Examples": EXAMPLES})
        if folder == "evidence":
            entries += [{"Results of studies": "lab/results/README.md"}, {"Measurements": "lab/measured.md"}]
        if folder == "reference":
            entries.insert(3, {"Attacks": list(_entries(docs, "reference/attacks", ("index", "gradient-inversion")))})
        if entries:
            top.append({label: entries})
    return _toml(top)


def _entries(docs: Path, folder: str, first: tuple[str, ...]) -> Iterator[dict[str, object]]:
    found = {page.stem: page for page in (docs / folder).glob("*.md")}
    titles = {stem: title(page.read_text(encoding="utf-8")) for stem, page in found.items()}
    order = [stem for stem in first if stem in found]
    for stem in order + sorted(set(found) - set(order), key=lambda stem: titles[stem].lower()):
        short = titles[stem].partition(": ")[0]
        yield {short if len(short) > 2 else titles[stem]: found[stem].relative_to(docs).as_posix()}


def _toml(entries: list[dict[str, object]]) -> str:
    shown = []
    for entry in entries:
        for label, value in entry.items():
            text = _toml(value) if isinstance(value, list) else json.dumps(value, ensure_ascii=False)
            shown.append(f"{{ {json.dumps(label, ensure_ascii=False)} = {text} }}")
    return "[" + ", ".join(shown) + "]"


def _slug(path: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", path.lower()).strip("-")
