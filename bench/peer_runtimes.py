"""The runtimes to compare with, and what each of them can load of a model."""

import importlib.util
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from edgespec.errors import UsageError
from edgespec.manifest import Manifest
from edgespec.system.file_hashes import file_record

GGUF, GENAI_FOLDER = "a .gguf file", "a folder with genai_config.json"


class Runtime(NamedTuple):
    """A program to compare with. name: of its distribution; loads: what it loads; ways: how it decodes."""

    name: str
    module: str
    loads: str
    ways: tuple[str, ...]
    has_draft_model: bool = False

    def is_installed_in(self, python: str) -> bool:
        if python == sys.executable:
            return importlib.util.find_spec(self.module) is not None
        code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({self.module!r}) is None)"
        return subprocess.run([python, "-c", code], check=False).returncode == 0


_NGRAM_WAYS = ("ngram-simple", "ngram-map-k", "ngram-map-k4v", "ngram-mod", "ngram-cache")
# dejavuu's methods that need no corpus and were best in a replay of recorded answers.
_DEJAVUU_WAYS = ("plain", "pld", "suffix-decoding", "suffix-recycle-tail", "asd-verify")
RUNTIMES = {
    runtime.name: runtime
    for runtime in (
        Runtime("xllamacpp", "xllamacpp", GGUF, ("plain", *_NGRAM_WAYS), has_draft_model=True),
        Runtime("onnxruntime-genai", "onnxruntime_genai", GENAI_FOLDER, ("plain", "ngram")),
        Runtime("openvino-genai", "openvino_genai", GGUF, ("plain", "prompt-lookup"), has_draft_model=True),
        Runtime("dejavuu", "dejavuu", GENAI_FOLDER, _DEJAVUU_WAYS),
    )
}


def choose(
    wanted: Sequence[str],
    find: Callable[[Runtime], Path | None],
    report: Callable[[str], None],
    pythons: Mapping[str, str] = MappingProxyType({}),
) -> list[tuple[Runtime, Path]]:
    """The runtimes to compare with, and what each is to load.

    Args:
        wanted: NAME or NAME=PATH; none for all that are installed and have something to load.
        find: Finds what a runtime can load of the model that is measured.
        pythons: The interpreters that have a runtime, by its name, where it is not this one.

    Raises:
        UsageError: A runtime that was named is unknown, not installed, or has nothing to load.
    """
    named = dict(each.partition("=")[::2] for each in wanted)
    for name in (named.keys() | pythons.keys()) - RUNTIMES.keys():
        raise UsageError(f"no runtime {name!r}; wanted {', '.join(RUNTIMES)}, or NAME=PATH")
    chosen = []
    for name, runtime in RUNTIMES.items():
        if named and name not in named:
            continue
        try:
            chosen.append((runtime, _path_for(runtime, named.get(name), find, pythons.get(name, sys.executable))))
        except UsageError as error:
            if named:
                raise
            report(str(error))
    return chosen


def _path_for(runtime: Runtime, stated: str | None, find: Callable[[Runtime], Path | None], python: str) -> Path:
    name = runtime.name
    if not runtime.is_installed_in(python):
        raise UsageError(
            f"{name} is not installed; to compare with it: pip install {name}, or --python {name}=PYTHON with an "
            "interpreter that has it"
        )
    path = Path(stated) if stated else find(runtime)
    if path is None:
        raise UsageError(
            f"{name} has nothing to load; to compare with it, name {runtime.loads}: --against {name}=PATH"
        )
    if not path.exists():
        raise UsageError(f"{path} does not exist; {name} loads {runtime.loads}")
    return path


def find_source(
    runtime: Runtime, model: str, folder: Path | None, downloads: Path, manifest: Manifest
) -> Path | None:
    """What a runtime can load of a model: the very file that it was exported from, or its folder.

    Args:
        model: As the user named it.
        folder: The model's folder; None where it is no folder.
        downloads: Where the files of named models are kept.
    """
    if runtime.loads == GENAI_FOLDER:
        return folder if folder and (folder / "genai_config.json").is_file() else None
    source = manifest.source
    for path in (Path(model), downloads / Path(source.name).name):
        if path.suffix == ".gguf" and path.is_file() and file_record(path).sha256 == source.sha256:
            return path
    return None
