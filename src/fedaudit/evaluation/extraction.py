"""Whether a model recites what it was trained on, and not just what anybody writes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fedaudit.attacks.text.extraction import ExtractionFinding
from fedaudit.evaluation.blind import CONFOUNDED, client_of, evaluated, none_used, told_blindly
from fedaudit.evaluation.finding_types import FINDING_TYPES, Evaluation, FindingType, Metric, done, evaluate, refused
from fedaudit.evaluation.statistics import SURE, interval
from fedaudit.evaluation.verdicts import Judgement, by_fisher, by_test, leaks, share_of
from fedaudit.modalities import NOTHING
from fedaudit.results import Chart, FindingResult, Line
from fedaudit.results.rows import ExtractionDetail, RecitedText
from fedaudit.transcript.observation import Observation
from fedaudit.transcript.queries import NOBODY
from fedaudit.transcript.truth import Truth
from fedaudit.utils.seeds import generator

_RESAMPLES = 2000
_SWAPS = 9999
_NEAR = 0.1  # of a text's rest: so many tokens may differ where it came out
_SURELY = 0.9  # probability with which a text is to come out within so many draws
_FEW_DRAWS, _MANY_DRAWS, _MOST_DRAWS = 1000, 10**6, 1e12
_MOST = 50  # texts of a finding that are kept
_COMPARED = 20_000  # other texts that are searched for a rest

EXTRACTED = Metric(
    "extracted",
    "share of the training texts that the model recites, given how they begin, but for a tenth of the tokens at most; "
    "without the attack: of texts that nobody trained on",
    ends=(0, 1),
)
VERBATIM = Metric("extracted_verbatim", "likewise word for word", ends=(0, 1))
DISCOVERABLE = Metric(
    "extracted_in_1000",
    "share that comes out word for word within 1,000 draws with a probability of 90 %, by the model's own "
    "probabilities; without the attack: of texts that nobody trained on",
    ends=(0, 1),
)
ROUGE_L = Metric(
    "rouge_l",
    "ROUGE-L: the longest common subsequence of a text's rest and what the model says (F1), of its continuations the "
    "best; without the attack: of texts that nobody trained on",
    ends=(0, 1),
)


class _Told(NamedTuple):
    """What the model says of each of n records.

    Attributes:
        nearest: (n,) which of its continuations has the fewest edits.
        edits: (n,) how many those are.
        rouge: (n,) float64 the best ROUGE-L.
        out: (n,) bool: it came out, and counts.
        draws: (n,) float64: until the rest comes out word for word; infinite where it doesn't count, too.
        common, known: (n,) bool: it would have come out, but others have it as well, or the first model had it.
    """

    nearest: Tensor
    edits: Tensor
    rouge: Tensor
    out: Tensor
    draws: Tensor
    common: Tensor
    known: Tensor

    @property
    def score(self) -> Tensor:
        """(n,) what pairs are compared by: ROUGE-L, and one more for what came out; 0 for what was known before."""
        return torch.where(self.known, 0.0, self.rouge + self.out)


def edits(wanted: Tensor, texts: Tensor, *, swap: int = 1, anywhere: bool = False) -> Tensor:
    """Return (n,) how many tokens are to be changed, left out or put in until (k,) ``wanted`` is each of (n, length).

    Args:
        swap: what a changed token counts; with 2 the longest common subsequence has (k + length − edits) / 2.
        anywhere: of each text the stretch counts that is nearest (Sellers 1980), not the whole.
    """
    places = torch.arange(texts.shape[1] + 1)
    before = (torch.zeros_like(places) if anywhere else places).expand(len(texts), -1)
    for count, token in enumerate(wanted, start=1):
        now = torch.minimum(before[:, :-1] + swap * (texts != token), before[:, 1:] + 1)
        now = torch.cat([torch.full((len(texts), 1), count), now], dim=1)
        before = (now - places).cummin(dim=1).values + places
    return before.amin(dim=1) if anywhere else before[:, -1]


@evaluate.register
def evaluate_extraction(finding: ExtractionFinding, observation: Observation, truth: Truth, *, seed: int) -> Evaluation:
    """Compare what the model says with how the texts go on, of members and of their matched non-members alike.

    A text came out where one of the continuations is its rest, but for a tenth of its tokens (Levenshtein distance).
    What anybody else has counts for nothing: a rest that stands, up to a tenth, in another client's text or in one that
    nobody trained on; nor does what the model before the first round recites: but for a tenth of the tokens in one of
    as many continuations, or word for word within 1,000 draws. The test swaps member and other within pairs at random,
    9,999 times: it is exact where nothing was learnt of the members, for it treats both alike. Where
    the words alone tell members from others, it is no leak.
    """
    own = client_of(observation)
    rows = evaluated(truth, own)
    records = observation.records
    if not len(rows) or records is None:
        return refused(finding, observation, none_used(truth, own))
    if bool(finding.logs.isnan().any()):
        return refused(finding, observation)
    members = rows[truth.owners[rows] != NOBODY]
    asked = (finding.begins[members] > 0) & (finding.begins[truth.matched[members]] > 0)
    members = members[asked]
    if not len(members):
        return refused(finding, observation, "no training text is longer than its beginning; lower the attack's prefix")
    pairs = torch.stack([members, truth.matched[members]])
    told = _told(finding, records.inputs, pairs, truth)
    trained, others = (_Told(*(part[side] for part in told)) for side in pairs)
    k, p_value = len(members), _swapped(trained.score - others.score, seed)
    blind, blind_p = told_blindly(observation, truth)
    over = interval(trained.rouge.tolist(), resamples=_RESAMPLES, seed=seed, least=0, most=1)
    counts = [EXTRACTED, VERBATIM, DISCOVERABLE]
    mine, theirs = (
        [int(side.out.sum()), int((side.out & (side.edits == 0)).sum()), int((side.draws <= _FEW_DRAWS).sum())]
        for side in (trained, others)
    )
    notes = []
    if common := int(trained.common.sum()):
        notes.append(f"{common} of {k} texts go on as others' do, and count for nothing")
    if known := int(trained.known.sum()):
        notes.append(f"{known} of {k} texts were recited before any training, and count for nothing")
    better = bool(trained.score.mean() > others.score.mean())
    leak = leaks(better, p_value) and not (blind_p is not None and blind_p <= SURE)
    result = done(
        finding,
        observation,
        notes,
        ExtractionDetail(recited=_recited(finding, told, members, observation, truth) if leak else []),
        metrics=[
            *(m.share(a, k, "texts", b / k) for m, a, b in zip(counts, mine, theirs, strict=True)),
            ROUGE_L.over(over, "texts", float(others.rouge.mean())),
            *blind,
        ],
        charts=_charts(finding, pairs, trained, others),
        blind_p_value=blind_p,
        is_leak=leak,
        p_value=p_value,
        p_value_at_best=(1 + _SWAPS * 0.5**k) / (1 + _SWAPS),
    )
    return Evaluation(result)


def _told(finding: ExtractionFinding, inputs: Tensor, pairs: Tensor, truth: Truth) -> _Told:
    """Return what the model says of the records in ``pairs``; zeros for all others."""
    n = len(inputs)
    nearest, distance = torch.zeros(2, n, dtype=torch.int64)
    rouge = torch.zeros(n, dtype=torch.float64)
    draws = draws_until(finding.logs[-1])
    near, common = torch.zeros(2, n, dtype=torch.bool)
    held_out = truth.candidates[truth.held_out()]
    marks = {tuple(row) for row in held_out.tolist()}
    known = torch.zeros_like(near)
    if bool(finding.rounds[0] == 0) and len(finding.logs) > 1:
        known = finding.greedy[0] | (draws_until(finding.logs[0]) <= _FEW_DRAWS)
    others: dict[int, Tensor] = {}
    for pair in pairs.T.tolist():
        for row in pair:
            begin, said = int(finding.begins[row]), finding.continued[row]
            end = int((said[0] != NOTHING).sum())
            rest, said = inputs[row, begin:end], said[:, begin:end]
            apart = edits(rest, said)
            nearest[row], distance[row] = apart.argmin(), apart.min()
            rouge[row] = 1 - float(edits(rest, said, swap=2).min()) / (2 * len(rest))
            most = int(_NEAR * len(rest))
            near[row] = distance[row] <= most
            if finding.before is not None and not known[row]:
                known[row] = int(edits(rest, finding.before[row, :, begin:end]).min()) <= most
            if near[row] or draws[row] <= _MANY_DRAWS:
                owner = int(truth.owners[pair[0]])
                if owner not in others:
                    others[owner] = _others(truth, owner, held_out)
                elsewhere = others[owner]
                same = torch.zeros(len(elsewhere), dtype=torch.bool)
                for one in pair:
                    if tuple(inputs[one].tolist()) in marks:
                        same |= (elsewhere == inputs[one]).all(dim=1)
                common[row] = bool((edits(rest, elsewhere[~same], anywhere=True) <= most).any())
                common[row] |= inputs[pair[0]].equal(inputs[pair[1]])
    nothing = common | known
    return _Told(nearest, distance, rouge, near & ~nothing, torch.where(nothing, torch.inf, draws), common, known)


def _others(truth: Truth, owner: int, held_out: Tensor) -> Tensor:
    """Return (m, length) the texts of all but one client, and those that nobody trained on, each once."""
    texts = [held_out, *(inputs for (_, client), inputs in truth.inputs.items() if client != owner)]
    different: Tensor = torch.cat(texts).unique(dim=0)
    chosen = torch.randperm(len(different), generator=generator(0, "other texts"))[:_COMPARED]
    return different[chosen.sort().values]


def draws_until(logs: Tensor) -> Tensor:
    """Return (n,) in how many draws what has these log-probabilities comes out once, with a probability of 90 %.

    (1 − p)^draws ≤ 1 − 0.9 (Hayes et al. 2025, Eq. 1), for a p that may be far below what 1 − p can tell from 1.
    """
    chances = logs.clamp(max=0).exp()
    draws = torch.full_like(chances, math.log(1 - _SURELY)) / torch.log1p(-chances)
    return draws.ceil().clamp(min=1)


def _swapped(differences: Tensor, seed: int) -> float:
    """Return the Monte Carlo p-value of the (k,) differences' sum, one-sided, over the signs that swaps give them."""
    rng = generator(seed, "swaps")
    signs = 1.0 - 2.0 * torch.randint(2, (_SWAPS, len(differences)), generator=rng).double()
    reached = (signs @ differences >= float(differences.sum()) - 1e-9).sum()
    return (1 + int(reached)) / (1 + _SWAPS)


def _recited(
    finding: ExtractionFinding, told: _Told, members: Tensor, observation: Observation, truth: Truth
) -> list[RecitedText]:
    """Return the training texts that came out, those first that come out soonest."""
    records, tokens = observation.records, observation.task_info.tokens
    assert records is not None
    assert tokens is not None
    gains = finding.logs.diff(dim=0).nan_to_num(nan=0.0)
    shown = members[told.out[members]].tolist()
    found = []
    for row in sorted(shown, key=lambda row: (float(told.draws[row]), int(told.edits[row])))[:_MOST]:
        text, said = records.inputs[row], finding.continued[row, int(told.nearest[row])]
        most = int(gains[:, row].argmax()) if len(gains) else 0
        next_one = len(gains) > 0 and int(finding.rounds[most + 1] - finding.rounds[most]) == 1
        begin, end, draws = int(finding.begins[row]), int((said != NOTHING).sum()), float(told.draws[row])
        found.append(
            RecitedText(
                record=row,
                client=int(truth.owners[row]),
                begin=tokens.words_of(text[:begin]),
                true=tokens.words_of(text[begin:end]),
                found=tokens.words_of(said[begin:end]),
                edits=int(told.edits[row]),
                rouge_l=float(told.rouge[row]),
                draws=draws if draws <= _MOST_DRAWS else None,
                round=int(finding.rounds[most]) if next_one else None,
            )
        )
    return found


def _charts(finding: ExtractionFinding, pairs: Tensor, trained: _Told, others: _Told) -> list[Chart]:
    powers = [float(power) for power in range(7)]
    sides = {"trained on": trained, "nobody's": others}
    lines = [
        Line(name=name, x=powers, y=[float((side.draws <= 10**power).double().mean()) for power in powers])
        for name, side in sides.items()
    ]
    charts = [
        Chart(
            title="draws until a text comes out",
            caption="The share of the texts whose rest comes out word for word within so many draws, with a "
            "probability of 90 %, by the model's own probabilities.",
            x_label="draws, as a power of ten",
            y_label="share of the texts",
            lines=lines,
        )
    ]
    if len(finding.rounds) > 1:
        rounds = [float(one) for one in finding.rounds.tolist()]
        counted = [~(side.common | side.known) for side in (trained, others)]
        shares = [
            (finding.greedy[:, rows] & count).double().mean(dim=1) for rows, count in zip(pairs, counted, strict=True)
        ]
        charts.append(
            Chart(
                title="texts recited over the rounds",
                caption="The share of the texts whose rest, word for word, is what each round's model finds likeliest.",
                x_label="round",
                y_label="share of the texts",
                lines=[Line(name=n, x=rounds, y=s.tolist()) for n, s in zip(sides, shares, strict=True)],
            )
        )
    return charts


def _verdict(findings: Sequence[FindingResult]) -> Judgement:
    """Return the verdict: "recovered" where texts came out, more of them than of others, and luck is excluded."""
    shown = {m: [one for f in findings for one in f.metrics if one.name == m.name] for m in (EXTRACTED, VERBATIM)}
    n = sum(m.n or 0 for m in shown[EXTRACTED])
    out, exact = (round(sum((m.n or 0) * m.value for m in shown[one])) for one in (EXTRACTED, VERBATIM))
    others = round(sum((m.n or 0) * (m.baseline or 0) for m in shown[EXTRACTED]))
    p, _ = by_fisher(findings)
    judged = _BY_WORDS(findings)
    text = f"{out} of {n} training texts came out, {exact} word for word; {others} of {n} that nobody trained on"
    if any(f.blind_p_value is not None and f.blind_p_value <= SURE for f in findings):
        text = f"{text}; the words alone, without any model, tell the texts that were trained on from the others"
        return judged._replace(verdict="inconclusive", text=text, headline="", advice=CONFOUNDED)
    if out <= others or p > SURE:
        return judged._replace(text=f"{text}; {judged.text}")
    test = "test by swaps within pairs"
    evidence = share_of("training texts that came out", out, n, "texts", test=test, baseline=others / n, p_value=p)
    headline = (
        f"The model recites training {{things}}: told how they begin, it went on as they do in {out} of {n}, {exact} "
        f"word for word; of as many that nobody trained on, in {others}."
    )
    return Judgement("recovered", f"{text}; p = {p:.2g}", evidence, headline)


_BY_WORDS = by_test(
    ROUGE_L.name,
    "texts",
    "bootstrap interval; test by swaps within pairs",
    "The model goes on with training {things} more as they do than with others: {share} % of the words, against "
    "{guess} %.",
)

FINDING_TYPES["extraction"] = FindingType(
    verdict=_verdict,
    rules=(
        "Texts are 'recovered' by a model that recites them: told how training texts begin, it goes on as they do, but "
        "for a tenth of the tokens, for more of them than of texts that nobody trained on, and swapping both within "
        f"pairs does as well with a probability of at most {100 * SURE:g} %. What others have as well counts for "
        "nothing, nor does what was recited before the training.",
        "They are 'inferred' when the same test excludes luck and no more came out than of others: by ROUGE-L.",
    ),
    metrics=(EXTRACTED, VERBATIM, DISCOVERABLE, ROUGE_L),
    question="have the model recite training {things}",
    control="records",
    worst="recovered",
    remedies=("fewer rounds", "more records"),
    learns=True,
)
