"""A user's object by its name: an import that fails is told by its own words."""

from pathlib import Path

import pytest

from fedaudit.utils.errors import BadInput
from fedaudit.utils.objects import load_object


@pytest.mark.parametrize(
    ("name", "raises", "words"),
    [
        ("lacks_a_module", "import nobody_has_this", "there is no module 'nobody_has_this'"),
        # transformers raises its own, without a name, where a part of it doesn't import
        (
            "nameless",
            "raise ModuleNotFoundError('Could not import BertModel')",
            "nameless fails: Could not import BertM",
        ),
    ],
)
def test_a_module_that_does_not_import(
    name: str, raises: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / f"{name}.py").write_text(raises + "\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(BadInput) as refused:
        load_object(f"{name}:make", "--model")
    assert words in str(refused.value)
    assert "None" not in str(refused.value)
