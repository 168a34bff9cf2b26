"""Writes the pages made from the code: python -m tools.docs [--check]; and prepares the site: site|finish FOLDER."""

from __future__ import annotations

import sys
from pathlib import Path

from tools.docs.reference import PAGES
from tools.docs.site import finish, lay_out


def main() -> None:
    """Write the pages, or with ``--check`` end with 1 where one isn't what it would be; or lay the site out."""
    match sys.argv[1:]:
        case []:
            for path, page in PAGES.items():
                path.write_text(page(), encoding="utf-8")
        case ["--check"]:
            stale = [path.name for path, page in PAGES.items() if path.read_text(encoding="utf-8") != page()]
            sys.exit(f"not what the code says: {', '.join(stale)}; run: python -m tools.docs" if stale else 0)
        case ["site", folder]:
            lay_out(Path(folder))
        case ["finish", folder]:
            finish(Path(folder))
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main()
