"""What the docs show works: scenarios are valid, Python runs, every command line has a command and flags that exist."""

from __future__ import annotations

import ast
import re
import shlex
import shutil
import textwrap
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from fedaudit.attacks.inversion import template
from fedaudit.cli import app
from fedaudit.evaluation import Limits
from fedaudit.scenario.scenario import scenario_from
from fedaudit_lab.studies.spec import load_study
from tools.docs.pages import ROOT, Block, blocks, pages, parsed

PAGES = [page for page in pages() if page.parent.parent.name != "results"]
BLOCKS = [block for page in PAGES for block in blocks(page)]
COMMANDS: Any = typer.main.get_command(app)
ELSEWHERE = {  # pages that show a whole application: their Python runs in tests of their own
    "docs/how-to/your-own-loop.md": "capture/test_own_loop.py",
    "docs/how-to/flower.md": "adapters/test_flower_docs.py",
    "docs/how-to/guard.md": "adapters/test_flower_docs.py",
    "docs/how-to/nvflare.md": "adapters/test_nvflare.py",
    "docs/reference/defences.md": "adapters/test_flower_defences.py",
}


def of(language: str) -> list[Any]:
    """Return the blocks of a language as parameters of a test."""
    return [pytest.param(block, id=block.where) for block in BLOCKS if block.language == language]


@pytest.mark.parametrize("block", of("yaml"))
def test_yaml_is_what_it_looks_like(block: Block, tmp_path: Path) -> None:
    if block.excerpt:
        return
    values = yaml.safe_load(block.text)
    if "scenario" in values:
        (tmp_path / "study.yaml").write_text(block.text, encoding="utf-8")
        load_study(str(tmp_path / "study.yaml"))
    elif values.keys() <= {"fail_on", "fail_above"}:
        Limits(values.get("fail_above", {}), values.get("fail_on")).check()
    elif not values.keys() & {"jobs", "steps", "repos"}:  # those are other programs'
        scenario_from(values, where=block.where)


@pytest.mark.parametrize("block", of("python"))
def test_python_is_python(block: Block) -> None:
    ast.parse(textwrap.dedent(block.text))


def programs() -> list[Any]:
    """Return the Python of each page as parameters of a test, and once what several pages show."""
    found = {}
    for page in PAGES:
        shown = [block for block in blocks(page) if block.language == "python" and not block.excerpt]
        if shown and str(page.relative_to(ROOT)) not in ELSEWHERE:
            found["".join(textwrap.dedent(block.text) for block in shown)] = pytest.param(shown, id=str(page))
    return list(found.values())


@pytest.mark.slow
@pytest.mark.parametrize("shown", programs())
def test_a_page_s_python_runs_from_top_to_bottom(
    shown: list[Block], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With two iterations an attack: what is tested is that it runs, not what it finds."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(template.QUICK, "iterations", 2)
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    known: dict[str, Any] = {"__name__": "__main__"}
    for block in shown:
        quick = re.sub(r"(\"?iterations\"?\s*[:=]\s*)\d+", r"\g<1>2", block.text)
        exec(compile(quick, block.where, "exec"), known)


def test_pages_whose_python_runs_elsewhere_are_named_there() -> None:
    for page, test in ELSEWHERE.items():
        assert Path(page).name in (ROOT / "tests" / test).read_text(encoding="utf-8")


def lines() -> list[Any]:
    """Return every ``fedaudit …`` line of the pages, in blocks and within sentences, as parameters of a test."""
    found: dict[str, str] = {}
    for block in BLOCKS:
        if block.language in ("", "sh", "bash", "console", "shell", "yaml"):
            for line in block.text.replace("\\\n", " ").splitlines():
                at = re.search(r"(?:^|[;&|]\s+|\$ |: |- |run: )(?:\.venv/bin/)?(fedaudit .*)", line.strip())
                if at and (block.language != "yaml" or "run:" in line):
                    found.setdefault(at[1], block.where)
    for page in PAGES:
        for token in parsed(page.read_text(encoding="utf-8")):
            for part in token.children or []:
                if part.type == "code_inline" and part.content.startswith("fedaudit "):
                    found.setdefault(part.content, str(page.relative_to(ROOT)))
    return [pytest.param(line, id=f"{where}: {line}"[:120]) for line, where in found.items()]


@pytest.mark.parametrize("line", lines())
def test_a_command_line_has_a_command_and_flags_that_exist(line: str) -> None:
    check(line)


def check(line: str) -> None:
    """Parse a line as the command line does, without running it; brackets and ``a|b`` are as in a usage."""
    text = re.sub(r"\[OPTIONS\]|…|\.\.\.", " ", line.replace("${{", "").replace("}}", ""))
    text = re.sub(r"(?<=[\w-])\|[\w|-]+", "", text)  # the first of several
    text = text if "'" in text or '"' in text else re.sub(r"[\[\]]", " ", text)
    words = shlex.split(text, comments=True)[1:]
    words = words[: next((i for i, word in enumerate(words) if word in ("|", "||", "&&", ";", ">", ">>")), len(words))]
    command: Any = COMMANDS
    name = "fedaudit"
    while words and hasattr(command, "commands") and not words[0].startswith("-"):
        if words[0].isupper():
            return  # COMMAND, KIND: any
        assert words[0] in command.commands, f"no command '{words[0]}'"
        command, name = command.commands[words[0]], words.pop(0)
    flags = {flag for parameter in command.params for flag in (*parameter.opts, *parameter.secondary_opts)}
    for word in words:
        if word.startswith("-"):
            assert word.partition("=")[0] in flags | {"--help", "-h"}, f"{name} has no {word}"


@pytest.mark.parametrize(
    "line", ["fedaudit adit x.yaml", "fedaudit audit x.yaml --fail-at recovered", "fedaudit study go"]
)
def test_a_wrong_line_is_noticed(line: str) -> None:
    with pytest.raises(AssertionError):
        check(line)


def test_lines_are_found() -> None:
    found = {parameter.values[0].split()[1] for parameter in lines()}
    assert {"audit", "attack", "compare", "verify", "study", "explain", "list"} <= found
