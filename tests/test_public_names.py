"""The names that `import edgespec` gives."""

import edgespec


def test_every_public_name_is_there_and_is_listed() -> None:
    assert all(getattr(edgespec, name) is not None for name in edgespec.__all__)
    assert set(edgespec.__all__) <= set(dir(edgespec))
