"""docs/reference/training.md: what attacks make of real training."""

from __future__ import annotations

from fedaudit.attacks.local_training import TABLE, Way
from tools.docs.settings import MADE

_ABOUT = """\
An attack models a kind of training, approximates it and says so in the finding's notes, or refuses it and says what to
do instead. How training is replayed: [methods](methods.md#training-that-isnt-plain-sgd)."""
_MODELLED = "models"
_WAYS: dict[Way, str] = {
    "one step": "images or rows, from a gradient or an update of one local step",
    "simulation": "images or rows, from several local steps that are replayed (`invg`, `dlg-adam`, `gias`, `tableak`)",
    "one batch": "from several local steps taken as one batch (`agic`, `geng`, `labels`)",
    "r-gap": "the closed form",
    "spear": "exact batches (`spear`)",
    "labels": "label inference",
    "span": "sequences and members, from the span of gradients (`dager`, `projection-residual`)",
    "rows": "words, from the embedding's rows that moved (`token-presence`)",
    "local-model": "a client's own model, learnt from its rounds",
    "local-model-exact": "the same by linear algebra",
}


def page() -> str:
    """Return the page: the ways, the table and the sentences behind it."""
    lines = ["| clients' training | " + " | ".join(_WAYS) + " |", "|---" * (len(_WAYS) + 1) + "|"]
    sentences: dict[str, int] = {}
    for word, row in TABLE.items():
        cells = []
        for way in _WAYS:
            answer = row.answers.get(way)
            number = sentences.setdefault(answer.text, len(sentences) + 1) if answer else 0
            cells.append(f"{answer.kind} ({number})" if answer else _MODELLED)
        lines.append(f"| {word}: {row.what} | " + " | ".join(cells) + " |")
    notes = [f"{number}. {text}" for text, number in sentences.items()]
    ways = [f"- {way}: {what}" for way, what in _WAYS.items()]
    title = [
        "# Training that isn't plain SGD",
        "",
        MADE,
        "",
        _ABOUT,
        "",
        "The columns are how an attack uses an update:",
        "",
    ]
    return "\n".join([*title, *ways, "", *lines, "", *notes]) + "\n"
