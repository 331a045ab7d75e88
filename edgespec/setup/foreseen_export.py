"""Before a model is prepared: if it may be here, from which file, and if in half floats for an NVIDIA GPU.

Half floats are chosen where reading them costs no time of its own. There 16 rows cost what one costs, so that
drafts cost nothing, and blocks with minima (Q4_1, Q4_K) start 240 more kernels a pass. A pass waits 2.5 ms for the
host, and GPUs read a 24th of their memory in 1 to 1.5 ms. Of a larger model the pass would take longer in fp16
than in 4 bits (docs/log/devices.md).
"""

import shutil
from pathlib import Path

from edgespec.errors import ModelError, NotOnHub
from edgespec.memory.free_memory import total_memory
from edgespec.setup.catalog import CATALOG
from edgespec.setup.repository import HubId, parse_hub_id
from edgespec.setup.snapshot import HubFolder, Preview
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


def published(name: str, hub: HubFolder) -> HubId | None:
    """The file in 4 bits that the makers of a catalogue model publish; None where there is none.

    Offline none is what was never fetched. Raises ModelError: The hub does not answer.
    """
    gguf = parse_hub_id(CATALOG[name].gguf) if name in CATALOG else None
    if gguf is not None:
        try:
            hub.choose(gguf)
        except ModelError as error:
            if not (isinstance(error, NotOnHub) or hub.is_offline):
                raise
            hub.report(f"using safetensors, which are three times as large: {error}")
            return None
    return gguf


_PARTS = 24  # of a GPU's memory, of which fp16 weights take one at most
_DISK_RESERVE_BYTES = 2 << 30


def prefers_half_floats(source: Path, usual: str, folder: Path, gpu_bytes: int, report: Report) -> bool:
    """True if a source is prepared in fp16 for a GPU, and not in its usual precision; says what decides.

    Args:
        folder: Where models are prepared.
        gpu_bytes: The memory of the GPU.

    Raises as plan_model does.
    """
    if usual == "source" and not source.is_file():  # safetensors, which are floating point
        return False
    from edgespec.export.options import ExportOptions  # 0.3 s, and only a first use needs it
    from edgespec.export.plan import plan_model

    planned = plan_model(source, ExportOptions(precision="fp16", form="gpu"))
    if usual == "source" and not any(tensor.is_blocks for tensor in planned.loaded.tensors.values()):
        return False
    instead = f"preparing in {'the precision of the source' if usual == 'source' else usual}"
    weights = planned.cost.write_bytes
    found = f"its weights in fp16 take {_gigabytes(weights)} of the GPU's {_gigabytes(gpu_bytes)}"
    if not are_read_at_once(weights, gpu_bytes):
        report(f"{instead}: {found}, more than a {_PARTS}th")
        return False
    free = shutil.disk_usage(folder).free
    if weights + _DISK_RESERVE_BYTES > free:
        report(f"{instead}: fp16 takes more than the {_gigabytes(free)} free on disk")
        return False
    report(
        f"preparing in fp16, in which drafts cost least: {found}; to use {usual} instead, add :{usual} to the name"
    )
    return True


def fits_in_half_floats(prepared: Path, gpu_bytes: int) -> bool:
    """True if a GPU reads the files of a folder that is prepared in fp16 in no time of its own."""
    return are_read_at_once(sum(each.stat().st_size for each in prepared.iterdir() if each.is_file()), gpu_bytes)


def are_read_at_once(weights_bytes: int, gpu_bytes: int) -> bool:
    """True if a GPU reads weights in no time of its own."""
    return weights_bytes * _PARTS <= gpu_bytes


def _gigabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB"
