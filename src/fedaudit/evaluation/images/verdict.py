"""What an attack's images show together: visible ones, identified and named ones, and whether luck explains them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from scipy.stats import binom, poisson_binom

from fedaudit.evaluation.shift import REMEDY, SHIFTED
from fedaudit.evaluation.statistics import DOUBT, SURE, combined
from fedaudit.evaluation.verdicts import Judgement, share_of
from fedaudit.results import FindingResult, ImageResult, Look, NamedSummary, RegisteredResult

VISIBLE_SSIM = 0.5
VISIBLE_CORRELATION = 0.8  # of signals: two thirds of the variance are explained
NEARER_DB = 6.0  # by which one image alone is nearer than to any other candidate, at least, for it to be no luck
# Of other pictures that are nearest to a victim, one in e at most is nearer than to any other candidate by as many dB
# more. Of 400 portraits of 40 people (AT&T), whose margins were the widest that were measured, 10 % are ahead by 4.5 dB
# and 1 % by 8.8, where this says 5.8 and 11.5; of digits and clothes by half as much, of CIFAR-10 by a fifth.
NEARER_BY_LUCK_DB = 2.5
ALONE_DB = 10.0  # above an even image, where there is no other candidate, or above the mean one, where there are few
_FROM_SUMS = 1e-9  # probabilities below are added up, for one minus the others' sum has too few digits
AS_OFTEN = 0.1  # luck names a victim at least so often where its margin is no more than others': candidates may show it
ENOUGH = 40  # different candidates, of which to be the nearest one by far is no luck; of fewer see ALONE_DB
# Shares of the level of 1 %, for images as they are and for what is tried after that.
_LEVELS = {"": 0.8, " after the best shift and flip": 0.1, " after the best turn, contrast and brightness": 0.05}
_TEST = "one-sided exact test (Poisson binomial) against naming candidates of the class at random"
_OF_NAMES = 0.05 / 2  # each, for names by pattern and by an embedding
LOOKS: tuple[Look, ...] = ("pixel", "pattern", "embedding")
_INCLUDED = dict(
    zip(_LEVELS, ("", ", shifted or mirrored ones included", ", dark, turned or negative ones included"), strict=True)
)


def visible(image: ImageResult | RegisteredResult) -> bool:
    """Return whether an image came out visibly, as it is or after its best move: see the rules of its finding type."""
    likeness, least = (image.ssim, VISIBLE_SSIM) if image.ssim is not None else (image.correlation, VISIBLE_CORRELATION)
    return image.rank == 1 and likeness is not None and likeness >= least and image.psnr > image.psnr_mean_image


def margin(image: ImageResult | RegisteredResult) -> float:
    """Return by how many dB an image that came out visibly is nearer to its victim than to any other candidate, or 0.

    Where there is no other: than an even or the mean image, less what that must be worse by anyway.
    """
    other = image.psnr_nearest_other
    least = image.psnr_mean_image + ALONE_DB - NEARER_DB if other is None else other
    return max(0.0, image.psnr - least) if visible(image) else 0.0


def _by_margins(ahead: Sequence[float], chances: Sequence[float]) -> float:
    """Return the probability that other pictures come as much nearer to their victims than to any other candidate.

    Each victim's is its chance of being named times that of such a margin. Half of the level is the nearest one's, if
    that is ahead by 6 dB; the other half is the smallest's of the binomial tests whether as many as two, three, … are.
    """
    each = sorted(c * float(np.exp(-a / NEARER_BY_LUCK_DB)) if a else 1.0 for a, c in zip(ahead, chances, strict=True))
    n = len(each)
    tails = binom.sf(np.arange(n), n, np.minimum(each, 1.0))  # that so many are as far ahead as the last of them
    alone = float(tails[0]) if max(ahead) >= NEARER_DB else 1.0
    return alone if n == 1 else min(1.0, 2 * min(alone, (n - 1) * float(tails[1:].min())))


def elsewhere(image: ImageResult) -> bool:
    """Return whether an image is as plainly one other candidate as an unmistakable one is its own victim."""
    return image.rank > 1 and image.distractor_margin_db >= NEARER_DB


def verdict_of(images: Sequence[ImageResult], things: str = "images", shifted: bool = False) -> Judgement:
    """Return the judgement on an attack's images, which a text calls ``things``, by the rules of its finding type.

    ``shifted``: held-out examples couldn't serve for some update.
    """
    tried: list[Callable[[ImageResult], RegisteredResult | None]] = [lambda _: None, _moved, _in_another_tone]
    judged = [
        _judged(images, moved, how, level, things, shifted)
        for moved, (how, level) in zip(tried, _LEVELS.items(), strict=True)
        if not how or any(moved(image) for image in images)
    ]
    judged += [judgement for look in LOOKS[1:] if (judgement := _by_names(images, look, things))]
    order = ("recovered", "identifiable", "inconclusive", "not demonstrated")
    return min(judged, key=lambda judgement: order.index(judgement.verdict))  # of equal ones the first


def _moved(image: ImageResult) -> RegisteredResult | None:
    return image.registered if image.registered and image.registered.rank else None


def _in_another_tone(image: ImageResult) -> RegisteredResult | None:
    return image.tone_aligned


def _judged(
    images: Sequence[ImageResult],
    moved: Callable[[ImageResult], RegisteredResult | None],
    how: str,
    level: float,
    things: str,
    shifted: bool,
) -> Judgement:
    """Return the judgement on the victims by their images as they are, or by what these are once they are moved, too.

    A victim counts once, and came out where one of its images did: each update or round is another try, so the chances
    of all are added up. With moves an image has two ways to be identified, and so has chance.
    """
    victims = _by_victim(images)
    best = [[way for i in of for way in (i, moved(i)) if way is not None] for of in victims]
    n, twice, candidates = len(victims), 2 if how else 1, fewest_candidates(images)
    seen, identified = (sum(any(test(w) for w in ways) for ways in best) for test in (visible, lambda w: w.rank == 1))
    chances = [min(1.0, twice * sum(_chance(image) for image in of)) for of in victims]
    grouped = max((image.alike_candidates or 1 for of in victims for image in of), default=1)
    often = max(AS_OFTEN, 1 / grouped if grouped > 1 else 0.0)
    again = [max(chance, min(1.0, twice * often)) for chance in chances]
    usual = [w.as_far_by_luck for ways in best for w in ways if w.rank == 1 and w.as_far_by_luck is not None]
    far_ahead = 1.0
    if usual:
        lone = [min((w.as_far_by_luck or 1.0 for w in ways if w.rank == 1), default=1.0) for ways in best]
        far_ahead = combined([min(1.0, twice * luck) for luck in lone])

    def by_luck_of(count: int) -> float:
        """Return the p-value of naming as many; where margins say no more, as if candidates were like the victims."""
        alike = min(_at_least(count, again), far_ahead) if usual else 0.0
        return min(1.0, max(_at_least(count, chances), alike) / level)

    p, p_seen = by_luck_of(identified), by_luck_of(seen)
    far = 0.0 if candidates >= ENOUGH else ALONE_DB  # of few candidates one may be far from the others by chance
    ahead = [max((margin(w) for w in ways if w.psnr >= w.psnr_mean_image + far), default=0.0) for ways in best]
    p_ahead = _by_margins(ahead, again if usual else chances)
    plain = p_ahead <= SURE and not any(elsewhere(image) for image in images)
    recovered = seen > 0 and (p_seen <= SURE or plain)
    counted, what = (seen, "came out visibly") if recovered else (identified, "identified among the candidates")
    luck: dict[str, Any] = {} if recovered else {"baseline": sum(chances) / n, "p_value": p, "test": _TEST}
    evidence = share_of(f"{things} {what}{how}", counted, n, things, **luck)
    which = f"{identified} of {n} identified among {candidates} candidates (by luck with p = {p:.2g})"
    if recovered and p_seen > SURE:
        which += f", nearer than any other by up to {max(ahead):.3g} dB (by luck with p = {p_ahead:.2g})"
    visibly = sum(any(visible(w) for w in (i, moved(i)) if w) for i in images)
    tries = f" (in {visibly} of {len(images)} tries)" if len(images) > n else ""
    text = f"{seen} of {n} {things.removesuffix('s') if n == 1 else things} came out visibly{how}{tries}; {which}"
    if recovered:
        headline = f"{{who}} can reconstruct training {{things}}: {seen} of {n} came out visibly{_INCLUDED[how]}."
        return Judgement("recovered", text, evidence, headline)
    if identified and p <= SURE:
        by_pattern = sum(any(i.rank_pattern in (None, 1) for i in of) for of in victims)
        alone = (
            ""
            if how or _at_least(by_pattern, chances) / level <= SURE
            else ", by colours, brightness and contrast alone"
        )
        headline = (
            f"{{who}} can tell which {{things}} a client trained on, out of {candidates} candidates, though none came "
            f"out visibly: {identified} of {n} were singled out{how}{alone}."
        )
        return Judgement("identifiable", text + alone, evidence, headline)
    if shifted and identified:
        return Judgement("inconclusive", text, evidence, advice=REMEDY)
    if seen or (identified and (p <= DOUBT or identified == n)):
        more = f"attack more {things}" if candidates > 2 * n else f"attack more {things}, or give more candidates"
        advice = f"{more}: {n} among {candidates} candidates are too few to exclude luck"
        return Judgement("inconclusive", text, evidence, advice=advice)
    return Judgement("not demonstrated", text, evidence)


def names(images: Sequence[ImageResult], look: Look, often: float = 0.0) -> NamedSummary | None:
    """Return how many victims one look named, by luck ``often`` at least; None where that wasn't asked of any."""
    asked = [[i.named for i in of if i.named and getattr(i.named, look)] for of in _by_victim(images)]
    asked = [of for of in asked if of]
    if not asked:
        return None
    chances = [min(1.0, max(often, sum(one.chance_level for one in of))) for of in asked]
    count = sum(any(getattr(one, look) == 1 for one in of) for of in asked)
    of, candidates = asked[0][0].of, min(one.candidates for of in asked for one in of)
    found = {"named": count, "victims": len(asked), "candidates": candidates, "by_luck": sum(chances)}
    luck = _at_least(count, chances)
    if of == "person":  # several victims may be one person's, and named together: Markov's bound holds even so
        luck = min(1.0, sum(chances) / count) if count else 1.0
    return NamedSummary(by=look, of=of, **found, p_value=luck)


def names_in_words(found: Sequence[NamedSummary]) -> str:
    """Return how often reconstructions name the right one, and what luck does; nothing where nobody asked."""
    if not found:
        return ""
    n, by = found[0].victims, ", ".join(f"{one.named} by {one.by}" for one in found)
    luck = "" if min(one.p_value for one in found) * len(found) <= SURE else ", so it may be luck"
    least = found[0].candidates
    who = f"the right person of {least}" if found[0].of == "person" else f"the right one of {least} with its label"
    return f"names {who} in {by} of {n}; chance {found[0].by_luck:.2g} of {n}{luck}"


def _by_names(images: Sequence[ImageResult], look: Look, things: str) -> Judgement | None:
    """Return the judgement by what one look names, if that is no luck: one in ten may look like a victim anyway."""
    grouped = max((image.alike_candidates or 1 for image in images), default=1)
    found = names(images, look, max(AS_OFTEN, 1 / grouped if grouped > 1 else 0.0))
    if found is None or (p := min(1.0, found.p_value / _OF_NAMES)) > SURE:
        return None
    n, which = found.victims, "whose" if found.of == "person" else "which"
    how, among = f"named by {look}", f"out of {found.candidates} {found.of}s"
    luck: dict[str, Any] = {"baseline": found.by_luck / n, "p_value": p, "test": _TEST}
    headline = f"{{who}} can tell {which} {{things}} a client trained on, {among}: {found.named} of {n} were {how}."
    text = f"{found.named} of {n} {how}, {among} (by luck with p = {p:.2g})"
    return Judgement("identifiable", text, share_of(f"{things} {how}", found.named, n, things, **luck), headline)


def _by_victim(images: Sequence[ImageResult]) -> list[list[ImageResult]]:
    """Return the images of each victim; a result that doesn't name its victim is a victim of its own."""
    groups: dict[str | int, list[ImageResult]] = {}
    for i, image in enumerate(images):
        groups.setdefault(image.victim or i, []).append(image)
    return list(groups.values())


def best_tries(images: Sequence[ImageResult]) -> list[ImageResult]:
    """Return the image by which each victim counts and is scored: of several tries the best by the verdicts' rules.

    The one that came out visibly, else that was identified, else that came out visibly after a move or in another tone;
    of equals the nearest.
    """
    return [max(of, key=_how_well) for of in _by_victim(images)]


def _how_well(image: ImageResult) -> tuple[bool, bool, bool, float]:
    changed = [way for way in (_moved(image), _in_another_tone(image)) if way is not None]
    return visible(image), image.rank == 1, any(map(visible, changed)), image.psnr


def fewest_candidates(images: Sequence[ImageResult]) -> int:
    """Return among how many different candidates an image was sought, at least; equal ones count once."""
    return max(1, min(i.candidates if i.different_candidates is None else i.different_candidates for i in images))


def _at_least(identified: int, chances: Sequence[float]) -> float:
    """Return the probability that at least as many victims are identified by naming candidates at random.

    Exact, whatever each one's own chance (Poisson binomial). Equal candidates are one: anything identifies an image
    among 20 equal ones.
    """
    if not identified:
        return 1.0
    luck = poisson_binom(np.asarray(chances))
    p = luck.sf(identified - 1)
    if p < _FROM_SUMS:
        p = luck.pmf(np.arange(identified, len(chances) + 1)).sum()
    return float(np.clip(p, 0.0, 1.0))


def _chance(image: ImageResult) -> float:
    return 1 / fewest_candidates([image]) if image.chance_level is None else image.chance_level


def with_certified(findings: Sequence[FindingResult]) -> Judgement:
    """Return the judgement on all images, with what the attack vouched for and whether the truth agrees."""
    things = findings[0].example_noun if findings else "images"
    shifted = any((finding.blind_p_value or 1.0) <= SHIFTED for finding in findings)
    judged = verdict_of([image for finding in findings for image in finding.images], things, shifted)
    vouched = [finding for finding in findings if finding.certified is not None]
    if not vouched:
        return judged
    count = sum(finding.certified or 0 for finding in vouched)
    wrong = sum(finding.certified_wrong or 0 for finding in vouched)
    told = f"{count} of {sum(len(f.images) for f in vouched)} certified as exact without the truth"
    if wrong:
        text = f"{judged.text}; {told}, of which {wrong} ARE WRONG: the certificate failed, please report this"
        return judged._replace(text=text, headline=f"{judged.headline} {wrong} certified {things} are WRONG.".strip())
    text = f"{judged.text}; {told}" + (", and the truth agrees" if count else "")
    known = f" It can prove {count} of them exact." if count else ""
    return judged._replace(text=text, headline=judged.headline + known if judged.headline else "")
