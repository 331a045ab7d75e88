"""Read a drafting head but its weights: config.json and safetensors files. Knows nothing of what heads compute."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgespec.errors import SourceError
from edgespec.export.safetensors import StoredIntegers, read_tensors, weight_files
from edgespec.export.settings import Settings, read_json, translate_unusual
from edgespec.export.sources import join_hashes
from edgespec.export.tensors import StoredTensor
from edgespec.manifest import Source
from edgespec.system.split_files import utf8_name

_PICKLES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")
_CONVERT = (
    'python -c "import sys, torch, safetensors.torch as s; '
    "s.save_file({n: t.clone().contiguous() for n, t in torch.load(sys.argv[1], weights_only=True).items()}, "
    "'model.safetensors')\" FILE"
)


@dataclass(frozen=True, kw_only=True)
class HeadSource:
    """A head as read; only settings and headers are in memory.

    integers: Lists of integers, such as the token of each row of a trimmed vocabulary head.
    """

    path: Path
    settings: Settings
    tensors: Mapping[str, StoredTensor]
    integers: Mapping[str, StoredIntegers]

    @property
    def architectures(self) -> tuple[str, ...]:
        found = self.settings.get("architectures", ())
        return tuple(map(str, found)) if isinstance(found, list) else ()

    @property
    def weights_bytes(self) -> int:
        return sum(tensor.num_bytes for tensor in self.tensors.values())

    def source(self) -> Source:
        """Its name and the hashes of its files, which are read for them."""
        paths = [tensor.path for tensor in self.tensors.values()]
        files = sorted({*paths, *(one.path for one in self.integers.values())})
        return Source(name=utf8_name(self.path.resolve().name), format="safetensors", sha256=join_hashes(files))


def read_head(source: Path) -> HeadSource:
    """Read a folder with config.json and safetensors files, or one such file with config.json beside it.

    Raises SourceError: It is missing or broken, has no config.json, or its weights are pickled.
    """
    with translate_unusual(source):
        if not source.exists():
            raise SourceError(f"{source} does not exist; give a folder with config.json and safetensors weights")
        folder = source if source.is_dir() else source.parent
        files = weights_of_head(source)
        settings = read_json(folder / "config.json")
        tensors, integers = read_tensors(files)
    return HeadSource(
        path=source, settings=Settings(folder / "config.json", settings), tensors=tensors, integers=integers
    )


def weights_of_head(source: Path) -> list[Path]:
    """The safetensors files of a head.

    Raises SourceError: There are none; pickles are never opened, and the message says so.
    """
    if not source.is_dir():
        if is_pickle(source):
            raise _pickled(source)
        return [source]
    if (source / "model.safetensors.index.json").exists() or (source / "model.safetensors").exists():
        return weight_files(source)
    found = sorted(path for path in source.iterdir() if path.is_file())
    safe = [path for path in found if path.suffix == ".safetensors"]
    if len(safe) == 1:  # heads have names of their own, such as medusa_lm_head.safetensors
        return safe
    if safe:
        raise SourceError(f"{source} holds {len(safe)} safetensors files and no index; name one of them")
    if pickles := [path for path in found if is_pickle(path)]:
        raise _pickled(pickles[0])
    raise SourceError(f"{source} has no safetensors file; it is not a complete head, fetch it again")


def is_pickle(path: Path) -> bool:
    """Whether a file's name is that of a pickle, which is never opened."""
    return path.suffix in _PICKLES


def _pickled(path: Path) -> SourceError:
    return SourceError(
        f"{path} is a pickle, which is never opened, since opening one can run code that it brings; if you trust "
        f"it, convert it where PyTorch is installed: {_CONVERT}"
    )


def nested(settings: Settings, key: str) -> Mapping[str, Any]:
    """An object within a configuration; empty where there is none.

    Raises SourceError: The value is something else.
    """
    found = settings.get(key, {})
    if not isinstance(found, dict):
        raise SourceError(f"{settings.path}: {key} is {found!r}, wanted an object")
    return found
