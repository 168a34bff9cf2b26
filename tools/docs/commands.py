"""docs/reference/cli.md: every command and its flags, from the functions that they are."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer
from typer.models import ArgumentInfo, CommandInfo, OptionInfo

from fedaudit.cli import app
from tools.docs.settings import MADE, cell, head, row

_HEAD = f"""\
# Command line

{MADE}

`fedaudit COMMAND --help` says the same on a terminal.

| exit code | what it means |
| --- | --- |
| 0 | done; every limit that you set is kept |
| 1 | a limit is exceeded; `compare` found more leakage than before; or `check-model` an alarm |
| 2 | something can't be used, and one line says what to do; `verify` found a difference; or anything unforeseen |
| 3 | a limit could not be tested; or `compare` can't compare what the old audit tested |
| 130 | interrupted; the same command goes on from there |

## Shell completion

`fedaudit --install-completion` makes the shell that you are in (bash, zsh, fish, PowerShell) complete commands and
flags on the Tab key: it adds a few lines to the shell's start-up file, and works in the next shell.
`fedaudit --show-completion` prints these lines instead.
"""


def page() -> str:
    """Return the page."""
    lines = [_HEAD, "## Commands", "", *head("command", "what it does")]
    found = list(commands(app))
    for path, command in found:
        lines.append(row(f"[`{path}`](#{path.replace(' ', '-')})", cell(_says(command))))
    for path, command in found:
        lines += ["", f"## {path}", "", inspect.cleandoc(command.__doc__ or ""), ""]
        lines += _parameters(path, command)
    return "\n".join(lines) + "\n"


def commands(group: typer.Typer, before: str = "fedaudit") -> Iterator[tuple[str, Any]]:
    """Yield every command's words and its function, those of groups after the others."""
    for command in group.registered_commands:
        yield f"{before} {_name(command)}", command.callback
    for inner in group.registered_groups:
        if inner.typer_instance:
            yield from commands(inner.typer_instance, f"{before} {inner.name}")


def _name(command: CommandInfo) -> str:
    return command.name or getattr(command.callback, "__name__", "").replace("_", "-")


def _says(command: Any) -> str:
    return inspect.cleandoc(command.__doc__ or "").split("\n\n")[0]


def _parameters(path: str, command: Any) -> Iterator[str]:
    hints = get_type_hints(command, include_extras=True)
    rows, usage = [], []
    for name, parameter in inspect.signature(command).parameters.items():
        kind, info = _declared(hints[name])
        required = parameter.default is parameter.empty
        if isinstance(info, ArgumentInfo):
            shown = (info.metavar or name).upper()
            usage.append(shown if required else f"[{shown}]")
            takes = _takes(kind, info)
        else:
            named = [
                info.default,
                *(info.param_decls or ()),
            ]  # where it is annotated, its first name stands as its default
            flags = [d for d in named if isinstance(d, str) and d.startswith("-")] or [f"--{name.replace('_', '-')}"]
            shown = ", ".join(flags)
            takes = "" if _base(kind) is bool else info.metavar or _takes(kind, info)
            if required:
                usage.append(f"{flags[0]} {takes}")
        more = [info.help or ""]
        if parameter.default not in (None, False, parameter.empty):
            default = parameter.default
            more.append(f"Default: `{default.value if isinstance(default, Enum) else default}`.")
        if info.envvar:
            more.append(f"Or the environment variable `{info.envvar}`.")
        rows.append(row(f"`{shown}`", cell(takes), cell(" ".join(more))))
    options = any(not r.startswith("| `" + u.strip("[]")) for r in rows for u in usage or [" "])
    yield f"    {' '.join([path, *usage, *(['[OPTIONS]'] if options else [])])}"
    if rows:
        yield from ("", *head("argument or flag", "takes", "meaning"), *rows)


def _declared(hint: Any) -> tuple[Any, Any]:
    """Return a parameter's type, and what it declares."""
    if get_origin(hint) is not Annotated:
        raise ValueError(f"a parameter of the command line declares nothing: {hint}")
    kind, *more = get_args(hint)
    return kind, next(m for m in more if isinstance(m, OptionInfo | ArgumentInfo))


def _base(kind: Any) -> Any:
    inner = [k for k in get_args(kind) if k is not NoneType]
    return _base(inner[0]) if inner and get_origin(kind) is not list else kind


def _takes(kind: Any, info: Any) -> str:
    kind = _base(kind)
    if get_origin(kind) is list:
        return _takes(get_args(kind)[0], info) + ", repeatable"
    if inspect.isclass(kind) and issubclass(kind, Enum):
        return ", ".join(f"`{choice.value}`" for choice in kind)
    bounds = [f"≥ {info.min:,}" if info.min is not None else ""]
    bounds.append(f"≤ {info.max:,}" if info.max is not None and info.max < 2**63 - 1 else "")
    words = {int: "whole number", float: "number", Path: "path", str: "text"}[kind]
    return " ".join([words, ", ".join(filter(None, bounds))]).strip()
