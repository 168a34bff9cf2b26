"""docs/reference/glossary.md: the words of reports, from the one file that has them."""

from __future__ import annotations

from fedaudit.results.glossary import terms
from tools.docs.settings import MADE

_HEAD = f"""\
# Glossary

{MADE}

The words of reports and tables of results. `fedaudit explain WORD` says the same on a terminal, and what a metric, an
attack, a defence, a model or a data set is; without a word it lists them.
"""


def page() -> str:
    """Return the page."""
    lines = [_HEAD]
    for term in terms():
        also = f" *Also explains:* {', '.join(term.words)}." if term.words else ""
        lines += [f"## {term.term}", "", f"{' '.join(term.text.split())}{also}", ""]
    return "\n".join(lines)
