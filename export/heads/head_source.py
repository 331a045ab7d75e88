"""A drafting head as read, without its weights, and the plan of its folder. Knows nothing of graphs."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgespec.errors import SourceError
from edgespec.export.nodes import Graphs
from edgespec.export.precision import Rule
from edgespec.export.safetensors import StoredIntegers, read_tensors, weight_files
from edgespec.export.settings import SourceSettings, read_json, translate_unusual
from edgespec.export.sources import LoadedSource, join_hashes
from edgespec.export.tensors import NO_SIZES, Sizes, Tensors
from edgespec.export.weights import WeightsFile
from edgespec.manifest import Head, Manifest, Source
from edgespec.manifest.caches import KVCache
from edgespec.system.split_files import source_name
from edgespec.types import TokenIds

_PICKLES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")
_CONVERT = (
    'python -c "import sys, torch, safetensors.torch as s; '
    "s.save_file({n: t.clone().contiguous() for n, t in torch.load(sys.argv[1], weights_only=True).items()}, "
    "'model.safetensors')\" FILE"
)

FUSE_GRAPH, STEP_GRAPH = "model_fuse.onnx", "model_step.onnx"


@dataclass(frozen=True, kw_only=True)
class HeadSource:
    """A head as read; only settings and headers are in memory.

    integers: Lists of integers, such as the token of each row of a trimmed vocabulary head.
    """

    path: Path
    settings: SourceSettings
    tensors: Tensors
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
        return Source(name=source_name(self.path), format="safetensors", sha256=join_hashes(files))


def read_head(source: Path, sizes: Sizes = NO_SIZES) -> HeadSource:
    """Read a folder with config.json and safetensors files, or one such file with config.json beside it.

    sizes: Of files of which only the header is here.

    Raises SourceError: It is missing or broken, has no config.json, or its weights are pickled.
    """
    with translate_unusual(source):
        if not source.exists():
            raise SourceError(f"{source} does not exist; give a folder with config.json and safetensors weights")
        folder = source if source.is_dir() else source.parent
        files = weights_of_head(source)
        if folder != source and not (folder / "config.json").exists():
            raise SourceError(f"{source} has no config.json beside it, which states its sizes; fetch that too")
        settings = read_json(folder / "config.json")
        tensors, integers = read_tensors(files, sizes)
    return HeadSource(
        path=source, settings=SourceSettings(folder / "config.json", settings), tensors=tensors, integers=integers
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
    """True if a file's name is that of a pickle, which is never opened."""
    return path.suffix in _PICKLES


def _pickled(path: Path) -> SourceError:
    return SourceError(
        f"{path} is a pickle, which is never opened, since opening one can run code that it brings; if you trust "
        f"it, convert it where PyTorch is installed: {_CONVERT}"
    )


def nested(settings: SourceSettings, key: str) -> Mapping[str, Any]:
    """An object within a configuration; empty where there is none.

    Raises SourceError: The value is something else.
    """
    found = settings.get(key, {})
    if not isinstance(found, dict):
        raise SourceError(f"{settings.path}: {key} is {found!r}, wanted an object")
    return found


WriteGraphs = Callable[[Manifest, Tensors, WeightsFile, Rule], Graphs]
"""Writes the weights and gives the graphs by file name: those that the manifest names."""


@dataclass(frozen=True, kw_only=True)
class HeadPlan:
    """The contents of a head's folder, in whatever precision and form.

    graph: The file of its main graph.
    has_trees: Another graph runs trees.
    tensors: All weights by role, those of the target among them.
    borrowed: What the head has no weights of and takes from its target, for messages.
    tokens: The target's token of each row of the vocabulary head, ascending, [num_rows]; None where each token has
        a row.
    vocabulary_heads: Roles of all tensors that have a row for each token which can be drafted.
    sliding_window: How many tokens layers see that do not see all.
    """

    head: Head
    kv_cache: KVCache
    tensors: Tensors
    write_graphs: WriteGraphs
    borrowed: tuple[str, ...] = ()
    tokens: TokenIds | None = None
    vocabulary_heads: tuple[str, ...] = ("head",)
    graph: str = "model.onnx"
    has_trees: bool = False
    sliding_window: int | None = None


@dataclass(frozen=True, kw_only=True)
class Dialect:
    """A format in which heads are published.

    recognizes: True if a head is in this format, by its settings and the names of its tensors.
    plan: Plans the folder of such a head for a target. Raises SourceError or VocabularyMismatch: They do not fit.
    """

    name: str
    recognizes: Callable[[HeadSource], bool]
    plan: Callable[[HeadSource, LoadedSource], HeadPlan]
