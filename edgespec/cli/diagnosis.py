"""A report on whether edgespec works on this machine: versions, memory, devices, a short test of a model."""

import platform
import shutil
import sys
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil

import edgespec
from edgespec import DeviceUnavailable, SamplingParams, UsageError, in_flags
from edgespec.config.config_file import config_path, default_home, read_settings
from edgespec.evaluation.exactness import compare

_PROMPTS = (
    "Repeat this sentence three times: the quick brown fox jumps over the lazy dog.",
    "List ten animals, one on each line.",
)
_NUM_TOKENS = 24  # per answer of the self-test
_DRAFT_LENGTH = 4


def machine_document() -> dict[str, Any]:
    """Versions, cores, memory, configuration and model home."""
    return {
        "edgespec": edgespec.__version__,
        "python": platform.python_version(),
        "numpy": version("numpy"),
        "platform": f"{platform.system()} {platform.machine()}",
        "onnxruntime": _runtime_document(),
        "cores": asdict(edgespec.cores()),
        "memory": memory_document(),
        **_settings_document(),
    }


def memory_document(
    read_free: edgespec.ReadFreeMemory = edgespec.free_memory, read_pressure: edgespec.ReadPressure | None = None
) -> dict[str, Any]:
    """The memory that this process may take, the reserve beside drafter models, and whether programs go short."""
    memory, free, pressure = psutil.virtual_memory(), read_free(), (read_pressure or edgespec.PressureReader())()
    return {
        "total_bytes": memory.total,
        "available_bytes": memory.available,
        "free_bytes": free.free_bytes,
        "bound": free.bound,
        "reserve_bytes": free.reserve.opening_bytes,
        "pressure": pressure.level.name.lower(),
        "pressure_sign": pressure.sign,
    }


def _settings_document() -> dict[str, Any]:
    config: dict[str, Any] = {"path": str(config_path()), "set": [], "problem": None}
    try:
        # An origin is a variable, or a file with a line.
        stated = read_settings().items()
        config["set"] = sorted(name if ":" in each.origin else each.origin for name, each in stated)
        home = default_home()
        existing = next(each for each in (home, *home.absolute().parents) if each.exists())
        if not existing.is_dir():
            raise UsageError(f"the model home is {home}, and {existing} is not a folder; set EDGESPEC_HOME to one")
    except UsageError as error:
        return {"config": {**config, "problem": in_flags(str(error))}, "home": None}
    download_bytes = sum(each.bytes for each in edgespec.ModelHome(home).downloads)
    place = {"path": str(home), "free_bytes": shutil.disk_usage(existing).free, "download_bytes": download_bytes}
    return {"config": config, "home": place}


def _runtime_document() -> dict[str, Any]:
    try:
        found = list(edgespec.import_onnxruntime().get_available_providers())
    except DeviceUnavailable as error:
        return {"version": None, "providers": [], "problem": in_flags(str(error))}
    return {"version": sys.modules["onnxruntime"].__version__, "providers": found, "problem": None}


def self_test(folder: Path, num_threads: int | None) -> dict[str, Any]:
    """Compare drafted text with plain text token by token, and time one short answer of each. Takes seconds.

    Raises EdgeSpecError: The model does not load.
    """
    with (
        edgespec.load(folder, num_threads=num_threads, offline=True, report=lambda line: None) as engine,
        engine.speculation.hold(),
    ):
        compared = compare(
            engine.target,
            [engine.encode(prompt) for prompt in _PROMPTS],
            lambda: {"fixed": engine.speculation.fixed(_DRAFT_LENGTH)},
            # Elsewhere noise decides sampled tokens as well, so that no margin of logits explains a difference.
            [SamplingParams()] + [SamplingParams(temperature=0.8, seed=7)] * engine.is_deterministic,
            max_tokens=_NUM_TOKENS,
            ends=engine.manifest.eos_token_ids,
        )
        is_deterministic = engine.is_deterministic
    speeds, names = [], []
    for drafter in ("none", "auto"):
        with edgespec.load(
            folder, drafter=drafter, num_threads=num_threads, offline=True, report=lambda line: None
        ) as engine:
            engine.generate(_PROMPTS[0], max_tokens=2, temperature=0.0)
            answer = engine.generate(_PROMPTS[0], max_tokens=2 * _NUM_TOKENS, temperature=0.0)
            speeds.append(answer.stats.decode_tokens_per_second or 0.0)
            names.append(engine.speculation.name)
    return {
        "model": str(folder),
        "num_tokens": compared.num_tokens,
        "deterministic": is_deterministic,
        "num_differences": len(compared.differences),
        "num_defects": sum(is_deterministic or not each.is_near_tie for each in compared.differences),
        "plain_tokens_per_second": speeds[0],
        "tokens_per_second": speeds[1],
        "drafter": names[1],
    }
