"""The report package: one self-contained page, drawn from one AuditResult and nothing else."""

from __future__ import annotations

import base64
import io
import math
import re
from html.parser import HTMLParser
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fedaudit.evaluation.limits import TIME_IS_UP
from fedaudit.report import figures
from fedaudit.report.conclusion import comparison_text, headline, threshold_text
from fedaudit.report.page import write_report
from fedaudit.report.wording import duration, number, sentence
from fedaudit.results import AuditResult, Comparison, Curve, Interval, Threshold, Verdict
from fedaudit.utils.errors import BadInput, MissingData
from tests.report.report_cases import CASES, empty, refused, sample, save

VOID = {"meta", "link", "img", "br", "hr", "input", "base", "source", "col", "wbr", "area", "embed", "track"}


# ---------------------------------------------------------------- reading the page


class Page(HTMLParser):
    """The page as a reader's program sees it: every tag with its attributes, the text, and whether tags balance."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.open: list[str] = []
        self.within: dict[str, int] = {}
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len(dict(attrs)) == len(attrs), f"<{tag}> says something twice"
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.text += data + " "

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]

    @property
    def words(self) -> str:
        return " ".join(self.text.split())


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[AuditResult, str, Page, Path]]:
    made = {}
    for name, build in CASES.items():
        folder = tmp_path_factory.mktemp(name)
        result = build(folder)
        write_report(result, folder, folder / "report.html")
        html = (folder / "report.html").read_text(encoding="utf-8")
        made[name] = (result, html, Page(html), folder)
    return made


def decoded(uri: str | None) -> bytes:
    assert uri is not None
    return base64.b64decode(uri.partition(";base64,")[2], validate=True)


@pytest.mark.parametrize("case", CASES)
def test_page_stands_alone(pages: dict[str, Any], case: str) -> None:
    _, html, page, _ = pages[case]
    assert "http://" not in html
    assert "https://" not in html
    assert not {"script", "iframe", "object", "embed", "base"} & {tag for tag, _ in page.tags}
    for tag, attributes in page.tags:
        assert not [key for key in attributes if key.startswith("on")]
        for key in ("src", "srcset", "href", "xlink:href", "data", "action", "poster"):
            value = attributes.get(key)
            assert value is None or value.startswith(("data:image/png;", "data:image/jpeg;", "#")), (tag, key, value)
    assert "@import" not in html
    assert all(target.startswith("#") for target in re.findall(r"url\(([^)]*)\)", html))
    assert len(html.encode()) < 3_000_000


@pytest.mark.parametrize("case", CASES)
def test_page_is_accessible(pages: dict[str, Any], case: str) -> None:
    _, _, page, _ = pages[case]
    assert page.all("html")[0]["lang"] == "en"
    assert any(m.get("name") == "viewport" for m in page.all("meta"))
    assert len(page.all("main")) == len(page.all("h1")) == len(page.all("title")) == 1
    assert all(image["alt"] for image in page.all("img"))
    assert all(header.get("scope") in {"col", "row", "rowgroup"} for header in page.all("th"))
    assert len(page.all("caption")) == len(page.all("table"))
    assert all("aria-hidden" in svg or svg.get("aria-label") for svg in page.all("svg"))
    ids = [a["id"] for _, a in page.tags if "id" in a]
    assert len(ids) == len(set(ids))
    for _, attributes in page.tags:
        target = attributes.get("href") or "#main"
        assert target.startswith("data:") or target[1:] in ids
        assert attributes.get("aria-labelledby", ids[0]) in ids
    levels = [int(tag[1]) for tag, _ in page.tags if re.fullmatch(r"h[1-6]", tag)]
    assert levels[0] == 1
    assert all(b - a <= 1 for a, b in pairwise(levels))


@pytest.mark.parametrize("case", ["default", "lpips", "grey", "tiny", "hostile"])
def test_every_picture_is_embedded_unchanged(pages: dict[str, Any], case: str) -> None:
    result, _, page, folder = pages[case]
    shown = {decoded(image["src"]) for image in page.all("img")}
    named = {name for f in result.findings for i in f.images for name in (i.true_image, i.reconstruction)}
    assert named
    assert shown == {(folder / name).read_bytes() for name in named}
    assert all(image["class"] == "pixels" for image in page.all("img"))


def test_large_pictures_are_embedded_as_small_copies(pages: dict[str, Any]) -> None:
    result, _, page, folder = pages["large"]
    names = {name for f in result.findings for i in f.images for name in (i.true_image, i.reconstruction)}
    originals = [np.asarray(Image.open(folder / name), dtype=float) for name in names]
    for image in page.all("img"):
        copy = np.asarray(Image.open(io.BytesIO(decoded(image["src"]))), dtype=float)
        assert copy.shape == (224, 224, 3)
        assert min(float(np.abs(copy - original).mean()) for original in originals) < 10
        assert "class" not in image
    assert "shown as JPEG copies" in page.words
    assert "JPEG" not in pages["default"][2].words


def test_alt_texts_and_captions_say_what_was_found(pages: dict[str, Any]) -> None:
    result, _, page, _ = pages["default"]
    alts = [image["alt"] or "" for image in page.all("img")]
    for finding in result.findings:
        for image in finding.images:
            wording = "identified" if image.rank == 1 else "not identified"
            text = f"by {finding.attack}: PSNR {image.psnr:.1f} dB, {wording}: rank {image.rank} of 1,024."
            assert any(alt.endswith(text) for alt in alts)
            assert f"{finding.attack} {image.psnr:.1f} dB {wording}: rank {image.rank} of 1,024" in page.words
    assert "True image of victim 1, “astronaut”." in alts
    assert "label taken for “rocket”" in page.words


def test_a_victim_is_one_row_even_when_every_attack_has_its_own_copy(tmp_path: Path) -> None:
    result = sample(tmp_path, curve=False)
    for finding in result.findings:
        for image in finding.images:
            copy = image.true_image.replace("true", f"true-{finding.attack}")
            (tmp_path / copy).write_bytes((tmp_path / image.true_image).read_bytes())
            image.true_image = copy
    write_report(result, tmp_path, tmp_path / "report.html")
    page = Page((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert sum(li.get("class") == "victim" for li in page.all("li")) == 8


def test_equal_pictures_in_one_update_stay_two_victims(tmp_path: Path) -> None:
    result = sample(tmp_path, per_update=(2, 1), updates=(1, 1), curve=False)
    for finding in result.findings[:2]:
        (tmp_path / finding.images[1].true_image).write_bytes((tmp_path / finding.images[0].true_image).read_bytes())
    write_report(result, tmp_path, tmp_path / "report.html")
    page = Page((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert sum(li.get("class") == "victim" for li in page.all("li")) == 3


def test_many_victims_are_cut_and_counted(pages: dict[str, Any]) -> None:
    _, _, page, _ = pages["many"]
    assert sum(li.get("class") == "victim" for li in page.all("li")) == 16 + 4
    assert "184 more images" in page.words
    assert "more images of this federation" not in pages["default"][2].words


def test_names_are_escaped(pages: dict[str, Any]) -> None:
    _, html, page, _ = pages["hostile"]
    assert "<script" not in html
    assert "<script>alert('x')</script>" in page.words


def test_table_holds_every_summary(pages: dict[str, Any]) -> None:
    for case in ("default", "lpips"):
        result, _, page, _ = pages[case]
        for s in result.summaries:
            assert (
                "Could not be run: why" if s.verdict == "not applicable" else s.verdict_text
            ) in page.words or s.psnr
            for value, digits in ((s.psnr, 1), (s.ssim, 2), (s.lpips, 2)):
                if value:
                    low, mean, high = (f"{v:.{digits}f}" for v in (value.low, value.mean, value.high))
                    assert f"{mean} [{low}, {high}]" in page.words
            assert s.verdict in page.words
    assert "not measured" in pages["default"][2].words
    assert "The trunk's weights are not on this machine." in pages["default"][2].words
    assert "not measured" not in pages["lpips"][2].words


def test_thresholds_are_prominent(pages: dict[str, Any]) -> None:
    _, html, page, _ = pages["exceeded"]
    broken = "FAIL: PSNR at most 20 dB: agic on fedsgd reached 29.41 dB"
    assert html.index('class="alarm"') < html.index('class="cards"')
    assert page.words.index("A limit is exceeded") < page.words.index(broken) < page.words.index("Images")
    assert "PASS: SSIM at most 0.99: agic on fedsgd reached 0.95" in page.words
    assert "NOT TESTED: lpips at most 0.5" in page.words
    assert "fedaudit audit scenario.yaml --out DIR --fail-above psnr=20" in page.words
    assert 'class="alarm"' not in pages["default"][1]


def test_reasons_settings_and_scenario_are_told(pages: dict[str, Any]) -> None:
    result, _, page, _ = pages["default"]
    reason = result.findings[-1].reason
    assert reason is not None
    assert f"dlg-adam on fedavg-4: {reason[0].upper()}{reason[1:]}." in page.words
    told = [*result.verdict_rules, *result.out_of_scope, *result.adversary.knows, *result.adversary.does_not_know]
    told = [text[1:] for text in told]  # the page begins each with a capital
    told += [a.paper for a in result.attacks] + list(result.environment.values())
    assert [text for text in told if text not in page.words] == []
    assert "seed: 0" in page.words
    assert page.words.count("band: from the lowest to the highest update") == 2
    assert page.words.count("on the one update attacked") == 2
    assert "ran in eval mode" in page.words
    assert "3 min 32 s, with 2 workers" in page.words


@pytest.mark.parametrize(("mode", "sentence"), [("train", "ran in train mode"), ("none", "has no BatchNorm")])
def test_batch_norm_is_explained(tmp_path: Path, mode: str, sentence: str) -> None:
    result = sample(tmp_path, curve=False)
    result = result.model_copy(update={"model": result.model.model_copy(update={"batch_norm": mode})})
    write_report(result, tmp_path, tmp_path / "report.html")
    words = Page((tmp_path / "report.html").read_text(encoding="utf-8")).words
    assert sentence in words
    assert "mostly fail with BatchNorm in train mode" in words


def test_what_was_not_tested_is_folded_beyond_the_first_few(tmp_path: Path) -> None:
    result = sample(tmp_path).model_copy(update={"out_of_scope": [f"question {i}" for i in range(9)]})
    write_report(result, tmp_path, tmp_path / "report.html")
    html = (tmp_path / "report.html").read_text()
    part = html[html.index('id="limits"') :]
    plain, _, folded = part.partition("<summary>5 more that were not tested</summary>")
    assert [i for i in range(9) if f"Question {i}" in plain] == [0, 1, 2, 3]
    assert [i for i in range(9) if f"Question {i}" in folded.partition("</details>")[0]] == [4, 5, 6, 7, 8]


def test_limits_that_are_folded_on_a_screen_are_on_paper(pages: dict[str, Any]) -> None:
    html = pages["default"][1]
    part = html[html.index('id="limits"') :].partition("</section>")[0]
    assert "How verdicts are reached" in part
    assert part.count("<details") == part.count('<details class="told"')
    paper = html.partition("@media print")[2].partition("</style>")[0]
    assert "details.told::details-content { content-visibility: visible; }" in paper


def test_same_result_same_page(pages: dict[str, Any], tmp_path: Path) -> None:
    result, html, _, folder = pages["default"]
    write_report(AuditResult.model_validate_json(result.model_dump_json()), folder, tmp_path / "again.html")
    assert (tmp_path / "again.html").read_text(encoding="utf-8") == html


# ---------------------------------------------------------------- words


def summaries_with(folder: Path, *verdicts: Verdict) -> AuditResult:
    result = sample(folder)
    changed = [s.model_copy(update={"verdict": v}) for s, v in zip(result.summaries[::2], verdicts, strict=False)]
    return result.model_copy(update={"summaries": changed})


def test_headline_follows_the_worst_verdict(tmp_path: Path) -> None:
    worst = headline(summaries_with(tmp_path, "not demonstrated", "recovered"))
    assert worst.verdict == "recovered"
    assert worst.title.startswith("The server, by invg: recovered.")
    assert "weight updates over" in worst.tested
    assert worst.detail == "Elsewhere: fedsgd (gradient updates): images not demonstrated."
    single = headline(summaries_with(tmp_path, "identifiable", "not applicable"))
    assert (single.verdict, single.detail) == ("identifiable", "")
    still_open = headline(summaries_with(tmp_path, "not demonstrated", "inconclusive"))
    assert still_open.verdict == "inconclusive"  # what is safe elsewhere doesn't close it
    for result in (still_open, headline(summaries_with(tmp_path, "not demonstrated", "not demonstrated"))):
        assert "no proof of safety" in result.detail
    assert headline(summaries_with(tmp_path, "not applicable")).title.startswith("No attack could be run")
    none = refused(tmp_path)
    assert "Every attack was refused" in headline(none).detail
    late = [f.model_copy(update={"reason": TIME_IS_UP}) for f in none.findings]
    assert "1 runs of attacks weren't done" in headline(none.model_copy(update={"findings": late})).detail
    assert "named no attack" in headline(empty(tmp_path)).detail


def test_headline_names_the_adversary(tmp_path: Path) -> None:
    result = sample(tmp_path)
    for name, who in {"eavesdropper": "An eavesdropper", "client": "Another client", "x": "The adversary (x)"}.items():
        adversary = result.adversary.model_copy(update={"adversary": name})
        assert headline(result.model_copy(update={"adversary": adversary})).title.startswith(who)


def test_comparisons_in_words() -> None:
    def told(outcome: str, mean: float, low: float, high: float, n: int = 4) -> str:
        difference = Interval(mean=mean, median=mean, low=low, high=high, n=n)
        fields = {"federation": "f", "metric": "psnr", "a": "agic", "b": "invg", "outcome": outcome}
        return comparison_text(Comparison.model_validate(fields | {"difference": difference}))

    assert told("a is better", 3.1, 1.2, 4.9) == "agic recovers better images than invg: +3.1 dB [+1.2, +4.9], n = 4"
    assert told("b is better", -3.1, -4.9, -1.2) == "invg recovers better images than agic: +3.1 dB [+1.2, +4.9], n = 4"
    assert told("undecided", -0.5, -1.5, 0.5) == "agic and invg cannot be told apart: −0.5 dB [−1.5, +0.5], n = 4"
    assert (
        told("undecided", -0.5, -0.5, -0.5, n=1)
        == "agic and invg cannot be told apart by a single pair: −0.5 dB, n = 1"
    )


def test_numbers_in_words() -> None:
    assert number(-1234.56, 1) == "−1,234.6"
    assert number(None, 1) == number(math.nan, 1) == "–"
    spans = [0.42, 9.99, 52.4, 59.7, 200.0, 7500.0]
    assert [duration(s) for s in spans] == ["0.4 s", "10.0 s", "52 s", "1 min 0 s", "3 min 20 s", "2 h 5 min"]
    kept = Threshold(metric="psnr", limit=20, worst=18.5, where="agic on fedsgd", exceeded=False, outcome="pass")
    rate = Threshold(
        metric="label_accuracy", limit=0.5, worst=0.75, where="agic on fedsgd", exceeded=True, outcome="fail"
    )
    assert threshold_text(rate) == "FAIL: label accuracy at most 0.5: agic on fedsgd reached 0.75"
    assert [sentence(t) for t in ("none of 4", "Two.", "", " was it? ")] == ["None of 4.", "Two.", "", "Was it?"]
    assert threshold_text(kept) == "PASS: PSNR at most 20 dB: agic on fedsgd reached 18.50 dB"


# ---------------------------------------------------------------- figures


@pytest.mark.parametrize("quantity", ["objective", "psnr"])
def test_curves_plot_the_findings(tmp_path: Path, quantity: figures.Quantity) -> None:
    result = sample(tmp_path)
    series = figures.curve_series(result, "fedsgd", quantity)
    axes = figures.draw_curves(series, quantity).axes[0]
    lines = {str(line.get_label()): line for line in axes.get_lines()}
    assert list(lines) == ["invg", "agic"]
    for attack, line in lines.items():
        curves = [f.curve for f in result.findings if f.attack == attack and f.federation == "fedsgd" and f.curve]
        values = np.array([getattr(c, quantity) for c in curves])
        assert len(curves) == 4
        np.testing.assert_array_equal(np.asarray(line.get_xdata()), curves[0].iterations)
        np.testing.assert_allclose(np.asarray(line.get_ydata()), values.mean(0), rtol=1e-12)
        drawn = next(s for s in series if s.attack == attack)
        np.testing.assert_array_equal(drawn.low, values.min(0))
        np.testing.assert_array_equal(drawn.high, values.max(0))
    assert axes.get_xlabel() == "iterations"
    assert axes.get_ylabel() == figures.AXIS_LABELS[quantity]
    styles = {(str(x.get_color()), str(x.get_linestyle()), str(x.get_marker())) for x in lines.values()}
    assert len({s[0] for s in styles}) == len({s[1] for s in styles}) == len({s[2] for s in styles}) == 2


def test_curves_of_unlike_lengths_meet_where_they_share_iterations(tmp_path: Path) -> None:
    result = sample(tmp_path)
    mine = [f for f in result.findings if f.attack == "agic" and f.federation == "fedsgd"]
    mine[0].curve = Curve(iterations=[0, 10, 20], objective=[4.0, math.inf, 1.0], psnr=[5, 6, 7])
    for other in mine[1:]:
        other.curve = Curve(iterations=[0, 5, 10, 20, 30], objective=[2.0, 2, 2, 1, 1], psnr=[5, 5, 9, 10, 11])
    objective = figures.curve_series(result, "fedsgd", "objective")[1]
    assert objective.iterations == [0, 10, 20]
    assert objective.mean == [2.5, 2.0, 1.0]
    assert figures.curve_series(result, "fedsgd", "psnr")[1].mean == [5, 8.25, 9.25]
    mine[0].curve = Curve(iterations=[7], objective=[1.0], psnr=[5.0])
    assert [s.attack for s in figures.curve_series(result, "fedsgd", "psnr")] == ["invg"]


def test_spread_plots_every_picture(tmp_path: Path) -> None:
    result = sample(tmp_path)
    rows = figures.spreads(result, "fedavg-4")
    axes = figures.draw_spread(rows).axes[0]
    assert [t.get_text() for t in axes.get_yticklabels()] == ["invg", "agic"]
    drawn = [sorted(np.asarray(line.get_xdata(), dtype=float)) for line in axes.get_lines()]
    for row, summary in zip(rows, result.summaries[2:4], strict=True):
        images = [
            i.psnr for f in result.findings if f.attack == row.attack and f.federation == "fedavg-4" for i in f.images
        ]
        assert summary.psnr is not None
        assert len(images) == 4
        assert sorted(images) in drawn
        assert [summary.psnr.low, summary.psnr.high] in drawn
        assert [summary.psnr.mean] in drawn


def test_figures_follow_the_colour_scheme(pages: dict[str, Any]) -> None:
    _, html, page, _ = pages["default"]
    plots = re.findall(r"<svg [^>]*class=\"plot\".*?</svg>", html, re.DOTALL)
    assert len(plots) == 2 * (2 + 2 + 1)
    assert all("var(--series-1)" in p or "var(--series-2)" in p for p in plots)
    assert not re.search(r"#fe0[0-9a-f]{3}|<metadata|<style|xmlns", "".join(plots))
    assert any(
        "PSNR in dB against iterations on fedsgd: invg from 7.0" in (s.get("aria-label") or "") for s in page.all("svg")
    )


def test_more_attacks_than_colours_still_differ() -> None:
    looks = {figures.to_svg(figures.draw_swatch(style), "", None) for style in range(12)}
    assert len(looks) == 12


# ---------------------------------------------------------------- colours


def luminance(colour: str) -> float:
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_contrast_is_enough_in_both_schemes() -> None:
    css = (resources.files("fedaudit.report") / "templates" / "report.css").read_text(encoding="utf-8")
    light, dark = (
        dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", block)) for block in re.findall(r":root \{.*?\}", css, re.DOTALL)
    )
    assert light.keys() == dark.keys()
    text = [(ink, paper) for ink in ("ink", "muted", "link", "red-ink") for paper in ("paper", "raised")]
    text += [(f"{tone}-ink", f"{tone}-paper") for tone in ("red", "amber", "blue", "grey")]
    shapes = [(name, "paper") for name in light if name.startswith("series-") or name.endswith("-line")]
    for scheme in (light, dark):
        for pairs, least in ((text, 4.5), (shapes, 3.0)):
            for front, back in pairs:
                a, b = sorted((luminance(scheme[front]), luminance(scheme[back])))
                assert (b + 0.05) / (a + 0.05) >= least, (front, back)


# ---------------------------------------------------------------- bad input


def test_bad_pictures_are_one_line_errors(tmp_path: Path) -> None:
    result = sample(tmp_path / "a")
    victim = tmp_path / "a" / result.findings[0].images[0].true_image
    buffer = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (200, 200, 3), dtype=np.uint8)).save(buffer, "PNG")
    torn = buffer.getvalue()
    for data in (b"GIF89a" + bytes(40), b"", torn[:16] + bytes(40), torn[: len(torn) // 2]):
        victim.write_bytes(data)
        with pytest.raises(BadInput, match="is no whole PNG"):
            write_report(result, tmp_path / "a", tmp_path / "report.html")
    victim.unlink()
    with pytest.raises(MissingData, match="beside results"):
        write_report(result, tmp_path / "a", tmp_path / "report.html")
    save(tmp_path / "secret.png", np.zeros((4, 4)))
    result.findings[0].images[0].true_image = "../secret.png"
    with pytest.raises(BadInput, match="lies outside"):
        write_report(result, tmp_path / "a", tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()


def test_unknown_federation_is_refused(tmp_path: Path) -> None:
    result = sample(tmp_path)
    result.findings[0].federation = "elsewhere"
    with pytest.raises(BadInput, match="'elsewhere'"):
        write_report(result, tmp_path, tmp_path / "report.html")
