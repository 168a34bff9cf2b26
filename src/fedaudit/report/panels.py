"""A section of the page for each kind of finding, found by the kind; and the images that they show."""

from __future__ import annotations

import base64
import hashlib
import io
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from PIL import Image

from fedaudit.results import AuditResult
from fedaudit.utils.errors import BadInput, MissingData
from fedaudit.utils.folders import inside
from fedaudit.utils.image_bytes import decode, dimensions

_BROAD = 420  # CSS pixels, at most, of a picture that is at least twice as wide as high
_LARGE = 24 * 1024  # bytes of a PNG above which the page carries a JPEG of it: 224-pixel photographs, mostly


@dataclass(frozen=True)
class PageImage:
    """An image embedded in the page."""

    uri: str
    width: int
    height: int
    digest: bytes

    @property
    def pixelated(self) -> bool:
        """Whether it is so small that its pixels are to be shown as squares."""
        return max(self.width, self.height) <= 96

    @property
    def shown_width(self) -> int:
        """Greatest width on the page in CSS pixels: a whole multiple where the pixels are squares."""
        if self.pixelated:
            return self.width * math.ceil(128 / self.width)
        return min(self.width, _BROAD if self.broad else 200)

    @property
    def broad(self) -> bool:
        """Whether it is at least twice as wide as high: planes of a volume, curves."""
        return self.width >= 2 * self.height


@dataclass
class ImageReader:
    """Reads the images below one folder, each once."""

    folder: Path
    _read: dict[str, PageImage] = field(default_factory=dict)

    def __getitem__(self, name: str) -> PageImage:
        """Return the PNG at ``name``, relative to the folder, which it mustn't leave."""
        if name not in self._read:
            self._read[name] = _read_image(self.folder, name)
        return self._read[name]


@dataclass(frozen=True)
class Panel:
    """The page's section on what findings of one kind recovered.

    Attributes:
        title: in the page's list of contents.
        template: in ``package``'s folder ``templates``: a ``<section class="part" id="…">`` whose id is the kind. It
            has the page's values, and ``panel``.
        panel: what the template draws, of a result and the images beside it; empty: there is no section.
        package: where the template is.
        after_results: the section stands after the table of results, not before it.
    """

    title: str
    template: str
    panel: Callable[[AuditResult, ImageReader], Any]
    package: str = "fedaudit.report"
    after_results: bool = False


# By the finding's ``kind``, in the order of the page. A kind without a panel has its metrics and charts all the same.
PANELS: dict[str, Panel] = {}


@dataclass(frozen=True)
class Section:
    """A panel with what it draws of one result."""

    kind: str
    about: Panel
    panel: Any


def sections(result: AuditResult, images: ImageReader) -> list[Section]:
    """Return the panels of the kinds that ``result`` has."""
    kinds = {finding.kind for finding in result.findings if finding.kind}
    if kinds - PANELS.keys() and entry_points(group="fedaudit.attacks"):
        from fedaudit.attacks import ATTACKS  # other packages' kinds come with their attacks

        ATTACKS.names()
    made = [Section(kind, about, about.panel(result, images)) for kind, about in PANELS.items() if kind in kinds]
    return [section for section in made if section.panel]


def _read_image(folder: Path, name: str) -> PageImage:
    path = inside(folder, name)
    if not path.is_file():
        raise MissingData(f"image '{name}' is not in {folder}; keep the images beside results.json")
    data = path.read_bytes()
    try:
        width, height = dimensions(data, str(path), formats=("PNG",))
        kind, shown = "png", data
        if len(data) > _LARGE:
            pixels = decode(data, str(path), mode=None, formats=("PNG",))
            buffer = io.BytesIO()
            # Whole chroma: halving it would smooth coloured noise and flatter the attack.
            Image.fromarray(pixels).save(buffer, "JPEG", quality=85, subsampling=0)
            kind, shown = "jpeg", buffer.getvalue()
    except BadInput:
        raise BadInput(f"image '{path}' is no whole PNG; repeat the audit") from None
    uri = f"data:image/{kind};base64,{base64.b64encode(shown).decode()}"
    return PageImage(uri, width, height, hashlib.sha256(data).digest())
