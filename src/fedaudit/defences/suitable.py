"""Which defences are worth trying against what an attack recovers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

_DP = {"name": "dp", "client_defence": {"name": "dp", "clip": 1.0, "noise": 0.1, "epsilon": None}}
_STRONG_DP = {"name": "dp-strong", "client_defence": {"name": "dp", "clip": 1.0, "noise": 1.0, "epsilon": None}}
# By what an attack recovers: what withholds or blurs single updates, or keeps malicious ones out.
FITTING: dict[str, tuple[dict[str, Any], ...]] = {
    "training images": (_DP, {"name": "dgc", "client_defence": "dgc"}, {"name": "ffl", "client_defence": "ffl"}),
    "labels": (_DP, _STRONG_DP, {"name": "sign", "client_defence": "sign"}),
    "label-sets": (_DP, _STRONG_DP, {"name": "sign", "client_defence": "sign"}),
    "membership": (_DP, _STRONG_DP, {"name": "top-k", "client_defence": "top-k"}),
    "attributes": (_DP, _STRONG_DP, {"name": "top-k", "client_defence": "top-k"}),
    "local models": (_DP, _STRONG_DP, {"name": "top-k", "client_defence": "top-k"}),
    "images of a class": (
        {"name": "inferguard", "aggregator": "inferguard"},
        {"name": "multi-krum", "aggregator": "multi-krum"},
        {"name": "median", "aggregator": "median"},
    ),
}


def suitable(recovered: Iterable[str], *, summed: bool = False) -> tuple[dict[str, Any], ...]:
    """Return three defences that fit what the first attack recovers, as a scenario names them.

    ffl can't be ``summed`` (clients leave out layers each, and what isn't sent by all can't be added up): strong noise.
    """
    fitting = FITTING.get(next(iter(recovered), ""), FITTING["training images"])
    return tuple(_STRONG_DP if summed and defence["name"] == "ffl" else defence for defence in fitting)
