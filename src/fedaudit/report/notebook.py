"""A finished audit in a notebook: headline, a row an attack with its images, and limits, as one HTML fragment."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Mapping

from torch import Tensor

from fedaudit.evaluation.images import best_tries
from fedaudit.modalities.base import eight_bit
from fedaudit.report.conclusion import SEVERITY, headline, threshold_text
from fedaudit.report.wording import counted, number, percent, short, span
from fedaudit.results import AttackSummary, AuditResult, FindingResult

_MOST_IMAGES = 4  # a row
_HEIGHT = 56  # CSS pixels of an image
_COLOURS = {3: "#b3261e", 2: "#9a6700", 1: "#1a7f37", 0: "#57606a"}  # by severity; on white and on dark all can be read


def as_html(result: AuditResult, image_files: Mapping[str, Tensor]) -> str:
    """Return the audit as HTML without scripts, style sheets or other files; missing ``image_files`` are left out."""
    said = headline(result)
    lines = [f"<strong>{_text(said.title)}</strong>", *(_text(line) for line in (said.setting, said.tested) if line)]
    parts = [f"<p>{'<br>'.join(lines)}</p>", _table(result, image_files)]
    if result.thresholds:
        limits = "".join(f"<li>{_text(threshold_text(limit))}</li>" for limit in result.thresholds)
        parts.append(f"<ul>{limits}</ul>")
    return f'<div style="max-width:60em">{"".join(parts)}</div>'


def _table(result: AuditResult, image_files: Mapping[str, Tensor]) -> str:
    words = ["federation", "attack", "verdict", "measured"]
    words.append("true above, recovered below" if any(row.images for row in result.summaries) else "")
    head = "".join(f'<th style="text-align:left">{word}</th>' for word in words)
    rows = "".join(_row(summary, result, image_files) for summary in result.summaries)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"


def _row(summary: AttackSummary, result: AuditResult, image_files: Mapping[str, Tensor]) -> str:
    colour = _COLOURS[SEVERITY[summary.verdict]]
    cells = [
        _text(summary.federation),
        _text(summary.attack),
        f'<strong style="color:{colour}">{_text(summary.verdict)}</strong>',
        _text(_measured(summary)),
        _images(summary, result.findings, image_files),
    ]
    return "<tr>" + "".join(f'<td style="text-align:left">{cell}</td>' for cell in cells) + "</tr>"


def _measured(summary: AttackSummary) -> str:
    if summary.psnr is not None:
        rate = percent(summary.identification_rate)
        psnr = f"PSNR {number(summary.psnr.mean, 1)} dB {span(summary.psnr, 1)}".strip()
        if summary.psnr_of_tries is not None:
            psnr += f" of each one's best try, {number(summary.psnr_of_tries, 1)} dB over all tries"
        return f"{psnr}; identified {rate} of {counted(summary)}"
    if not summary.metrics:
        return summary.verdict_text
    first = summary.metrics[0]
    guess = f"; {short(first.baseline.mean)} without the attack" if first.baseline else ""
    return f"{first.name.replace('_', ' ')} {short(first.value.mean)} {span(first.value)}{guess}"


def _images(summary: AttackSummary, findings: list[FindingResult], image_files: Mapping[str, Tensor]) -> str:
    """Return the first victims, each above what was recovered of it."""
    mine = (f for f in findings if (f.attack, f.federation) == (summary.attack, summary.federation))
    best = best_tries([image for f in mine for image in f.images])
    shown = [image for image in best if {image.true_image, image.reconstruction} <= image_files.keys()][:_MOST_IMAGES]
    return "".join(
        f'<span style="display:inline-block;margin:0 2px">{_image(image_files[one.true_image], "true image")}<br>'
        f"{_image(image_files[one.reconstruction], f'recovered, {number(one.psnr, 1)} dB')}</span>"
        for one in shown
    )


def _image(pixels: Tensor, words: str) -> str:
    from PIL import Image  # here: whoever makes no page shouldn't wait for it

    array = eight_bit(pixels).permute(1, 2, 0).numpy()
    written = io.BytesIO()
    Image.fromarray(array[:, :, 0] if array.shape[2] == 1 else array).save(written, "PNG")
    data = base64.b64encode(written.getvalue()).decode()
    style = f"height:{_HEIGHT}px;image-rendering:pixelated;margin:1px 0"
    return f'<img alt="{_text(words)}" title="{_text(words)}" style="{style}" src="data:image/png;base64,{data}">'


def _text(words: str) -> str:
    return html.escape(words)
