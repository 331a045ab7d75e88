"""A precision that passes its check where another loses too much, found by trying."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Protocol

from edgespec.errors import DiskFull, MemoryExhausted, PrecisionLoss, SourceError, UsageError
from edgespec.manifest import Manifest
from edgespec.types import Report

_MORE_EXACT = ("w8a16", "int4", "int8", "source", "fp16", "fp32")


class ExportAs(Protocol):
    """Exports the source in a precision to an output."""

    def __call__(self, precision: str, output: Path, report: Report, *, is_quick: bool) -> Manifest: ...


def find_passing(export: ExportAs, precision: str, form: str, output: Path, report: Report) -> str:
    """Try more exact precisions on a short text, and say which one passes."""
    if form == "npu":
        return "Choose --precision fp16 or fp32, or the cpu form"
    for other in _MORE_EXACT[_MORE_EXACT.index(precision) + 1 :]:
        report(f"{precision} loses too much; trying {other}")
        try:
            with TemporaryDirectory(prefix=f".{output.name}.", dir=output.parent) as folder:
                check = export(other, Path(folder) / other, lambda line: None, is_quick=True).check
        except (PrecisionLoss, DiskFull, MemoryExhausted, SourceError, UsageError):
            continue
        if check is not None:
            return (
                f"{other} passes, with a divergence of {check.divergence:.3g}: choose --precision {other}, or "
                f"NAME:{other}"
            )
    return "No other precision was found to pass: report this model"
