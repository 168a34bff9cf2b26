"""Text that is drawn, not read: short notes of a made-up clinic, by a small grammar, word by word.

Nobody's words: the sentences are drawn from lists that stand here, always the same for one seed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from fedaudit.data import Dataset, Layout, Request, add_dataset

PADDING, END = "<pad>", "<end>"
LENGTH = 17  # words of a note, at most, with its end
_TRAIN, _TEST = 4000, 1000


def _listed(words: str) -> list[str]:
    return words.split()


_NAMES = _listed(
    "ada amir anna bela ben boris carla chen clara dario david dina elif emil erik eva fatma felix fiona georg gita "
    "hana hugo ida igor ines ivan jana jonas julia kai karim lara lena leo lin lucia malik mara marco mina nadia nils "
    "noah nora olga omar otto paula pedro petra quinn rafael rosa ruth samir sara selma sven tara tom ugo vera "
    "viktor wanda yusuf zoe"
)
_DAYS = _listed("monday tuesday wednesday thursday friday saturday sunday yesterday")
_AGES = [str(age) for age in range(18, 90)]
_DOSES = [f"{dose} mg" for dose in (5, 10, 20, 25, 40, 50, 75, 80, 100, 150, 200, 250, 400, 500, 850)]
_STRENGTH = _listed("mild severe sudden recurring slight constant growing acute")
# Of each ward: complaints, findings, medicines.
_WARDS: dict[str, tuple[list[str], list[str], list[str]]] = {
    "cardiology": (
        _listed("palpitations dizziness breathlessness fainting angina oedema fatigue"),
        _listed("arrhythmia hypertension stenosis tachycardia bradycardia murmur"),
        _listed("bisoprolol ramipril aspirin amlodipine furosemide atorvastatin"),
    ),
    "dermatology": (
        _listed("itching rash blisters swelling redness hives scaling"),
        _listed("eczema psoriasis urticaria acne melanoma rosacea"),
        _listed("cetirizine hydrocortisone isotretinoin tacrolimus doxycycline betamethasone"),
    ),
    "neurology": (
        _listed("headache numbness tremor seizures vertigo confusion weakness"),
        _listed("migraine epilepsy neuropathy sclerosis concussion stroke"),
        _listed("sumatriptan levetiracetam gabapentin lamotrigine topiramate propranolol"),
    ),
    "gastroenterology": (
        _listed("nausea heartburn cramps vomiting diarrhoea bloating constipation"),
        _listed("gastritis colitis reflux ulcer hepatitis gallstones"),
        _listed("omeprazole mesalazine loperamide ondansetron pantoprazole famotidine"),
    ),
}
# {n} name, {a} age, {s} strength, {c} complaint, {f} finding, {m} medicine, {d} dose, {w} day, {o} another name.
_FORMS = (
    "{n} , aged {a} , reports {s} {c} since {w} .",
    "we saw {n} on {w} with {s} {c} and suspect {f} .",
    "{f} was confirmed on {w} ; {n} now takes {m} {d} .",
    "please give {n} {m} {d} from {w} , no more {c} .",
    "doctor {o} sent {n} , {a} , to us for {f} with {c} .",
    "{c} got worse after {m} {d} ; {n} will call {o} on {w} .",
    "since {w} the {s} {c} of {n} ( {a} ) is gone , stop {m} .",
    "mother of {n} has {f} ; at {a} the first {c} on {w} .",
    "{n} refuses {m} {d} because of {s} {c} , asks for {o} .",
)


def vocabulary() -> tuple[str, ...]:
    """Return every word that the grammar can write, in alphabetical order, after padding and the end."""
    lists: list[Sequence[str]] = [_NAMES, _DAYS, _AGES, _STRENGTH, " ".join(_DOSES).split()]
    lists += [words for ward in _WARDS.values() for words in ward]
    lists += [[word for word in form.split() if "{" not in word] for form in _FORMS]
    return (PADDING, END, *sorted({word for words in lists for word in words}))


def tokenise(texts: Sequence[str], words: Sequence[str], length: int) -> Tensor:
    """Return int64 (n, length) the places in ``words`` of each text's first words, filled up with 0, the padding."""
    places = {word: place for place, word in enumerate(words)}
    tokens = torch.zeros(len(texts), length, dtype=torch.int64)
    for row, text in zip(tokens, texts, strict=True):
        found = [places[word] for word in text.split()[:length]]
        row[: len(found)] = torch.tensor(found)
    return tokens


def write_notes(count: int, seed: int) -> tuple[list[str], Tensor]:
    """Return so many notes, and int64 (count,) the ward of each."""
    rng = np.random.default_rng(seed)

    def one(choices: Sequence[str]) -> str:
        return choices[int(rng.integers(len(choices)))]

    wards = list(_WARDS.values())
    texts, classes = [], torch.arange(count) % len(wards)
    for ward in classes.tolist():
        complaints, findings, medicines = wards[ward]
        texts.append(
            (one(_FORMS) + f" {END}").format(
                n=one(_NAMES),
                a=one(_AGES),
                s=one(_STRENGTH),
                c=one(complaints),
                f=one(findings),
                m=one(medicines),
                d=one(_DOSES),
                w=one(_DAYS),
                o=one(_NAMES),
            )
        )
    return texts, classes


def _notes(request: Request, *, causal: bool) -> Dataset:
    words = vocabulary()
    texts, classes = write_notes(_TRAIN + _TEST, request.seed)
    tokens = tokenise(texts, words, LENGTH)
    train, test = tokens[:_TRAIN], tokens[_TRAIN:]
    return Dataset.from_tokens(
        train,
        None if causal else classes[:_TRAIN],
        vocabulary=len(words),
        padding=0,
        end=1,
        test=test if causal else (test, classes[_TRAIN:]),
        words=words,
        name=request.name,
        summary=request.summary,
        class_names=None if causal else tuple(_WARDS),
        source=f"drawn by fedaudit's own grammar with seed {request.seed}: nobody's words",
    )


add_dataset(
    "notes",
    "5,000 short notes of a made-up clinic, by a small grammar, of four wards: 17 words at most (drawn)",
    "drawn by fedaudit",
    Layout(lambda _, request: _notes(request, causal=False)),
    kind="tokens",
    needs="nothing",
)
add_dataset(
    "notes-causal",
    "the same notes, each word to be predicted from those before it",
    "drawn by fedaudit",
    Layout(lambda _, request: _notes(request, causal=True)),
    kind="tokens",
    needs="nothing",
)
