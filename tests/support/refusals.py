"""Sources that an export has to refuse."""

from pathlib import Path

import pytest

from edgespec.errors import EdgeSpecError, SourceError
from edgespec.export.convert import export_model


def assert_refused(source: Path, folder: Path, *words: str, error: type[EdgeSpecError] = SourceError) -> None:
    output = folder / "made" / "out"
    with pytest.raises(error) as raised:
        export_model(source, output)
    for word in words:
        assert word in str(raised.value)
    assert not output.exists()
    assert not output.parent.exists() or list(output.parent.iterdir()) == [], "something half written was left"
