"""Audits of several sites on one page: a row a site, and how many sites leak what.

No verdict is pooled: sites differ in data and in effort, so a verdict stays its site's, with its interval; sites are
counted, the worst of them is named, and what came out is added up. Of whole results no more is taken than a site would
share (:mod:`fedaudit.report.share`).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from fedaudit.evaluation.finding_types import FINDING_TYPES, known_type
from fedaudit.evaluation.statistics import proportion
from fedaudit.modalities import EXAMPLE_KINDS, example_kind
from fedaudit.report import figures
from fedaudit.report.compare import open_audit
from fedaudit.report.conclusion import SEVERITY, threshold_text
from fedaudit.report.share import check_shared, shareable
from fedaudit.report.style import render
from fedaudit.report.wording import count, percent, short
from fedaudit.results import (
    LEAKS,
    AttackSummary,
    AuditResult,
    RequirementOutcome,
    RequirementRecord,
    Setting,
    Verdict,
    overall,
)
from fedaudit.utils.errors import BadInput, CorruptTranscript
from fedaudit.utils.folders import check_folder
from fedaudit.utils.integrity import file_sha256
from fedaudit.utils.version import __version__

Outcome = Literal["pass", "fail", "not tested"]
_NEIGHBOURS = {"add-remove": "add/remove", "replace": "replacement"}
_PLAIN = ("none", "mean", "fedavg")  # no defences


@dataclass(frozen=True)
class Told:
    """What a site's audit says of one kind of finding.

    Attributes:
        verdict: the worst leak, else the best-founded verdict of its attacks, over the federations in use.
        attack, federation: whose verdict it is.
        setting: diagnostic or deployment; None where that isn't known.
        what, value, low, high, n, of: the number behind it, with its 95 % interval, as in the results; None and empty
            where there is none.
    """

    kind: str
    verdict: Verdict
    attack: str
    federation: str
    setting: Setting | None
    what: str = ""
    value: float | None = None
    low: float | None = None
    high: float | None = None
    n: int | None = None
    of: str = ""


@dataclass(frozen=True)
class Limit:
    """One of a site's own limits: what came of it, and that in a line."""

    outcome: Outcome
    text: str


@dataclass(frozen=True)
class Site:
    """One site's audit: a row.

    Attributes:
        site: the name of its folder or file.
        audit: the audit's name.
        who: the adversary, as a sentence begins with it.
        told: by kind of finding.
        demonstrated, claimed: the largest ε that was demonstrated, and what is claimed where it was; None: none.
        delta: δ of both; None: there are none, or an older fedaudit didn't write it.
        unit: whom this ε protects; empty where that isn't known, or there is none.
        adjacency: ``add-remove`` or ``replace``; empty as ``unit``.
        ceilings: by unit, the most that its updates determine of its examples, over the federations in use.
        defences: names of the client-side defences and aggregators in use that are defences.
        limits: the site's own.
        outcome: of all of them; None where it set none.
        version, started: of fedaudit, and when the audit began.
        sealed: whether the file carries a digest that fits.
    """

    site: str
    audit: str
    who: str
    told: tuple[Told, ...]
    demonstrated: float | None
    claimed: float | None
    delta: float | None
    unit: str
    adjacency: str
    ceilings: dict[str, float]
    defences: tuple[str, ...]
    limits: tuple[Limit, ...]
    outcome: Outcome | None
    version: str
    started: str | None
    sealed: bool

    def of_kind(self, kind: str) -> Told | None:
        """Return what it says of a kind; None: it says nothing."""
        return next((one for one in self.told if one.kind == kind), None)

    @property
    def tried(self) -> bool:
        """Whether any attack could be run."""
        return any(one.verdict != "not applicable" for one in self.told)


@dataclass(frozen=True)
class Count:
    """Of one kind of finding, in how many sites it ended how.

    Attributes:
        question: what its attacks are after, as "can …" goes on.
        verdicts: how many sites have each.
        untold: how many say nothing of it.
        worst: the site with the worst verdict, of several the one with the largest number behind it.
        found, n, low, high: of all victims that such attacks were tried on, over two sites or more, how many came out,
            and the exact 95 % interval of that share; None where they don't come out one by one. Sites' own shares may
            differ: it is wide enough for the mean over the victims of what each would have (Hoeffding 1956).
    """

    kind: str
    question: str
    verdicts: dict[Verdict, int]
    untold: int
    worst: str
    found: int | None = None
    n: int | None = None
    low: float | None = None
    high: float | None = None

    @property
    def leaks(self) -> int:
        """In how many sites it is a leak."""
        return sum(self.verdicts.get(verdict, 0) for verdict in LEAKS)

    @property
    def tried(self) -> int:
        """In how many sites such an attack could be run."""
        return sum(n for verdict, n in self.verdicts.items() if verdict != "not applicable")


@dataclass(frozen=True)
class Asked:
    """What a text asks in one line, of all sites together.

    Attributes:
        text, id, asks: as in results.
        outcome: not met where it is at one site, met where it is at all.
        sites: by outcome, which sites.
    """

    text: str
    id: str
    asks: str
    outcome: RequirementOutcome
    sites: dict[str, list[str]]


@dataclass(frozen=True)
class Guard:
    """What a site's guard wrote down of one job, and what came of its limits."""

    whose: str
    text: str
    limits: tuple[Limit, ...]
    sent: int


@dataclass(frozen=True)
class Joined:
    """Several sites' audits together.

    Attributes:
        headline: the answer, in a sentence.
        detail: what else to say of the other sites.
        cautions: why the sites may not be of one federation, or not be what was written.
        counts: by kind of finding, the worst first.
        sites: in the order in which they were given.
        outcome: of all limits of all sites and guards: fail where one was exceeded; None where there is none.
        asked: what texts ask and one site at least met or didn't.
        guards: what sites' guards wrote down.
        together: of all sites, a line each: the worst site of each kind and what came out of all, the highest ceiling,
            the largest ε.
    """

    headline: str
    detail: str
    cautions: tuple[str, ...]
    counts: tuple[Count, ...]
    sites: tuple[Site, ...]
    outcome: Outcome | None
    asked: tuple[Asked, ...] = ()
    guards: tuple[Guard, ...] = ()
    together: tuple[str, ...] = ()

    def for_programs(self) -> dict[str, Any]:
        """Return all of it, JSON-serialisable."""
        return {"fedaudit_version": __version__, **asdict(self)}


def open_sites(paths: Sequence[Path]) -> dict[str, tuple[AuditResult, bool]]:
    """Return by the site's name what each may share, and whether its file is sealed.

    Paths are folders of audits or of shared versions, or their results.json under any name; a site has the name of its
    folder or file. BadInput: fewer than two, no audit, or two of one site or the same.
    """
    if len(paths) < 2:
        raise BadInput("give the folders of two sites' audits or more")
    found: dict[str, tuple[AuditResult, bool]] = {}
    same: dict[str, str] = {}
    for path in paths:
        result, folder = open_audit(path)
        file = path / "results.json" if path.is_dir() else path
        site = folder.resolve().name if file.name == "results.json" else file.stem
        if site in found:
            raise BadInput(f"two of the audits are of the site '{site}'; rename the folder of one, or leave it out")
        sealed = _unchanged(result, file)
        shared = shareable(result).model_copy(update={"shared": None})
        content = json.dumps(_without_times(shared.model_dump(mode="json")))  # the same audit, run again, is the same
        if content in same:
            raise BadInput(f"'{same[content]}' and '{site}' are the same audit; leave one out")
        same[content] = site
        found[site] = (shared, sealed)
    return found


def _without_times(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_times(one) for one in value]
    if not isinstance(value, dict):
        return value
    return {key: _without_times(one) for key, one in value.items() if key != "timing"}


def _unchanged(result: AuditResult, file: Path) -> bool:
    """Check what can be checked of a site's file; return whether it is sealed."""
    if result.shared is not None:
        if note := check_shared(file):
            raise CorruptTranscript(f"{note}; ask the site for it again")
        return True
    scenario = file.parent / "scenario.yaml"
    if result.digests and scenario.is_file() and file_sha256(scenario) != result.digests.scenario:
        raise CorruptTranscript(
            f"{file} and {scenario} don't belong together: one was changed, or is another audit's; audit again"
        )
    return False


def join_audits(sites: dict[str, tuple[AuditResult, bool]], guards: Sequence[Guard] = ()) -> Joined:
    """Return the audits of several sites, by their names, together; with each whether its file is sealed."""
    rows = tuple(_site(name, result, sealed) for name, (result, sealed) in sites.items())
    counts = _counts(rows, _things([result for result, _ in sites.values()]))
    guards = _covered(guards, [result for result, _ in sites.values()])
    cautions = [*_different(sites), *_incomparable(rows), *_unsealed(rows)]
    outcomes = {*(row.outcome for row in rows), *(limit.outcome for one in guards for limit in one.limits)}
    told: tuple[Outcome, ...] = ("fail", "not tested", "pass")
    return Joined(
        *_headline(rows, counts),
        tuple(cautions),
        counts,
        rows,
        next((one for one in told if one in outcomes), None),
        _asked({name: result.requirements for name, (result, _) in sites.items()}),
        tuple(guards),
        tuple(_together(rows, counts)),
    )


def _together(rows: Sequence[Site], counts: Sequence[Count]) -> Iterator[str]:
    """Yield what is to be said of all sites, a line each."""
    for one in counts:
        told = next(row.of_kind(one.kind) for row in rows if row.site == one.worst)
        if told is None or not one.tried:
            continue
        figure = figure_text(told)
        line = f"to {one.question}: worst at {one.worst}, {told.verdict}{figure and f' ({figure})'}"
        if one.found is not None and one.n and one.low is not None and one.high is not None:
            line += (
                f"; over all sites {count(one.found)} of {count(one.n)} {told.of} came out, "
                f"{percent(one.found / one.n)} [{percent(one.low)}, {percent(one.high)}]"
            )
        yield line
    for unit in dict.fromkeys(unit for row in rows for unit in row.ceilings):
        most = max((row for row in rows if unit in row.ceilings), key=lambda row: row.ceilings[unit])
        lacking = [row.site for row in rows if not row.ceilings]
        value = f"{most.ceilings[unit]:.1f} dB" if unit == "dB" else f"{percent(most.ceilings[unit])} of cells"
        unknown = f"; not computed at {', '.join(lacking)}" if lacking else ""
        yield f"the ceiling is highest at {most.site}: {value}{unknown}"
    if _incomparable(rows):
        return
    for what in ("demonstrated", "claimed"):
        found = [(value, row.site) for row in rows if (value := getattr(row, what)) is not None]
        if found:
            value, site = max(found)
            say = "says" if len(found) == 1 else "say"
            yield f"largest ε {what}: {short(value)} at {site} ({len(found)} of {len(rows)} sites {say} one)"


def _covered(guards: Sequence[Guard], results: Sequence[AuditResult]) -> list[Guard]:
    """Return the guards with a limit that isn't tested where one sent more updates than rounds were audited."""
    rounds = min((f.rounds for result in results for f in result.federations if f.name in result.in_use()), default=0)
    found = []
    for one in guards:
        were = "was" if rounds == 1 else "were"
        over = (
            f"NOT TESTED: no more rounds than were audited: {count(rounds)} {were}, and {count(one.sent)} updates left"
        )
        limits = (*one.limits, Limit("not tested", over)) if one.sent > rounds else one.limits
        found.append(replace(one, limits=limits))
    return found


def _asked(told: dict[str, list[RequirementRecord]]) -> tuple[Asked, ...]:
    """Return what became of each line at the sites, if it was met, or not met, at one of them."""
    lines = {(one.text, one.id): one for records in told.values() for one in records}
    found = []
    for key, line in lines.items():
        sites: dict[str, list[str]] = {}
        for name, records in told.items():
            said = next((one.outcome for one in records if (one.text, one.id) == key), "not tested")
            sites.setdefault(said, []).append(name)
        outcome: RequirementOutcome = "not tested"
        if "not met" in sites:
            outcome = "not met"
        elif set(sites) == {"met"}:
            outcome = "met"
        if {"met", "not met"} & set(sites):
            found.append(Asked(line.text, line.id, line.asks, outcome, sites))
    return tuple(found)


def write_joined(joined: Joined, folder: Path) -> None:
    """Write ``joined.html`` and ``joined.json`` into ``folder``, in place of those that are there."""
    check_folder(folder)
    page = render(
        "joined.html.j2",
        joined=joined,
        severity=SEVERITY,
        picture=_picture(joined),
        figure=figure_text,
    )
    values = json.dumps(joined.for_programs(), indent=2, ensure_ascii=False) + "\n"
    try:
        (folder / "joined.html").write_text(page, encoding="utf-8")
        (folder / "joined.json").write_text(values, encoding="utf-8")
    except OSError as error:
        raise BadInput(f"can't write to '{folder}': {error.strerror or error}") from None


def figure_text(told: Told) -> str:
    """Return the number behind a verdict, with its interval; empty where there is none."""
    if told.value is None:
        return ""
    form: Callable[[float | None], str] = percent if known_type(told.kind).counts else short
    span = "" if told.low is None else f" [{form(told.low)}, {form(told.high)}]"
    return f"{told.what}: {form(told.value)}{span}, n = {count(told.n or 0)} {told.of}".rstrip()


def _site(name: str, result: AuditResult, sealed: bool) -> Site:
    used = result.in_use()
    records = [f for f in result.federations if f.name in used]
    groups: dict[str, list[AttackSummary]] = {}
    for summary in result.summaries:
        if summary.federation in used and summary.kind:
            groups.setdefault(summary.kind, []).append(summary)
    demonstrated, claimed, delta, unit, adjacency = _epsilon(result, used)
    defences = dict.fromkeys(d for f in records for d in (f.client_defence, f.aggregator) if d not in _PLAIN)
    outcomes = {t.outcome for t in result.thresholds}
    return Site(
        site=name,
        audit=result.name,
        who=result.adversary.who,
        told=tuple(_told(kind, group) for kind, group in groups.items()),
        demonstrated=demonstrated,
        claimed=claimed,
        delta=delta,
        unit=unit,
        adjacency=adjacency,
        ceilings=_ceilings(result, used),
        defences=tuple(defences),
        limits=tuple(Limit(t.outcome, threshold_text(t)) for t in result.thresholds),
        outcome="fail"
        if "fail" in outcomes
        else "not tested"
        if "not tested" in outcomes
        else "pass"
        if outcomes
        else None,
        version=result.fedaudit_version,
        started=result.timing.started,
        sealed=sealed,
    )


def _told(kind: str, group: list[AttackSummary]) -> Told:
    verdict = overall(group)
    best = max((s for s in group if s.verdict == verdict), key=lambda s: s.evidence.value if s.evidence else -1.0)
    told = Told(kind, verdict, best.attack, best.federation, best.setting)
    if (e := best.evidence) is None:
        return told
    return replace(told, what=e.what, value=e.value, low=e.low, high=e.high, n=e.n, of=e.of)


_Epsilon = tuple[float | None, float | None, float | None, str, str]


def _epsilon(result: AuditResult, used: list[str]) -> _Epsilon:
    """Return an ε that was shown, a claim, their δ, whom that protects, and by which adjacency.

    A broken promise comes first, then the largest ε that was shown, then the largest that is promised.
    """
    found: list[_Epsilon] = []
    for one in (f for f in result.findings if f.federation in used):
        if e := one.epsilon:
            found.append((e.demonstrated, e.claimed, e.delta, e.unit, e.adjacency))
        if one.record_epsilon:
            bound = one.record_epsilon.bound
            found.append((bound.epsilon, one.record_epsilon.claimed, bound.delta, bound.unit, bound.adjacency))
    if not found:
        courses = [f.history for f in result.federations if f.name in used and f.history]
        most = max((c for c in courses if c.epsilon_pld is not None), key=lambda c: c.epsilon_pld or 0.0, default=None)
        if most is None:
            return None, None, None, "", ""
        return None, most.epsilon_pld, most.epsilon_delta, most.epsilon_unit or "", most.epsilon_adjacency

    def worse(one: _Epsilon) -> tuple[bool, float]:
        shown, claimed, *_ = one
        return shown is not None and claimed is not None and shown > claimed, -1.0 if shown is None else shown

    return max(found, key=worse)


def _ceilings(result: AuditResult, used: list[str]) -> dict[str, float]:
    """Return the highest ceiling by unit."""
    found: dict[str, float] = {}
    for one in result.ceilings:
        if one.federation in used and one.high is not None:
            found[one.unit] = max(one.high, found.get(one.unit, one.high))
    return found


def _things(results: Sequence[AuditResult]) -> str:
    kinds = {r.data.kind for r in results}
    only = next(iter(kinds)) if len(kinds) == 1 else None
    return example_kind(only).plural if only and only in EXAMPLE_KINDS else "examples"


def _counts(rows: Sequence[Site], things: str) -> tuple[Count, ...]:
    found = []
    for kind in dict.fromkeys(one.kind for row in rows for one in row.told):
        verdicts = Counter(one.verdict for row in rows if (one := row.of_kind(kind)))
        known = FINDING_TYPES.get(kind)
        question = known.question.replace("{things}", things) if known else f"learn what '{kind}' is after"
        told = [(row.site, one) for row in rows if (one := row.of_kind(kind))]
        worst = max(told, key=lambda t: (SEVERITY[t[1].verdict], -1.0 if t[1].value is None else t[1].value))[0]
        counted = Count(kind, question, dict(verdicts), len(rows) - verdicts.total(), worst)
        found.append(_added_up(counted, [one for _, one in told]))
    return tuple(sorted(found, key=_worst))


def _added_up(of: Count, told: Sequence[Told]) -> Count:
    """Return a count with how many victims came out over all sites, where two or more count the same."""
    shares = [(one.value, one.n) for one in told if one.value is not None and one.n]
    if not known_type(of.kind).counts or len(shares) < 2 or len({one.what for one in told if one.n}) > 1:
        return of
    found, n = sum(round(value * n) for value, n in shares), sum(n for _, n in shares)
    low, high = proportion(found, n)
    return replace(of, found=found, n=n, low=low, high=high)


def _worst(one: Count) -> tuple[int, int]:
    order: list[Verdict] = [*LEAKS, "present, not extracted", "inconclusive", "not demonstrated", "not applicable"]
    worst = min(order.index(verdict) for verdict in one.verdicts)
    return worst, -one.leaks


def _headline(rows: Sequence[Site], counts: Sequence[Count]) -> tuple[str, str]:
    whoever = {row.who for row in rows}
    who = next(iter(whoever)) if len(whoever) == 1 else "An adversary"
    who = who[0].lower() + who[1:]
    n, tried = len(rows), sum(row.tried for row in rows)
    lines = "; ".join(f"to {one.question}: {_in_words(one)}" for one in counts)
    if not tried:
        return f"No attack could be run in any of {n} sites, so they give no answer.", lines
    first = counts[0]
    if first.leaks:
        worst = next(verdict for verdict in LEAKS if first.verdicts.get(verdict))
        return f"In {_of_those(first.leaks, first.tried, n)} {who} can {first.question}; at worst: {worst}.", lines
    told = f"In {_of_those(0, tried, n)} a leak was demonstrated."
    if tried == 1:
        told = "In the only site that tried, no leak was demonstrated."
    if unsure := sum(any(one.verdict == "inconclusive" for one in row.told) for row in rows):
        told = f"In {_of_those(unsure, tried, n)} it can't be told what leaks, and no leak was demonstrated."
    more = "" if all(one.tried == tried for one in counts) else " Not every attack was tried in each."
    return f"{told}{more} This is no proof of safety.", lines


def _of_those(found: int, tried: int, n: int) -> str:
    """Return in how many sites something was found, of those that looked for it."""
    if tried == 1:
        return "the only site that tried,"
    return f"{found or 'none'} of {n} sites" if tried == n else f"{found or 'none'} of the {tried} sites that tried,"


def _in_words(one: Count) -> str:
    parts = [f"{verdict} in {n}" for verdict, n in sorted(one.verdicts.items(), key=lambda v: -SEVERITY[v[0]])]
    return ", ".join([*parts, *[f"not tried in {one.untold}"] * bool(one.untold)])


def _different(sites: dict[str, tuple[AuditResult, bool]]) -> list[str]:
    """Return a caution for each thing in which the sites differ, as those of one federation wouldn't."""
    asked: dict[str, Callable[[AuditResult], str]] = {
        "model": lambda r: f"{r.model.name} ({count(r.model.parameters)} parameters)",
        "shape of an input": lambda r: " × ".join(map(str, r.data.input_shape)),
        "algorithm": lambda r: ", ".join(sorted({f.algorithm for f in r.federations if f.name in r.in_use()})),
        "number of classes": lambda r: str(r.data.classes),
        "number of rounds": lambda r: ", ".join(sorted({str(f.rounds) for f in r.federations if f.name in r.in_use()})),
        "adversary": lambda r: r.adversary.adversary,
        "version of fedaudit": lambda r: r.fedaudit_version,
    }
    found = []
    for what, ask in asked.items():
        said: dict[str, list[str]] = {}
        for name, (result, _) in sites.items():
            said.setdefault(ask(result), []).append(name)
        if len(said) > 1:
            told = "; ".join(f"{value} in {', '.join(names)}" for value, names in said.items())
            found.append(f"sites differ in the {what}, so compare them with care: {told}")
    diagnostic = [n for n, (r, _) in sites.items() if any(s.setting == "diagnostic" for s in r.summaries)]
    if diagnostic:
        found.append(f"audits of a diagnostic show what can leak at worst, and no deployment: {', '.join(diagnostic)}")
    return found


def _incomparable(rows: Sequence[Site]) -> list[str]:
    """Return a caution where sites' ε have another δ, unit or adjacency; they are never added up."""
    said: dict[str, list[str]] = {}
    for row in rows:
        if row.demonstrated is None and row.claimed is None:
            continue
        at = "a δ that isn't told" if row.delta is None else f"δ = {row.delta:g}"
        of = f"of one {row.unit} " if row.unit else ""
        said.setdefault(f"{of}by {_NEIGHBOURS[row.adjacency]} at {at}", []).append(row.site)
    told = "; ".join(f"{value} in {', '.join(names)}" for value, names in said.items())
    return [f"sites' ε can't be compared: {told}"] if len(said) > 1 else []


def _unsealed(rows: Sequence[Site]) -> list[str]:
    names = [row.site for row in rows if not row.sealed]
    told = "no digest tells whether these results were changed (fedaudit share writes one)"
    return [f"{told}: {', '.join(names)}"] if names else []


def _picture(joined: Joined) -> str | None:
    """Return the numbers behind the first kind's verdicts, a site a row, where two sites measured the same."""
    if not joined.counts:
        return None
    told = [(site.site, one) for site in joined.sites if (one := site.of_kind(joined.counts[0].kind))]
    whats = Counter(one.what for _, one in told if one.value is not None)
    what = whats.most_common(1)[0][0] if whats else ""
    rows = [
        figures.Measured(site, one.value, one.low, one.high, one.verdict in LEAKS)
        for site, one in told
        if one.what == what and one.value is not None
    ]
    if len(rows) < 2:
        return None
    words = "; ".join(f"{site} {figure_text(one)}" for site, one in told if one.what == what)
    return figures.to_svg(figures.draw_intervals(rows, what), "joined-", f"By site: {words}.")
