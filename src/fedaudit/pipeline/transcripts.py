"""Simulations that go to disk: a folder with the transcript and its truth, or one for each federation."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fedaudit.pipeline.prepare import resolve
from fedaudit.pipeline.run import record
from fedaudit.scenario.scenario import Scenario
from fedaudit.simulation.simulator import Recording
from fedaudit.transcript.files import INDEX
from fedaudit.transcript.rounds import check_new
from fedaudit.transcript.truth import save_recording
from fedaudit.utils.errors import BadInput
from fedaudit.utils.folders import check_folder
from fedaudit.utils.progress import Display


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """Yield the folder in which a killed simulation goes on; what ``whole`` in it is then becomes the new ``out``."""
    partial = out.with_name(out.name + ".partial")
    if (out / INDEX).is_file() or any(out.glob(f"*/{INDEX}")):
        shutil.rmtree(partial, ignore_errors=True)  # of a run that was killed when all was done
    check_new(out)
    check_folder(out)
    shutil.rmtree(partial / "whole", ignore_errors=True)  # of an earlier try
    yield partial
    try:
        (partial / "whole").replace(out)
    except OSError as error:
        raise BadInput(f"can't write the transcript to '{out}': {error.strerror or error}") from None
    shutil.rmtree(partial, ignore_errors=True)


def simulate_all(
    scenario: Scenario, out: Path, *, data_dir: Path | None, workers: int, display: Display
) -> list[Recording]:
    """Simulate every federation of ``scenario`` and write the transcript and the truth of each to ``out/NAME``.

    ``out`` appears at once; the same call goes on where a long one was killed.
    """
    with new_folder(out) as partial:
        resolved = resolve(scenario, data_dir=data_dir, display=display)
        recordings = record(resolved, workers=workers, store=partial, display=display)
        for recording in recordings:
            save_recording(recording.transcript, recording.truth, partial / "whole" / recording.transcript.name)
    return recordings


def check_single(folder: Path) -> None:
    """Raise BadInput for a folder that holds no transcript, but whose folders do."""
    if folder.is_dir() and not (folder / INDEX).is_file():
        within = sorted(str(path.parent) for path in folder.glob(f"*/{INDEX}"))
        if within:
            raise BadInput(f"'{folder}' holds {len(within)} transcripts; attack one at a time: {', '.join(within)}")
