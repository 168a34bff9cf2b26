"""A newcomer's first hour, played in an empty environment: ``make first-hour``. Fails on any surprise.

A surprise is: another exit code than told, a traceback, a warning, a file outside the expected places, or a step that
takes much longer than it may. It clones what is committed, and needs git, make, and pip's index or its cache; the
installed fedaudit isn't used, nor anything beyond the standard library.

    python tools/first_hour.py [--folder EMPTY] [--without-docs]
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
KEPT = ("PATH", "LANG", "LC_ALL", "PIP_", "SSL_", "REQUESTS_CA", "HTTP", "http", "NO_PROXY", "no_proxy")
WRONG = re.compile(r"Traceback \(most recent|\bwarning\b|\bdeprecat", re.IGNORECASE)
PIPS = re.compile(r"^(WARNING|DEPRECATION|\[notice\]|  WARNING)")  # of pip, about its index or itself
NEXT = re.compile(r"^next: (.*)$", re.MULTILINE)
# In the home of somebody who never ran anything: what rustup writes when pip asks for its version, and caches of pip,
# of the native code, and of Matplotlib's fonts.
IN_HOME = (".rustup/settings.toml", ".cache/pip", ".cache/fedaudit", ".cache/matplotlib", ".config/matplotlib")
IN_TMP = ("torchinductor_",)  # an empty folder of torch's
OWN = 150.0  # seconds that the audit may take that init says comes next


class Surprise(Exception):
    """What a newcomer wouldn't expect."""


@dataclass
class Hour:
    """Where the hour is spent, and what was done.

    Attributes:
        folder: empty at first; has the clone, a home and a folder for temporary files.
        steps: title and seconds.
    """

    folder: Path
    steps: list[tuple[str, float]] = field(default_factory=list)

    @property
    def clone(self) -> Path:
        """The repository."""
        return self.folder / "fedaudit"

    @property
    def environment(self) -> dict[str, str]:
        """What a new shell knows."""
        known = {name: value for name, value in os.environ.items() if name.startswith(KEPT)}
        home = Path.home()
        settings = [home / ".config/pip/pip.conf", home / ".pip/pip.conf"]
        if found := [str(path) for path in settings if path.is_file()]:
            known["PIP_CONFIG_FILE"] = found[0]
        known.setdefault("PIP_CACHE_DIR", str(Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache") / "pip"))
        return known | {"HOME": str(self.folder / "home"), "TMPDIR": str(self.folder / "tmp"), "TERM": "dumb"}

    def run(
        self,
        title: str,
        command: str,
        *,
        code: int | Collection[int] = 0,
        makes: Collection[str] = (),
        may: Collection[str] = (),
        limit: float = 120.0,
        installs: bool = False,
    ) -> str:
        """Run a command in the clone, as somebody would type it, and return what it wrote.

        Args:
            title: of the step.
            command: for bash, with the environment that README makes active, once it is there.
            code: of its end; or those that are possible.
            makes: what it makes at the top of the clone.
            may: what it may make there besides.
            limit: seconds that it may take.
            installs: whether pip runs in it, whose warnings about its index are its own.

        Raises:
            Surprise: with the title, and what it was.
        """
        before = self._places()
        active = ". .venv/bin/activate && " if (self.clone / ".venv/bin/activate").is_file() and not installs else ""
        began = time.monotonic()
        done = subprocess.run(
            ["bash", "--noprofile", "--norc", "-c", active + command],
            cwd=self.clone if self.clone.is_dir() else self.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        took = time.monotonic() - began
        written = done.stdout + done.stderr
        self.steps.append((title, took))
        print(f"{took:6.0f} s  {title}", flush=True)
        lines = [line for line in written.splitlines() if not (installs and PIPS.match(line))]
        if done.returncode not in ({code} if isinstance(code, int) else code):
            raise Surprise(f"{title}: exit code {done.returncode}, not {code}\n$ {command}\n{written[-4000:]}")
        if wrong := [line for line in lines if WRONG.search(line)]:
            raise Surprise(f"{title}: {wrong[0]}\n$ {command}\n{written[-4000:]}")
        if unexpected := {new for new in self._places() - before if new not in {*makes, *may}}:
            raise Surprise(f"{title}: wrote {', '.join(sorted(unexpected))}\n$ {command}")
        if missing := [name for name in makes if not (self.clone / name).exists()]:
            raise Surprise(f"{title}: made no {', '.join(missing)}\n$ {command}\n{written[-4000:]}")
        longest = limit * _busy()
        if took > longest:
            raise Surprise(f"{title}: took {took:.0f} s, and {longest:.0f} s were to be enough\n$ {command}")
        return written

    def _places(self) -> set[str]:
        """Return what lies at the top of the clone, and outside of it but where caches are expected."""
        found = {path.name for path in self.clone.iterdir()} if self.clone.is_dir() else set()
        found |= {f"../{path.name}" for path in self.folder.iterdir()} - {"../fedaudit", "../home", "../tmp"}
        found |= {f"../tmp/{path.name}" for path in (self.folder / "tmp").iterdir() if not path.name.startswith(IN_TMP)}
        home = self.folder / "home"
        files = (path.relative_to(home).as_posix() for path in home.rglob("*") if path.is_file())
        return found | {f"~/{path}" for path in files if not path.startswith(IN_HOME)}


def play(hour: Hour, *, docs: bool) -> None:
    """Play the hour.

    Raises:
        Surprise: at the first one.
    """
    inside = {path.name for path in ROOT.iterdir()} | {".git"}
    clone = f"git clone --quiet {shlex.quote(str(ROOT))} fedaudit"
    if not (ROOT / ".git").exists():  # an unpacked archive
        known = "git -c user.name=newcomer -c user.email=newcomer@example.org"
        clone = f"cp -r {shlex.quote(str(ROOT))} fedaudit && cd fedaudit && rm -rf .venv* && git init --quiet && "
        clone += f"git add --all && {known} commit --quiet --message archive"
    hour.run("clone", clone, may=inside)
    hour.run("make audit", "make audit", makes=[".venv", "audit"], limit=600, installs=True)
    _is_report(hour, "audit")
    readme = (hour.clone / "README.md").read_text(encoding="utf-8")
    (shown,) = re.findall(r"^    (fedaudit audit .*)$", readme, re.MULTILINE)
    hour.run("README's scenario: images come out, so the gate shuts", shown, code=1, makes=["my-audit"])
    _is_report(hour, "my-audit")
    (code,) = re.findall(r"^```python\n(.*?)^```", readme, re.MULTILINE | re.DOTALL)
    printed = hour.run("README's five lines", f"python -c {shlex.quote(code)}", makes=["digits-audit"])
    promised = code.splitlines()[-1].split("# ")[1]
    if promised not in printed:
        raise Surprise(f"README's five lines don't print '{promised}'\n{printed[-2000:]}")
    _own_scenario(hour, "mine", "--data digits")
    _own_scenario(hour, "patients", "--data breast-cancer --adversary client")
    hour.run("init overwrites nothing", "fedaudit init mine.yaml", code=2)
    hour.run("a typing error is one line", "fedaudit audit mine.yaml --set attacks.invg.iteration=5", code=2)
    app = "fedaudit init like-app.yaml --yes --data digits --from-flower examples/flower"
    hour.run("init from a Flower app", app, makes=["like-app.yaml"])
    own = "python examples/own_model.py --out own --iterations 200"
    hour.run("a model of one's own", own, makes=["own"], limit=150)
    _is_report(hour, "own")
    gate = "fedaudit audit mine.yaml --out mine-audit --fail-above psnr=1"
    hour.run("a gate, on what is kept already", gate, code=1)
    again = "fedaudit audit mine.yaml --seed 1 --out mine-2 --set attacks.0.iterations=60 --set attacks.1.iterations=60"
    hour.run("the same federation, another seed", again, makes=["mine-2"])
    hour.run("compare", "fedaudit compare mine-audit mine-2", code=(0, 1, 3))  # 3: two seeds of two updates are too few
    hour.run("verify", "fedaudit verify mine-audit")
    listed = hour.run("what there is", "fedaudit --help && fedaudit list && fedaudit doctor")
    if re.search(r"^. explain ", listed, re.MULTILINE):
        hour.run("a word explained", "fedaudit explain psnr")
    hour.run("completion", "fedaudit --show-completion bash | bash -n")
    if docs:
        hour.run("make docs", "make docs", makes=[".venv-docs", "site"], may=["build"], limit=240, installs=True)
        if not (hour.clone / "site/index.html").is_file():
            raise Surprise("make docs made no site/index.html")
    changed = hour.run("nothing of the repository was changed", "git status --porcelain --untracked-files=no")
    if changed.strip():
        raise Surprise(f"the clone was changed:\n{changed}")


def _own_scenario(hour: Hour, name: str, words: str) -> None:
    """Write a scenario, run what init says comes next, and hold it to the minutes that it may take."""
    told = hour.run(f"init {words}", f"fedaudit init {name}.yaml --yes {words}", makes=[f"{name}.yaml"], limit=60)
    match = NEXT.search(told)
    if not match:
        raise Surprise(f"init {words} doesn't say what comes next\n{told}")
    hour.run(f"what init says comes next, on {name}", match[1], makes=[f"{name}-audit"], limit=OWN)
    _is_report(hour, f"{name}-audit")


def _busy() -> float:
    """Return how many times as long everything takes here as where nothing else runs; limits are meant for there."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def _is_report(hour: Hour, folder: str) -> None:
    for name in ("report.html", "results.json", "scenario.yaml"):
        if not (hour.clone / folder / name).is_file():
            raise Surprise(f"there is no {folder}/{name}")


def main() -> int:
    """Play the hour in an empty folder; the exit code is 1 where there was a surprise."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="an empty one, which is left; default: one that goes away")
    parser.add_argument("--without-docs", action="store_true", help="don't build the documentation")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="first-hour-", ignore_cleanup_errors=True) as temporary:
        folder = Path(options.folder or temporary).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            parser.error(f"{folder} isn't empty")
        for name in ("home", "tmp"):
            (folder / name).mkdir()
        (folder / "home/.gitconfig").write_text("[safe]\n\tdirectory = *\n")  # the checkout may be somebody else's
        hour = Hour(folder)
        began = time.monotonic()
        try:
            play(hour, docs=not options.without_docs)
        except Surprise as surprise:
            print(f"surprise: {surprise}", file=sys.stderr)
            return 1
        print(f"{len(hour.steps)} steps without a surprise in {(time.monotonic() - began) / 60:.1f} min")
    return 0


if __name__ == "__main__":
    sys.exit(main())
