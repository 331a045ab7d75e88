"""Before the weights of a model are fetched: whether it may be prepared here, and from which file."""

from pathlib import Path

from edgespec.errors import ModelError
from edgespec.memory.free_memory import total_memory
from edgespec.setup.catalog import CATALOG
from edgespec.setup.repository import HubId, parse_hub_id
from edgespec.setup.snapshot import Preview, require_files
from edgespec.system.disk import require_disk_space
from edgespec.types import Report


def judge(models: Path, precision: str, form: str, preview: Preview) -> None:
    """Raises what speaks against preparing a model for this machine, in the folder for models."""
    from edgespec.export.options import ExportOptions  # 0.3 s, and only a first use needs it
    from edgespec.export.plan import foresee_cost, require_memory

    cost = foresee_cost(preview.path, ExportOptions(precision=precision, form=form), preview.sizes)
    if form == "cpu":
        require_memory(cost, total_memory())
    require_disk_space(models, preview.fetch_bytes + cost.write_bytes)


def published(name: str, folder: Path, report: Report, *, offline: bool) -> HubId | None:
    """The file in 4 bits that the makers of a catalogue model publish; None where it cannot be had.

    folder: For what is fetched from the hub.
    """
    gguf = parse_hub_id(CATALOG[name].gguf) if name in CATALOG else None
    if gguf is not None:
        try:
            require_files(gguf, folder, offline=offline)
        except ModelError as error:
            report(f"taking safetensors, which are three times as large: {error}")
            return None
    return gguf
