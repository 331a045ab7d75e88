"""What there is on this machine, and whether it works: versions, memory, devices, and a short test of a model."""

import platform
import shutil
import sys
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil

from edgespec import __version__
from edgespec.config import config_path, settings
from edgespec.errors import DeviceUnavailable, UsageError
from edgespec.exactness import compare
from edgespec.gate import FixedGate
from edgespec.home import default_home
from edgespec.loading import load
from edgespec.runtimes.devices import import_onnxruntime
from edgespec.runtimes.discovery import Discovery, discover
from edgespec.runtimes.hardware import cores
from edgespec.sampling import SamplingParams

_PROMPTS = (
    "Repeat this sentence three times: the quick brown fox jumps over the lazy dog.",
    "List ten animals, one on each line.",
)
_NUM_TOKENS = 24  # of an answer of the self-test
_DRAFT_LENGTH = 4


@dataclass(frozen=True, kw_only=True)
class SelfTest:
    """Of a model: whether drafted text is its own, and a first idea of how fast it is, in tokens a second."""

    model: str
    num_tokens: int
    num_defects: int
    plain_tokens_per_second: float
    tokens_per_second: float
    drafter: str


def machine() -> dict[str, Any]:
    """What is installed, what is set, and what there is room for, as one document."""
    memory = psutil.virtual_memory()
    return {
        "edgespec": __version__,
        "python": platform.python_version(),
        "numpy": version("numpy"),
        "platform": f"{platform.system()} {platform.machine()}",
        "onnxruntime": _runtime(),
        "cores": asdict(cores()),
        "memory": {"total_bytes": memory.total, "available_bytes": memory.available},
        **_places(),
    }


def _places() -> dict[str, Any]:
    """The configuration and the model home, which it may name."""
    config: dict[str, Any] = {"path": str(config_path()), "set": [], "problem": None}
    try:
        config["set"] = sorted(settings())
        home = default_home()
    except UsageError as error:
        return {"config": {**config, "problem": str(error)}, "home": None}
    there = next(folder for folder in (home, *home.absolute().parents) if folder.is_dir())
    return {"config": config, "home": {"path": str(home), "free_bytes": shutil.disk_usage(there).free}}


def _runtime() -> dict[str, Any]:
    """What ONNX Runtime offers, or what is wrong with it."""
    try:
        found = list(import_onnxruntime().get_available_providers())
    except DeviceUnavailable as error:
        return {"version": None, "providers": [], "problem": str(error)}
    return {"version": sys.modules["onnxruntime"].__version__, "providers": found, "problem": None}


def devices() -> Discovery:
    """Raises DeviceUnavailable: ONNX Runtime is not sound."""
    return discover()


def stated(found: Discovery) -> dict[str, Any]:
    """What was discovered as one document."""
    unused = [{**asdict(each), "mend": mend} for each, mend in found.unused]
    return {"devices": [asdict(device) for device in found.devices], "unused": unused}


def self_test(folder: Path, num_threads: int | None) -> SelfTest:
    """Compare drafted text with plain text token by token, and time an answer of each. Takes seconds.

    Raises:
        EdgeSpecError: The model does not load.
    """
    with load(folder, num_threads=num_threads, deterministic=True, offline=True) as engine:
        compared = compare(
            engine.target,
            [engine.encode(prompt) for prompt in _PROMPTS],
            lambda: {"fixed": FixedGate(engine.speculation.drafters(), _DRAFT_LENGTH)},
            [SamplingParams(), SamplingParams(temperature=0.8, seed=7)],
            max_tokens=_NUM_TOKENS,
            ends=engine.manifest.eos_token_ids,
        )
    speeds, drafter = [], ""
    for asked in ("none", "auto"):
        with load(folder, drafter=asked, num_threads=num_threads, offline=True) as engine:
            engine.generate(_PROMPTS[0], max_tokens=2)
            answer = engine.generate(_PROMPTS[0], max_tokens=2 * _NUM_TOKENS)
            speeds.append(answer.stats.decode_tokens_per_second or 0.0)
            drafter = engine.speculation.name
    return SelfTest(
        model=str(folder),
        num_tokens=compared.num_tokens,
        num_defects=len(compared.differences),
        plain_tokens_per_second=speeds[0],
        tokens_per_second=speeds[1],
        drafter=drafter,
    )
