"""What lies in a folder for results already: another audit's is refused, or makes room when that is wanted."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from fedaudit.pipeline.prepare import AuditRequest, spell_out
from fedaudit.report.write import FILES
from fedaudit.scenario.scenario import Scenario, scenario_from
from fedaudit.utils import plain_yaml
from fedaudit.utils.bounds import read_json
from fedaudit.utils.errors import BadInput
from fedaudit.utils.folders import inside

REQUEST = "attack.yaml"  # what was asked of an attack on a transcript
WITHIN = "within_a_time"  # in it, where the audit had so long; with more or less it is the same audit
# What we write into the folder itself. Whatever else lies there stays, findings/ too: they are kept by content.
OWN_FILES = ("report.html", "results.json", "scenario.yaml", "findings.json", REQUEST, *FILES.values())


def holds_another(out: Path, wanted: Scenario | dict[str, Any], *, overwrite: bool) -> bool:
    """Return whether ``out``, which needn't exist, holds the results of something else than what is wanted.

    ``wanted`` is an audit's whole scenario, or what is asked of an attack on a transcript (:func:`save_request`).
    BadInput: it holds such, which may not go (:func:`clear`) without ``overwrite``.
    """
    found = next((out / name for name in ("results.json", "findings.json") if (out / name).exists()), None)
    if found is None or _same(out, wanted):
        return False
    if not overwrite:
        raise BadInput(
            f"'{out}' holds another audit{_named(out)}; give another out=…, or overwrite=True to "
            "delete its report and images first"
        )
    return True


def clear(out: Path) -> None:
    """Delete an audit's results in ``out``: our own files, and of others those that its lists name as ours."""
    for name in [*_named_files(out), *OWN_FILES]:
        try:
            inside(out, name).unlink(missing_ok=True)
        except BadInput:
            continue  # a list that names what lies elsewhere isn't ours
        except OSError as error:
            raise BadInput(f"can't delete '{out / name}': {error.strerror or error}") from None


def save_request(out: Path, request: dict[str, Any]) -> None:
    """Write what is asked of an attack on a transcript, so that :func:`holds_another` knows it again."""
    try:
        inside(out, REQUEST).write_text(plain_yaml.dumps(request), encoding="utf-8")
    except OSError as error:
        raise BadInput(f"can't write to '{out}': {error.strerror or error}") from None


def _same(out: Path, wanted: Scenario | dict[str, Any]) -> bool:
    if isinstance(wanted, dict):
        with suppress(BadInput):
            asked = [plain_yaml.read(out / REQUEST, REQUEST), plain_yaml.loads(plain_yaml.dumps(wanted), REQUEST)]
            before, now = ({**one, WITHIN: None} if isinstance(one, dict) else one for one in asked)
            return bool(before == now)
        return False
    before = _read(out / "results.json")
    if not isinstance(before, dict) or (out / REQUEST).exists():
        return False
    with suppress(BadInput):  # perhaps written by a version that had fewer settings: then with their defaults
        return spell_out(AuditRequest(scenario=scenario_from(before.get("scenario")))).scenario == wanted
    return False


def _named(out: Path) -> str:
    """Return the name of the audit in ``out``, and when it began, as far as its results say so."""
    before = _read(out / "results.json")
    name = before.get("name") if isinstance(before, dict) else None
    return f", '{name[:60]}'" if isinstance(name, str) else ""


def _named_files(out: Path) -> Iterator[str]:
    """Yield the images that the folder's own lists name, and the findings beside them: never anything else."""
    rows = _read(out / "findings.json")
    for image in leaves([_read(out / "results.json"), rows]):
        path = Path(image if isinstance(image, str) else "")
        if path.suffix == ".png" and path.parts[:1] == ("images",) and ".." not in path.parts:
            yield image
    for row in rows if isinstance(rows, list) else []:
        file = row.get("file") if isinstance(row, dict) else None
        if isinstance(file, str) and Path(file).name == file and file.endswith(".safetensors"):
            yield file


def leaves(value: Any, without: Collection[str] = ()) -> Iterator[Any]:
    """Yield every plain value of a JSON document, but what lies under the keys ``without``."""
    if isinstance(value, dict):
        value = [item for key, item in value.items() if key not in without]
    if isinstance(value, list):
        for item in value:
            yield from leaves(item, without)
    else:
        yield value


def _read(path: Path) -> Any:
    """Return what a JSON file says; None where there is none, or it says nothing that can be read."""
    with suppress(OSError, ValueError, BadInput):
        return read_json(path)
    return None
