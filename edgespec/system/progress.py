"""How far a long piece of work is, in numbers for a bar of progress. Knows nothing of the work."""

from collections.abc import Callable
from typing import NamedTuple


class LoadProgress(NamedTuple):
    """How far a stage of loading a model is.

    stage: download, export or open; each may come several times, for one file or model after another.
    name: The file that is fetched, or the model.
    total_bytes: Of an export the most that it may write.
    """

    stage: str
    name: str
    done_bytes: int
    total_bytes: int


ReportProgress = Callable[[LoadProgress], None]
