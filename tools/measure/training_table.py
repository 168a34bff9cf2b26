"""The docs' table of what attacks make of real training; ``python -m tools.measure.training_table`` writes it."""

from __future__ import annotations

from pathlib import Path

from fedaudit.attacks.local_training import TABLE, Way

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "methods.md"
BEGIN = "<!-- what attacks make of real training: tools/measure/training_table.py -->\n"
END = "<!-- end -->\n"
MODELLED = "models"
WAYS: dict[Way, str] = {
    "one step": "images or rows, from a gradient or an update of one local step",
    "simulation": "images or rows, from several local steps that are replayed (`invg`, `dlg-adam`, `gias`, `tableak`)",
    "one batch": "from several local steps taken as one batch (`agic`, `geng`, `labels`)",
    "r-gap": "the closed form",
    "spear": "exact batches (`spear`)",
    "labels": "label inference",
    "span": "sequences and members, from the span of gradients (`dager`, `span`)",
    "rows": "words, from the embedding's rows that moved (`which-tokens`)",
    "local-model": "a client's own model, learnt from its rounds",
    "local-model-exact": "the same by linear algebra",
}


def table() -> str:
    """Return the table and the sentences behind it."""
    lines = ["| clients' training | " + " | ".join(WAYS) + " |", "|---" * (len(WAYS) + 1) + "|"]
    sentences: dict[str, int] = {}
    for word, row in TABLE.items():
        cells = []
        for way in WAYS:
            answer = row.answers.get(way)
            number = sentences.setdefault(answer.text, len(sentences) + 1) if answer else 0
            cells.append(f"{answer.kind} ({number})" if answer else MODELLED)
        lines.append(f"| {word}: {row.what} | " + " | ".join(cells) + " |")
    notes = [f"{number}. {text}" for text, number in sentences.items()]
    ways = [f"- {way}: {what}" for way, what in WAYS.items()]
    return "\n".join([*ways, "", *lines, "", *notes]) + "\n"


if __name__ == "__main__":
    page = PAGE.read_text(encoding="utf-8")
    before, rest = page.split(BEGIN)
    PAGE.write_text(before + BEGIN + table() + END + rest.split(END, 1)[1], encoding="utf-8")
