"""What singles records out is found in the data alone: against a count by hand, by loops, and bad input."""

from __future__ import annotations

import csv
import itertools
import json
import math
import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.conftest import Command, refused

PEOPLE = """id,age,sex,town,ill
p1,30,f,a,yes
p2,30,f,a,yes
p3,30,m,a,no
p4,30,m,a,yes
p5,50,m,b,no
p6,50,f,b,no
p7,50,f,c,no
"""


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def found(command: Command, *arguments: Any) -> dict[str, Any]:
    done = command("check-data", *arguments, "--json")
    assert done.code == 0, done
    told: dict[str, Any] = json.loads(done.out)
    return told


def test_seven_people_counted_by_hand(tmp_path, command: Command):
    people = write(tmp_path / "people.csv", PEOPLE)
    told = found(command, people, "--drop", "id", "--target", "ill", "--least", 3)
    assert told["sites"] == {"people": 7}
    assert told["unique"] == 3  # p5, p6, p7; two pairs are alike
    assert (told["small_groups"], told["small"], told["smallest"]) == (5, 7, 1)
    assert told["same_target"] == 2  # p1 and p2 are ill; of p3 and p4 one is
    assert told["duplicates_within"] == 2
    by = {r["row"]: r["by"] for r in told["records"]}
    assert (by[7], by[5], by[6], by[1]) == (["town"], ["age", "sex"], ["sex", "town"], [])
    assert [r["row"] for r in told["records"]][:3] == [5, 7, 6]  # two pairs weigh as much as one attribute of three


def test_a_score_of_one_is_of_a_record_that_every_attribute_singles_out(tmp_path, command: Command):
    rows = "\n".join(["a,b,c", *["1,1,1"] * 5, *["2,2,2"] * 5, "3,3,3"])
    told = found(command, write(tmp_path / "x.csv", rows + "\n"), "--least", 2)
    assert [(r["row"], r["score"], r["by"]) for r in told["records"] if not r["duplicates"]] == [(11, 1.0, ["a"])]


def test_scores_are_those_of_loops_over_all_combinations(tmp_path, command: Command):
    draw = random.Random(3)
    rows = [[draw.choice("abcd"), draw.choice("xy"), draw.choice("pqr"), draw.choice("0123456")] for _ in range(60)]
    path = tmp_path / "x.csv"
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([["A", "B", "C", "D"], *rows])
    told = found(command, path, "--most", 60)
    alone = {
        part: Counter(tuple(row[i] for i in part) for row in rows)
        for size in (1, 2, 3)
        for part in itertools.combinations(range(4), size)
    }
    weights = {size: math.prod(4 - i for i in range(size, 4)) for size in (1, 2, 3)}
    expected = {}
    for number, row in enumerate(rows, 1):
        single = {part for part, counts in alone.items() if counts[tuple(row[i] for i in part)] == 1}
        least = [part for part in single if not any(set(other) < set(part) for other in single)]
        expected[number] = sum(weights[len(part)] for part in least) / (4 * weights[1])
    scores = {r["row"]: r["score"] for r in told["records"]}
    assert told["depth"] == 3
    assert told["singled"] == sum(score > 0 for score in expected.values()) > 5
    assert scores == pytest.approx({row: expected[row] for row in scores})
    assert {row for row, score in expected.items() if score > 0} <= scores.keys()


def test_sites_are_told_apart_and_duplicates_across_them_are_found(tmp_path, command: Command):
    north = write(tmp_path / "north.csv", "age,sex\n30,f\n30,f\n40,m\n")
    south = write(tmp_path / "south.csv", "age,sex\n40,m\n40,m\n50,m\n")
    told = found(command, north, south)
    assert told["sites"] == {"north": 3, "south": 3}
    assert (told["duplicates_within"], told["duplicates_across"], told["unique"]) == (4, 3, 2)
    one = write(tmp_path / "all.csv", "age,sex,site\n30,f,n\n30,f,n\n40,m,n\n40,m,s\n40,m,s\n50,m,s\n")
    again = found(command, one, "--site", "site")
    assert [again[key] for key in ("duplicates_within", "duplicates_across", "unique")] == [4, 3, 2]
    assert [(r["site"], r["row"]) for r in again["records"][:2]] == [("n", 3), ("s", 3)]


def test_many_numbers_are_known_to_a_tenth_and_identifiers_to_nobody(tmp_path, command: Command):
    rows = [f"name{i},{i},{1000 + i * 3.7}" for i in range(200)]
    told = found(command, write(tmp_path / "x.csv", "\n".join(["name,number,income", *rows]) + "\n"))
    assert told["columns"] == {"name": "identifier", "number": "identifier", "income": "tenths"}
    assert (told["smallest"], told["unique"], told["duplicates_within"]) == (20, 0, 0)
    asked = found(command, tmp_path / "x.csv", "--by", "name")
    assert (asked["columns"], asked["unique"]) == ({"name": "exact"}, 200)


def test_of_arrays_and_pictures_duplicates_are_told(tmp_path, command: Command):
    pixels = np.random.default_rng(0).random((6, 1, 4, 4)).astype(np.float32)
    pixels[4] = pixels[1]
    np.savez(tmp_path / "x.npz", inputs=pixels, labels=np.arange(6))
    told = found(command, tmp_path / "x.npz")
    assert (told["duplicates_within"], told["columns"], told["smallest"]) == (2, {}, None)
    for site, colours in {"a": ["red", "blue"], "b": ["blue", "lime"]}.items():
        (tmp_path / site).mkdir()
        for number, colour in enumerate(colours):
            Image.new("RGB", (3, 3), colour).save(tmp_path / site / f"{number}.png")
    told = found(command, tmp_path / "a", tmp_path / "b")
    assert (told["duplicates_within"], told["duplicates_across"]) == (0, 2)
    assert [(r["site"], r["row"], r["file"], r["same_as"]) for r in told["records"]] == [
        ("a", 2, "1.png", ["b", 1]),
        ("b", 1, "0.png", ["a", 2]),
    ]


def test_numbers_of_people_that_sites_repeat_or_that_have_gaps_are_identifiers(tmp_path, command: Command):
    draw = random.Random(0)
    for site in ("north", "south", "east"):
        whole = draw.sample(range(10_000_000), 200)
        rows = [f"{i},{whole[i]},{whole[i]:x}b,p{i},{draw.randint(20, 90)},{draw.random():.4f}" for i in range(200)]
        write(tmp_path / f"{site}.csv", "\n".join(["counted,gaps,hex,text,age,ratio", *rows]) + "\n")
    told = found(command, *(tmp_path / f"{site}.csv" for site in ("north", "south", "east")))
    same = dict.fromkeys(("counted", "gaps", "hex", "text"), "identifier")
    assert told["columns"] == {**same, "age": "tenths", "ratio": "tenths"}
    known = found(command, tmp_path / "north.csv", "--by", "gaps", "--by", "text")
    assert known["columns"] == {"gaps": "tenths", "text": "exact"}


def test_an_identifier_that_one_site_alone_has_is_one(tmp_path, command: Command):
    write(tmp_path / "north.csv", "\n".join(["id,age", *(f"P{i},{i % 50}" for i in range(100))]) + "\n")
    write(tmp_path / "south.csv", "\n".join(["id,age", *(f"x,{i % 50}" for i in range(900))]) + "\n")
    told = found(command, tmp_path / "north.csv", tmp_path / "south.csv")
    assert told["columns"]["id"] == "identifier"


def test_duplicates_are_named_beside_what_stands_out_more(tmp_path, command: Command):
    rows = [f"{i},{i % 7}" for i in range(30)] + ["3,3"]
    told = found(command, write(tmp_path / "x.csv", "\n".join(["a,b", *rows]) + "\n"), "--most", 2, "--by", "b")
    named = {r["row"]: r["same_as"] for r in told["records"] if r["duplicates"]}
    assert named == {4: ["x", 31], 31: ["x", 4]}
    assert len(told["records"]) == 4


def test_rows_have_the_numbers_that_a_spreadsheet_shows(tmp_path, command: Command):
    told = found(command, write(tmp_path / "x.csv", "\na,b\n1,1\n\n1,1\n,\n1,1\n2,9\n"), "--least", 2)
    assert [r["row"] for r in told["records"] if not r["duplicates"]] == [6]


def test_one_record_is_called_a_record(tmp_path, command: Command):
    table = write(tmp_path / "x.csv", "a,b\n1,1\n1,1\n1,1\n2,9\n")
    done = command("check-data", table, "--out", tmp_path / "out")
    assert "1 record alone with all attributes at the same site (25 %)" in done.out
    assert "1 records" not in done.out + (tmp_path / "out" / "check-data.html").read_text()


def test_a_limit_is_an_exit_code_and_a_page_escapes_what_it_names(tmp_path, command: Command):
    people = write(tmp_path / "people.csv", PEOPLE.replace("town", "<b>town"))
    done = command("check-data", people, "--drop", "id", "--fail-below", 2, "--out", tmp_path / "out")
    assert done.code == 1
    page = (tmp_path / "out" / "check-data.html").read_text()
    assert "&lt;b&gt;town" in page
    assert "<b>town" not in page
    assert json.loads((tmp_path / "out" / "check-data.json").read_text())["unique"] == 5
    lines = (tmp_path / "out" / "records.csv").read_text().splitlines()
    assert lines[0] == "site,row,score,by,group,duplicates,same as,file"
    assert lines[1].startswith("people,7,")
    same = write(tmp_path / "same.csv", "a,b\nx,y\nx,y\nx,y\n")
    assert command("check-data", same, "--fail-below", 3).code == 0


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["nowhere.csv"], "no such file"),
        (["people.csv", "--target", "salary"], "no column 'salary'"),
        (["people.csv", "--target", "ill", "--by", "ill"], "not two of them"),
        (["people.csv", "other.csv"], "other columns"),
        (["people.csv", "folder"], "not both"),
        (["folder"], "no pictures"),
        (["people.csv", "people.csv"], "would be called 'people'"),
        (["x.npz", "--site", "ill"], "no tables"),
    ],
)
def test_what_can_t_be_looked_at_is_refused_in_a_line(arguments, told, tmp_path, command: Command, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "people.csv", PEOPLE)
    write(tmp_path / "other.csv", "a,b\n1,2\n")
    (tmp_path / "folder").mkdir()
    np.savez(tmp_path / "x.npz", inputs=np.zeros((2, 3), np.float32), labels=np.arange(2))
    refused(command("check-data", *arguments), told)
