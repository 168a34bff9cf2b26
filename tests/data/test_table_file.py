"""A user's table in a file: what is read, what is asked, and an audit of it by the command line."""

from __future__ import annotations

import datetime
import gzip
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from fedaudit.data.table_file import read_columns, table_file
from fedaudit.scenario.scenario import load_scenario
from fedaudit.utils.errors import BadInput
from tests.conftest import Command

HEAD = ["patient", "Klinik", "Alter", "Gewicht", "Raucher", "Labor", "Aufnahme", "Ergebnis"]


def rows(n: int = 240) -> list[list[str]]:
    """Two rows a patient, of three hospitals; decimal commas, empty cells, and -999 for what wasn't measured."""
    dice = random.Random(0)
    made = []
    for i in range(n):
        age, weight, value = dice.randint(20, 90), f"{dice.gauss(70, 9):.1f}", f"{dice.gauss(5, 1):.2f}"
        row = [f"P{i // 2:03d}", dice.choice(["Köln", "Bonn", "Aachen"]), str(age), weight.replace(".", ",")]
        row += [dice.choice(["ja", "nein", "NA"]), "-999" if i % 20 == 7 else value.replace(".", ",")]
        row += [f"2021-{dice.randint(1, 12):02d}-{dice.randint(1, 28):02d}"]
        made.append([*row, "tot" if dice.random() < age / 100 else "lebt"])
    return made


def text(separator: str = ";", table: list[list[str]] | None = None, head: list[str] = HEAD) -> str:
    quoted = [[f'"{cell}"' if separator in cell else cell for cell in row] for row in [head, *(table or rows())]]
    return "\n".join(separator.join(row) for row in quoted) + "\n"


SETTINGS: dict[str, Any] = {"client": "Klinik", "person": "patient", "missing": [-999], "empty": "median"}


def written(path: Path, content: str, encoding: str = "utf-8") -> Path:
    path.write_bytes(content.encode(encoding))
    return path


def tensor(given: torch.Tensor | None) -> torch.Tensor:
    assert given is not None
    return given


@pytest.mark.parametrize("separator", [";", ",", "\t", "|"])
@pytest.mark.parametrize(
    ("encoding", "given"), [("utf-8", None), ("utf-8-sig", None), ("utf-16", None), ("cp1252", "cp1252")]
)
def test_a_text_is_the_same_table_however_it_is_written(separator, encoding, given, tmp_path):
    usual = table_file(written(tmp_path / "usual.csv", text()), "Ergebnis", **SETTINGS)
    file = written(tmp_path / "other.txt", text(separator).replace("\n", "\r\n"), encoding)
    # with commas between columns and decimals, in quotes, other separators could be meant, too
    other = table_file(file, "Ergebnis", **SETTINGS, encoding=given, separator="," if separator == "," else None)
    for a, b in ((usual.train, other.train), (usual.test, other.test)):
        assert a.inputs.equal(b.inputs)
        assert a.targets.equal(b.targets)
        assert tensor(a.groups).equal(tensor(b.groups))
    (tmp_path / "packed.csv.gz").write_bytes(gzip.compress(text().encode()))
    assert table_file(tmp_path / "packed.csv.gz", "Ergebnis", **SETTINGS).train.inputs.equal(usual.train.inputs)


def test_clients_persons_gaps_and_the_account_of_columns(tmp_path):
    table = rows()
    table[3][1] = ""  # nobody's
    table[4][7] = "NA"  # without an outcome
    data = table_file(written(tmp_path / "t.csv", text(table=table)), "Ergebnis", **SETTINGS)
    kept = [row for i, row in enumerate(table) if i not in (3, 4)]
    groups = torch.cat([tensor(data.train.groups), tensor(data.test.groups)])
    persons = set(tensor(data.train.persons).tolist()), set(tensor(data.test.persons).tolist())
    assert torch.bincount(groups).tolist() == [sum(row[1] == who for row in kept) for who in ("Aachen", "Bonn", "Köln")]
    assert not persons[0] & persons[1]
    assert len(data.train) + len(data.test) == len(kept)
    # Klinik and patient are no inputs: four columns of numbers or dates, one for each of ja, nein and ?
    assert data.input_shape == (4 + 3,)
    assert "rows without 'Ergebnis' or 'Klinik', left out: 2" in data.summary
    measured = sum(row[5] == "-999" for row in kept)
    assert f"Labor: numbers, with decimal commas, {measured} that are missing are the median" in data.summary
    left = table_file(tmp_path / "t.csv", "Ergebnis", **{**SETTINGS, "empty": "leave-out"})
    whole = [row for row in kept if "NA" not in row and "-999" not in row]
    assert len(left.train) + len(left.test) == len(whole)


def test_what_is_missing_is_the_median_of_what_is_known(tmp_path):
    table = [[str(i), "" if i == 3 else str(i * i) + ".5", str(i % 2)] for i in range(30)]
    data = table_file(
        written(tmp_path / "t.csv", text(",", table, ["x", "y", "out"])), "out", empty="median", drop=["x"]
    )
    values = torch.cat([data.train.inputs, data.test.inputs])[:, 0]
    known = sorted(i * i + 0.5 for i in range(30) if i != 3)
    counted = torch.tensor(sorted([*known, known[len(known) // 2]]))
    scale = (values.max() - values.min()) / (counted.max() - counted.min())
    assert torch.allclose(values.sort().values, (counted - counted.min()) * scale + values.min(), atol=1e-4)


def test_decimals_are_marked_alike_in_a_whole_file(tmp_path):
    rows_of = [[f"5.{i:03d}", f"48,{i % 10}", "yes" if i % 2 else "no"] for i in range(100, 140)]
    data = table_file(written(tmp_path / "t.csv", text(table=rows_of, head=["leukocytes", "b", "out"])), "out")
    assert "leukocytes, b: numbers, with decimal commas" not in data.summary
    whole = torch.cat([data.train.inputs, data.test.inputs])[:, 0].sort().values
    assert torch.allclose((whole - whole[0]) / (whole[-1] - whole[0]), torch.arange(40) / 39, atol=1e-4)


def test_every_client_keeps_rows_to_train_on_and_each_row_without_a_person_is_its_own(tmp_path):
    table = [
        [
            "A" if i < 30 else "B" if i < 60 else "C",
            str(i % 7),
            f"P{i // 2}" if i < 20 else "",
            "no" if i % 3 else "yes",
        ]
        for i in range(61)
    ]
    file = written(tmp_path / "t.csv", text(table=table, head=["site", "x", "who", "out"]))
    data = table_file(file, "out", client="site", person="who")
    assert set(tensor(data.train.groups).tolist()) == {0, 1, 2}
    assert len({*tensor(data.train.persons).tolist(), *tensor(data.test.persons).tolist()}) == 10 + 41
    assert "51, 41 of them rows without one" in data.summary
    with pytest.raises(BadInput, match="named for client and for person"):
        table_file(file, "out", client="site", person="site")


def test_a_word_for_nothing_is_a_category_and_no_empty_cell(tmp_path):
    table = [[str(i), ["none", "relapse", "death"][i % 3]] for i in range(60)]
    data = table_file(written(tmp_path / "t.csv", text(table=table, head=["x", "out"])), "out", types={"x": "numeric"})
    assert data.class_names == ("death", "none", "relapse")
    assert len(data.train) + len(data.test) == 60


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (text() + "a;b\n", "line 242: 2 cells, and the first row has 8 names"),
        (text(table=rows(40)).replace("\n", "\na;b\n", 12).replace("a;b\n", "", 11), "line 13: 2 cells"),
        ("1,2,3\n" * 30, "is of numbers; put the columns' names above it"),
        ("a b\nc d\n", "say which separator"),
        ("a,b;c\n1,2;3\n" * 3, "',' (2 columns) or ';' (2 columns)"),
        ('a;b\n"1"x;2\n', "mend the quotes"),
        ("a;b\n", "1 rows"),
        ("", "separator"),
        ("a;b\0;c\n1;2;3\n", "zero bytes"),
    ],
)  # fmt: skip
def test_what_is_unclear_is_asked_in_one_line(content, says, tmp_path):
    with pytest.raises(BadInput) as told:
        read_columns(written(tmp_path / "t.csv", content))
    assert says in str(told.value)
    assert "\n" not in str(told.value)


def test_names_are_trimmed_normalised_and_told_apart(tmp_path):
    composed, parts = "Gro\u0308\u00dfe", "Gr\u00f6\u00dfe"
    content = f" {composed} ;Wert;Wert;;\n1;2;3;4;\n5;6;7;8;\n"
    assert list(read_columns(written(tmp_path / "t.csv", content))) == [parts, "Wert", "Wert (2)", "column 4"]


def test_bytes_that_are_no_utf_8_are_named_with_their_line_and_a_remedy(tmp_path):
    with pytest.raises(BadInput, match=r"line \d+: byte 0xf6 isn't utf-8: .*encoding=cp1252"):
        read_columns(written(tmp_path / "t.csv", text(), "cp1252"))
    with pytest.raises(BadInput, match="no encoding 'cp125'"):
        read_columns(tmp_path / "t.csv", encoding="cp125")
    with pytest.raises(BadInput, match="no kind of table"):
        read_columns(written(tmp_path / "t.docx", "x"))
    with pytest.raises(BadInput, match="no such file"):
        read_columns(tmp_path / "nowhere.csv")


def test_parquet_is_the_same_table(tmp_path):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    columns: dict[str, Any] = {name: [row[i] for row in rows()] for i, name in enumerate(HEAD)}
    columns["Aufnahme"] = [datetime.date.fromisoformat(text) for text in columns["Aufnahme"]]
    parquet.write_table(pyarrow.table(columns), tmp_path / "t.parquet")
    usual = table_file(written(tmp_path / "t.csv", text()), "Ergebnis", **SETTINGS)
    assert table_file(tmp_path / "t.parquet", "Ergebnis", **SETTINGS).train.inputs.equal(usual.train.inputs)


@pytest.mark.peers
@pytest.mark.parametrize(("suffix", "write"), [(".dta", "to_stata"), (".feather", "to_feather")])
def test_what_pandas_reads_is_the_same_table(suffix, write, tmp_path):
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({name: [row[i] for row in rows()] for i, name in enumerate(HEAD)})
    getattr(frame, write)(tmp_path / f"t{suffix}", **({"write_index": False} if suffix == ".dta" else {}))
    usual = table_file(written(tmp_path / "t.csv", text()), "Ergebnis", **SETTINGS)
    assert table_file(tmp_path / f"t{suffix}", "Ergebnis", **SETTINGS).train.inputs.equal(usual.train.inputs)


def test_init_asks_for_columns_and_writes_an_audit_of_the_table(command: Command, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    written(tmp_path / "unsere daten.csv", text())
    assert "there is no such file" in command("init", "unsere.csv", "--target", "Ergebnis").err
    assert "--target NAME, one of patient, Klinik" in command("init", "unsere daten.csv").err
    asked = command("init", "unsere daten.csv", "--target", "Ergebnis", "--client", "Klinik")
    assert (asked.code, "data.missing=[-999] says so" in asked.err) == (2, True)
    settings = ["--set", "data.missing=[-999]", "--set", "data.empty=median", "--set", "data.person=patient"]
    done = command("init", "unsere daten.csv", "--target", "Ergebnis", "--client", "Klinik", *settings)
    assert (done.code, "3 clients" in done.out) == (0, True)
    made = load_scenario(tmp_path / "scenario.yaml")
    assert made.data.path == Path("unsere daten.csv")
    assert (made.data.split, made.data.client, made.federations[0].clients) == ("train", "Klinik", 3)
    assert made.federations[0].partition.scheme == "natural"
    less = [
        "--set",
        "federations.fedavg.rounds=2",
        "--set",
        "attacks=[loss-threshold]",
        "--set",
        "evaluation.controls=false",
    ]
    assert command("audit", "scenario.yaml", *less, "--out", "audit").code == 0
    assert command("share", "audit", "--out", "shared").code == 0
    assert command("audit", "scenario.yaml", *less, "--set", "name=Haus Aachen", "--out", "named").code == 0
    assert "the name of a client" in command("share", "named", "--out", "again").err
    result = json.loads((tmp_path / "audit" / "results.json").read_text())
    assert "clients by 'Klinik': 0: Aachen" in result["data"]["summary"]
    shared_out = command(
        "audit", "scenario.yaml", "--set", "federations.fedavg.partition={scheme: iid}", "--out", "other"
    )
    assert "federations.fedavg.partition={scheme: natural}" in shared_out.err


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ({"name": "table-file", "path": "t.csv"}, "needs path, the file, and target"),
        ({"name": "digits", "client": "a"}, "client is for the data set 'table-file'"),
    ],
)
def test_a_table_s_settings_are_a_table_s(data, says, tmp_path):
    (tmp_path / "s.yaml").write_text(json.dumps({"data": data, "federations": [{"name": "f"}]}))
    with pytest.raises(BadInput, match=says):
        load_scenario(tmp_path / "s.yaml")
