"""Whether a source is prepared in half floats for an NVIDIA GPU: where these and the KV cache leave room there.

There 16 rows of fp16 cost what one costs, so that drafts cost nothing, and blocks with minima (Q4_1, Q4_K) start
240 more kernels a pass (docs/log/devices.md).
"""

import shutil
from pathlib import Path

from edgespec.types import Report

_SHARE = 0.6  # of the memory: the rest is for a drafter, workspace and other programs
_CONTEXT = 8192  # tokens of the cache, at most
_HALF_BYTES = 2
_DISK_RESERVE_BYTES = 2 << 30


def prefers_half_floats(source: Path, folder: Path, gpu_bytes: int, report: Report) -> bool:
    """True if a source of blocks is prepared in fp16 for a GPU; says what decides.

    Args:
        folder: Where models are prepared.
        gpu_bytes: The memory of the GPU.

    Raises as plan_model does.
    """
    if not source.is_file():  # safetensors, which are floating point
        return False
    from edgespec.export.options import ExportOptions  # 0.3 s, and only a first use needs it
    from edgespec.export.plan import plan_model

    planned = plan_model(source, ExportOptions(precision="fp16", form="gpu"))
    if not any(tensor.is_blocks for tensor in planned.loaded.tensors.values()):
        return False
    config, weights = planned.loaded.config, planned.cost.write_bytes
    values = 2 * config.num_layers * config.num_kv_heads * config.head_dim
    cache = _HALF_BYTES * values * min(config.context_length, _CONTEXT)
    needed = f"{_gigabytes(weights + cache)} of the GPU's {_gigabytes(gpu_bytes)}"
    found = f"its weights in fp16 and the cache take {needed}"
    if weights + cache > _SHARE * gpu_bytes:
        report(f"preparing in the precision of the source: {found}, more than {_SHARE:.0%}")
        return False
    free = shutil.disk_usage(folder).free
    if weights + _DISK_RESERVE_BYTES > free:
        report(
            f"preparing in the precision of the source: fp16 takes more than the {_gigabytes(free)} free on disk"
        )
        return False
    report(
        f"preparing in fp16, in which drafts cost least: {found}; name the model with :source for its own blocks"
    )
    return True


def fits_in_half_floats(prepared: Path, gpu_bytes: int) -> bool:
    """True if the files of a folder that is prepared in fp16 leave room on a GPU."""
    return sum(each.stat().st_size for each in prepared.iterdir() if each.is_file()) <= _SHARE * gpu_bytes


def _gigabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB"
