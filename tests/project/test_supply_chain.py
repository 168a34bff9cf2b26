"""The lock and the bill of materials: what they name, that every file has its SHA-256, and no registry's address."""

from __future__ import annotations

import hashlib
import re
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from tools.supply_chain import PYPROJECT, ROOT, canonical, closure, pruned, requirements

LOCK = PYPROJECT.with_name("requirements-dev.txt")
CONSTRAINTS = PYPROJECT.with_name("constraints.txt")
PIN = re.compile(r"^([A-Za-z0-9._-]+)==(\S+)")


def pins(path: Path) -> dict[str, str]:
    found = [PIN.match(line) for line in path.read_text().splitlines()]
    return {canonical(match[1]): match[2] for match in found if match}


def test_the_lock_has_all_that_development_needs_as_it_is_tested() -> None:
    locked, tested = pins(LOCK), pins(CONSTRAINTS)
    assert {canonical(r) for r in requirements()} <= locked.keys()
    if metadata.version("torch").partition("+")[0] == tested["torch"]:  # this environment is the tested one
        assert closure().keys() - {"fedaudit"} <= locked.keys()
    for name, version in locked.items():
        assert version.partition("+")[0] == tested.get(name, version), name
    assert locked.keys() - tested.keys() <= {"setuptools", "pip"}


def test_every_file_of_the_lock_is_known_by_its_digest_and_nobody_says_where_it_comes_from() -> None:
    lines = [line for line in LOCK.read_text().splitlines() if line and not line.startswith("#")]
    entries = re.split(r"\n(?=\S)", "\n".join(lines))
    assert len(entries) > 70
    for entry in entries:
        assert re.fullmatch(r"\S+==\S+( \\\n    --hash=sha256:[0-9a-f]{64})+", entry), entry[:200]
    assert not re.search(r"://|--index|--find-links|@", LOCK.read_text())


def environment_bill() -> dict[str, Any]:
    """Return a bill of this environment, with the parts of which cyclonedx-py makes one."""
    installed = {d.metadata["Name"]: d.version for d in metadata.distributions()}
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": {"bom-ref": ROOT, "name": "fedaudit", "type": "library"}},
        "components": [
            {"bom-ref": f"{name}=={version}", "name": name, "version": version, "type": "library"}
            for name, version in installed.items()
        ],
        "dependencies": [{"ref": ROOT, "dependsOn": ["pytest"]}],
    }


def test_the_bill_names_what_the_wheel_needs_and_nothing_else(tmp_path: Path) -> None:
    wheel = tmp_path / "fedaudit-1.2.3-py3-none-any.whl"
    wheel.write_bytes(b"wheel")
    bill = pruned(environment_bill(), closure(), wheel)
    root = bill["metadata"]["component"]
    assert (root["version"], root["purl"]) == ("1.2.3", "pkg:pypi/fedaudit@1.2.3")
    assert root["hashes"] == [{"alg": "SHA-256", "content": hashlib.sha256(b"wheel").hexdigest()}]
    names = {canonical(part["name"]) for part in bill["components"]}
    assert {"torch", "numpy", "safetensors", "pydantic", "typing-extensions"} <= names
    assert not names & {"pytest", "mypy", "ruff", "hypothesis", "pyarrow", "fedaudit", "pip"}  # an extra's, or nobody's
    refs = {part["bom-ref"] for part in bill["components"]} | {ROOT}
    depends = {entry["ref"]: entry.get("dependsOn", []) for entry in bill["dependencies"]}
    assert depends.keys() == refs
    assert {ref for needed in depends.values() for ref in needed} == refs - {ROOT}
    assert all(len(needed) == len(set(needed)) for needed in depends.values())
    direct = {canonical(ref.partition("==")[0]) for ref in depends[ROOT]}
    assert direct == {canonical(r) for r in requirements(())} - {"hatchling", "editables"}


def test_the_bill_keeps_to_the_schema(tmp_path: Path) -> None:
    validation = pytest.importorskip("cyclonedx.validation.json", reason="cyclonedx-bom isn't installed: make sbom")
    import json

    from cyclonedx.schema import SchemaVersion

    (tmp_path / "fedaudit-1.2.3-py3-none-any.whl").write_bytes(b"wheel")
    bill = pruned(environment_bill(), closure(), tmp_path / "fedaudit-1.2.3-py3-none-any.whl")
    assert validation.JsonStrictValidator(SchemaVersion.V1_6).validate_str(json.dumps(bill)) is None
