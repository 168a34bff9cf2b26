"""What the lock and the bill of materials are made of: python -m tools.supply_chain requirements|closure|sbom.

``requirements`` prints all that the development environment and a build need, for pip-compile; ``closure`` what the
wheel needs; ``sbom BILL CLOSURE WHEEL OUT`` cuts what cyclonedx-py says of an environment down to that, and names the
wheel by its digest.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
import tomllib
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

PYPROJECT = Path(__file__).parents[1] / "pyproject.toml"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
ROOT = "root-component"  # as cyclonedx-py calls it


def canonical(requirement: str) -> str:
    """Return the normalised name of what a requirement, or a reference in a bill, is about."""
    found = _NAME.match(requirement)
    assert found is not None, requirement
    return re.sub(r"[-_.]+", "-", found[0]).lower()


def requirements(extras: Sequence[str] = ("dev",)) -> list[str]:
    """Return the requirements of the package, of its extras (with those that they name) and of its build."""
    values = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))
    project = values["project"]
    found: list[str] = [*project["dependencies"], *values["build-system"]["requires"], "editables"]
    waiting, seen = list(extras), set()
    while waiting:
        extra = waiting.pop()
        if extra in seen:
            continue
        seen.add(extra)
        for requirement in project["optional-dependencies"][extra]:
            own = re.fullmatch(r"fedaudit\[(.*)\]", requirement)
            if own:
                waiting += own[1].split(",")
            else:
                found.append(requirement)
    return sorted(set(found))


def closure() -> dict[str, list[str]]:
    """Return what the wheel needs in this environment, directly or not, each with what it needs itself, by name."""
    from packaging.requirements import Requirement

    def needs(texts: Sequence[str]) -> list[str]:
        wanted = [Requirement(text) for text in texts]
        return sorted({canonical(r.name) for r in wanted if r.marker is None or r.marker.evaluate({"extra": ""})})

    direct = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["project"]["dependencies"]
    found = {"fedaudit": needs(direct)}
    waiting = list(found["fedaudit"])
    while waiting:
        name = waiting.pop()
        if name not in found:
            found[name] = needs(metadata.requires(name) or [])
            waiting += found[name]
    return found


def pruned(bill: dict[str, Any], needs: Mapping[str, Sequence[str]], wheel: Path) -> dict[str, Any]:
    """Return the bill of an environment as that of the wheel: with what it needs, and nothing else.

    Args:
        bill: as cyclonedx-py writes it, of an environment in which the package is installed.
        needs: see :func:`closure`; cyclonedx-py itself takes what extras need for needed.
        wheel: that it is the bill of.
    """
    refs = {canonical(part["name"]): part["bom-ref"] for part in bill["components"]} | {"fedaudit": ROOT}
    version = wheel.name.split("-")[1]
    root = {**bill["metadata"]["component"], "version": version, "purl": f"pkg:pypi/fedaudit@{version}"}
    root["hashes"] = [{"alg": "SHA-256", "content": hashlib.sha256(wheel.read_bytes()).hexdigest()}]
    return {
        **bill,
        "metadata": {**bill["metadata"], "component": root},
        "components": [part for part in bill["components"] if canonical(part["name"]) in needs.keys() - {"fedaudit"}],
        "dependencies": [
            {"ref": refs[name], **({"dependsOn": sorted(refs[n] for n in own)} if own else {})}
            for name, own in sorted(needs.items())
        ],
    }


def main(words: Sequence[str]) -> None:
    """Do what the module's description says."""
    if list(words) == ["requirements"]:
        print("\n".join(requirements()))
        return
    if list(words) == ["closure"]:
        print(json.dumps(closure()))
        return
    command, raw, needs, wheel, out = words
    assert command == "sbom", command
    bill, needed = (json.loads(Path(name).read_text(encoding="utf-8")) for name in (raw, needs))
    bill = pruned(bill, needed, Path(wheel))
    text = json.dumps(bill, indent=2, sort_keys=True) + "\n"
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    if error := JsonStrictValidator(SchemaVersion.V1_6).validate_str(text):
        sys.exit(f"the bill isn't CycloneDX 1.6: {error}")
    Path(out).write_text(text, encoding="utf-8")
    print(f"{out}: {len(bill['components'])} components")


if __name__ == "__main__":
    main(sys.argv[1:])
