"""The docs' table of what attacks make of real training; ``python -m tests.measure.training_table`` writes it."""

from __future__ import annotations

from pathlib import Path

from fedaudit.attacks.local_training import MODELLED, TABLE, WAYS

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "methods.md"
BEGIN = "<!-- what attacks make of real training: tests/measure/training_table.py -->\n"
END = "<!-- end -->\n"


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
