"""Helpers that know nothing of federated learning; every package may use them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedaudit.utils.lazy import lazy

if TYPE_CHECKING:
    from fedaudit.utils.bounds import BOOSTER, GRID, STORE, TENSORS, check_file, read_bytes
    from fedaudit.utils.errors import (
        BadInput,
        CorruptTranscript,
        FedAuditError,
        MissingData,
        NotApplicable,
        unknown_name,
    )
    from fedaudit.utils.fingerprint import (
        computation,
        device_name,
        file_digest,
        tensor_digest,
    )
    from fedaudit.utils.fingerprint import (
        fingerprint as fingerprint_of,
    )
    from fedaudit.utils.finite import all_finite
    from fedaudit.utils.folders import check_folder, inside, temporary_folder
    from fedaudit.utils.image_bytes import decode
    from fedaudit.utils.integrity import check_listed, check_text, digest_text
    from fedaudit.utils.machine import (
        full_precision,
        import_torchvision,
        one_thread,
        own_process,
        peak_memory,
        proc_field,
        start_measuring_memory,
    )
    from fedaudit.utils.native import native_code
    from fedaudit.utils.plain_yaml import dumps as dump_yaml
    from fedaudit.utils.plain_yaml import loads as load_yaml
    from fedaudit.utils.plain_yaml import read as read_yaml
    from fedaudit.utils.processes import WorkerDied, end_with, keep_workers, run_tasks, tell
    from fedaudit.utils.progress import Display, Quiet, Report, live_display, wide_console
    from fedaudit.utils.registry import Registry, make
    from fedaudit.utils.seeds import derive_seed, generator
    from fedaudit.utils.validation import (
        Count,
        Fraction,
        NonNegative,
        Number,
        Positive,
        Share,
        Spec,
        Title,
        Whole,
        explain,
        no_boolean,
    )
    from fedaudit.utils.winograd import flop_counters
    from fedaudit.utils.words import many, one_of
else:
    __getattr__, __dir__ = lazy(__name__)

__all__ = [
    "BOOSTER",
    "GRID",
    "STORE",
    "TENSORS",
    "BadInput",
    "CorruptTranscript",
    "Count",
    "Display",
    "FedAuditError",
    "Fraction",
    "MissingData",
    "NonNegative",
    "NotApplicable",
    "Number",
    "Positive",
    "Quiet",
    "Registry",
    "Report",
    "Share",
    "Spec",
    "Title",
    "Whole",
    "WorkerDied",
    "all_finite",
    "check_file",
    "check_folder",
    "check_listed",
    "check_text",
    "computation",
    "decode",
    "derive_seed",
    "device_name",
    "digest_text",
    "dump_yaml",
    "end_with",
    "explain",
    "file_digest",
    "fingerprint_of",
    "flop_counters",
    "full_precision",
    "generator",
    "import_torchvision",
    "inside",
    "keep_workers",
    "live_display",
    "load_yaml",
    "make",
    "many",
    "native_code",
    "no_boolean",
    "one_of",
    "one_thread",
    "own_process",
    "peak_memory",
    "proc_field",
    "read_bytes",
    "read_yaml",
    "run_tasks",
    "start_measuring_memory",
    "tell",
    "temporary_folder",
    "tensor_digest",
    "unknown_name",
    "wide_console",
]
