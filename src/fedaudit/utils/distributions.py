"""The distributions of this repository beside ``fedaudit``: what each adds, how to get it, whether its version fits."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from fedaudit.utils.errors import BadInput
from fedaudit.utils.renamed import of_name
from fedaudit.utils.version import __version__

OURS = "fedaudit"
# By distribution, which is the extra of that name, and by group of entry points: the names that it adds.
NAMES: dict[str, dict[str, tuple[str, ...]]] = {
    "catalogue": {
        "fedaudit.attacks": (
            *("r-gap", "gias", "peftleak", "seer", "agrevader", "gan", "gradinversion"),
            *("epochs", "agic-epochs", "invg-epochs", "dlg-adam-epochs", "dlg", "dlg-adam", "idlg", "cpl", "geng"),
        ),
        "fedaudit.behaviours": ("agrevader", "gan", "gan-adaptive"),
        "fedaudit.server_behaviours": ("peftleak", "seer", "geminio"),
        "fedaudit.commands": ("rank", "train-generator"),
    },
    "lab": {
        "fedaudit.commands": ("study", "bench"),
        "fedaudit.catalogue": ("studies",),
        "fedaudit.datasets": (
            *("leaf-synthetic", "notes", "notes-causal", "head-phantoms", "head-tissues", "head-slices"),
            *("slice-tissues", "xray-phantoms", "xray-single-label", "xray-many", "ecg-synthetic", "att-faces-turned"),
        ),
    },
    "trees": {
        "fedaudit.protocols": ("trees",),
        "fedaudit.attacks": ("timberstrike",),
        "fedaudit.models": ("xgboost",),
    },
}
# By package of ours: the Python names that it had once, and the module that has them now, with the name there if new.
MOVED: dict[str, dict[str, str]] = {
    "fedaudit": {"ClassImagesFinding": "fedaudit_catalogue.attacks"},
    "fedaudit.adapters": {"SiteGuard": "fedaudit.guard", "Passing": "fedaudit.guard:OutgoingUpdate"},
    "fedaudit.attacks": {
        **dict.fromkeys(
            (
                *("RGap", "GIAS", "PeftLeak", "Seer", "AgrEvader", "GAN", "ClassImagesFinding", "GradInversion"),
                *("Epochs", "AGICEpochs", "InvGEpochs", "DLGAdamEpochs", "DLG", "DLGAdam", "IDLG", "CPL", "Geng"),
            ),
            "fedaudit_catalogue.attacks",
        ),
        "TimberStrike": "fedaudit_trees.timberstrike",
    },
    "fedaudit.pipeline": {"MemberWatch": "fedaudit.guard"},
}


def lacking(group: str | None, name: object) -> str | None:
    """Return where ``name`` of a group of entry points comes from and how to get it; None: it is nobody's of ours.

    The rest of a sentence that begins with the name.
    """
    extras = (extra for extra, groups in NAMES.items() if name in groups.get(group or "", ()))
    extra = next(extras, None)
    return None if extra is None else f"comes with fedaudit-{extra}, {_wanting(extra)}"


def misfit(distribution: str) -> str | None:
    """Return the line on a distribution of ours that is installed in another version; None: it fits, or isn't ours."""
    extra = distribution.replace("_", "-").removeprefix("fedaudit-")
    installed = _installed(extra) if extra in NAMES else None
    if installed in (None, __version__):
        return None
    return f"fedaudit-{extra} {installed} doesn't fit fedaudit {__version__}: {_how_to_get(extra)}"


def moved(package: str) -> Callable[[str], Any]:
    """Return ``__getattr__`` of a package, which takes names that it had once from where they are now.

    Raises:
        BadInput: by what is returned, where these are another distribution's, which isn't installed or doesn't fit.
    """

    def get(name: str) -> Any:
        new = of_name(package, name)
        if new != name:
            return getattr(importlib.import_module(package), new)
        home, _, now = MOVED.get(package, {}).get(name, "").partition(":")
        if not home:
            raise AttributeError(f"module '{package}' has no attribute '{name}'")
        extra = home.partition(".")[0].removeprefix("fedaudit_")
        if extra != OURS and _installed(extra) != __version__:
            raise BadInput(f"{package}.{name} comes with fedaudit-{extra}, {_wanting(extra)}")
        return getattr(importlib.import_module(home), now or name)

    return get


def _wanting(extra: str) -> str:
    installed = _installed(extra)
    is_not = "isn't installed" if installed is None else f"is {installed} and doesn't fit fedaudit {__version__}"
    return f"which {is_not}: {_how_to_get(extra)}"


def _how_to_get(extra: str) -> str:
    return f"pip install 'fedaudit[{extra}]' (from a clone: pip install PATH_OF_THE_CLONE/{extra})"


@cache
def _installed(extra: str) -> str | None:
    try:
        return version(f"fedaudit-{extra}")
    except PackageNotFoundError:
        return None
