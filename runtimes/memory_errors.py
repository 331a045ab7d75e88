"""Tells errors of memory by their words: ONNX Runtime raises no error of its own for that."""

from edgespec.system.tables import read_table

SAYINGS: dict[str, str] = read_table(__file__, "memory_errors.toml")


def is_memory_error(error: BaseException) -> bool:
    """True if memory was refused, by the error's type or by what it says."""
    message = str(error).lower()
    return isinstance(error, MemoryError) or any(words in message for words in SAYINGS)
