"""The model home, EDGESPEC_HOME: from the name of a model to a folder that is ready to load."""

import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

from edgespec.config.config_file import default_home as default_home
from edgespec.config.presets import PresetFolder
from edgespec.errors import DeviceUnavailable, EdgeSpecError, ModelError, UsageError
from edgespec.manifest import FILE_NAME, Manifest, Origin, read_manifest
from edgespec.memory.free_memory import total_memory
from edgespec.setup import genai, ollama_models
from edgespec.setup.catalog import CATALOG, CatalogEntry, HubRepository, HubSource
from edgespec.setup.downloads import Downloads, fetch
from edgespec.setup.foreseen_export import fits_in_half_floats, judge, prefers_half_floats, published
from edgespec.setup.given_names import current_name, given_name, note_source
from edgespec.setup.home_advice import HomeAdvice
from edgespec.setup.model_uses import ModelUses, hold_mark
from edgespec.setup.pair import is_pair
from edgespec.setup.repository import HubId
from edgespec.setup.snapshot import HubFolder, Judge, LocalSource, Preview, explain_folder_errors, is_new, mark_old
from edgespec.setup.source_names import find_hub_id, split_precision
from edgespec.system.context_managers import contextmanager
from edgespec.system.progress import ReportProgress
from edgespec.system.split_files import part_paths, source_name, whole_name
from edgespec.system.units import format_bytes
from edgespec.types import Report

if TYPE_CHECKING:
    from edgespec.export.convert import MeasureRanges, OpenDecoder


_READ = (".safetensors", ".json", ".jinja")  # endings of files of a folder that an export reads


class DeviceFacts(TypedDict, total=False):
    """The facts of a device that decide the precision of a gpu form, asked where nobody has named one.

    lacks_half_floats: Whether it has none; a form that is not prepared yet is then in fp32.
    nvidia_bytes: Its memory if it is an NVIDIA GPU. Blocks are in fp16 where that is a small part of it.
    """

    lacks_half_floats: Callable[[], bool]
    nvidia_bytes: Callable[[], int | None]


@dataclass(frozen=True)
class ModelHome:
    """Prepared models and fetched files below one folder."""

    path: Path
    offline: bool = False  # fetch nothing
    report: Report = lambda line: None  # takes one line a stage
    open_decoder: "OpenDecoder | None" = None  # with which each export is compared with its source
    measure_ranges: "MeasureRanges | None" = None  # which an export in w8a16 needs
    # Compare fewer tokens, and not at all in the npu form, whose graphs take minutes to compile.
    is_quick: bool = False
    progress: ReportProgress = lambda progress: None  # of downloads and exports, and of what opens a model
    # Weights of exports that were checked in this session, whose downloads are needed no more.
    spent: list[Path] = field(default_factory=list, compare=False)
    # Marks of downloads that are exported from, which other processes do not delete.
    held: ExitStack = field(default_factory=ExitStack, compare=False)

    def resolve(self, model: str, form: str = "cpu", **about: Unpack[DeviceFacts]) -> Path:
        """The model or pair folder for a folder, a .gguf file, safetensors, a hub id, or a name.

        A name is one of the catalogue, that of a folder of this home, as edgespec models list has it, or
        ollama:NAME for a model of ollama's. All but a model folder may be followed by :PRECISION; sources are
        exported on first use. Files and folders on this machine come before the hub. A model or pair folder, also
        one made by ONNX Runtime GenAI, is used unchanged, whatever its form. The catalogue states a precision and
        a commit for each name.

        Args:
            form: The kind of device to prepare the model for: cpu, gpu or npu.
            about: That device.

        Raises ModelError: There is nothing of that name, with similar known names; or the hub refuses it.
        """
        folder = self._resolve(model, _Wanted(form, **about))
        assert folder is not None
        return folder

    def find(self, model: str, form: str = "cpu", **about: Unpack[DeviceFacts]) -> Path | None:
        """The folder that resolve() returns, or None if it would prepare one; raises as resolve() does."""
        return self._resolve(model, _Wanted(form, is_prepared=True, **about))

    def place_of(self, model: str, form: str = "cpu", **about: Unpack[DeviceFacts]) -> Path | None:
        """The folder of a prepared model, also without its manifest, or None; raises as resolve() does."""
        return self._resolve(model, _Wanted(form, is_prepared=True, may_be_damaged=True, **about))

    def _resolve(self, model: str, wanted: "_Wanted") -> Path | None:
        """A model's folder, or None where it may not be prepared now; raises as resolve() does."""
        model = self.presets.model_of(model)
        if model.strip() and (fixed := self.fixed_folder(model)) is not None:
            return fixed
        name, precision = split_precision(model)
        if not name.strip():
            raise ModelError("the name of the model is empty; edgespec models list has the names")
        wanted = replace(wanted, precision=precision)
        with explain_name(model):
            path = Path(name).expanduser()
            if name in CATALOG:
                entry = CATALOG[name]
                return self._prepare(name, wanted, entry.precision, lambda judge: self._fetch(entry, judge))
            if path.is_file() or ((path / "config.json").is_file() and not (path / FILE_NAME).exists()):
                return self._from_path(path, wanted)
            if name.startswith(ollama_models.PREFIX):
                pulled = ollama_models.find_pulled(name)
                return self._prepare(pulled.folder_name, wanted, "source", lambda judge: pulled.source)
            if hub_id := find_hub_id(name):
                fetch = partial(self._hub.fetch, hub_id, "main")
                return self._prepare(hub_id.name, replace(wanted, repository=hub_id.repository), "source", fetch)
            own = None if _is_ready(path) else self.own_folder(name)
            raise ModelError(self.advice.on_unknown(model, path, own))

    @property
    def advice(self) -> HomeAdvice:
        return HomeAdvice(self)

    @property
    def presets(self) -> PresetFolder:
        return PresetFolder(self.path)

    def split_name(self, model: str) -> tuple[str, str | None]:
        """The name of a model, or of that of a preset, and the precision after it if there is one."""
        return split_precision(self.presets.model_of(model))

    def names(self) -> list[str]:
        """The names of its folders, prepared or damaged; none where it cannot be read."""
        try:
            return [each.name for each in self.models.iterdir() if each.is_dir() and not each.name.startswith(".")]
        except OSError:
            return []

    def fixed_folder(self, model: str) -> Path | None:
        """The model or pair folder that a user names, by its path or as this home has it; it is used as it is.

        None for a source, and for a name of the catalogue, which may be prepared in several forms.
        """
        model = self.presets.model_of(model)
        with suppress(RuntimeError, ValueError, OSError):  # which resolve() reports
            if _is_ready(path := Path(model).expanduser()):
                return path
            return None if model in CATALOG or _is_source(path) else self.own_folder(model)
        return None

    def whole_path(self, model: str, folder: Path = Path()) -> str | None:
        """A model that is named by its path from a folder, as every folder names it; None for any other name."""
        name, precision = split_precision(model)
        with suppress(RuntimeError, ValueError, OSError):  # which resolve() reports
            if name and not self.presets.has(model):
                if _is_ready(path := folder / Path(model).expanduser()):
                    return os.path.abspath(path)
                if name not in CATALOG and _is_source(path := folder / Path(name).expanduser()):
                    return os.path.abspath(path) + (f":{precision}" if precision else "")
        return None

    def pair_folder(self, model: str) -> Path | None:
        """The pair folder that a user names; None where it is something else."""
        folder = self.fixed_folder(model) or Path(model)
        with suppress(OSError, ValueError):  # the name of no folder, which is reported as that of a model
            return folder if is_pair(folder) else None
        return None

    def own_folder(self, name: str) -> Path | None:
        """The model or pair folder of this home that has or had a name; None where there is none."""
        name = self.current_name(name)
        is_name = bool(name) and Path(name).name == name and not name.startswith(".")
        return folder if is_name and _is_ready(folder := self.models / name) else None

    def current_name(self, model: str) -> str:
        """The name of a model, in place of one that it had before it was renamed."""
        return current_name(self.path, model)

    def locate(self, source: str, revision: str | None = None, judge: Judge | None = None) -> LocalSource:
        """A file or folder on this machine as a source to export; a hub id or a catalogue's model is fetched.

        judge: Called before weights are fetched from the hub.

        Raises:
            ModelError: The hub refuses it, or it is the name of a prepared model or nearly one of the catalogue.
            UsageError: A revision was given for a file or folder.
        """
        if hub_id := find_hub_id(source):
            return self._hub.fetch(hub_id, revision or "main", judge)
        if revision is not None:
            raise UsageError(
                f"--revision is for repositories of the hub, but {source} is a file or folder; leave it out"
            )
        if source.startswith(ollama_models.PREFIX):
            return ollama_models.find_pulled(source).source
        with explain_name(source):
            is_here = Path(source).exists()
        if source in CATALOG and not is_here:
            return self._fetch(CATALOG[source], judge)
        if not is_here:
            self.advice.require_known(source)
        return LocalSource(path=Path(source))

    def source_of(self, model: str) -> LocalSource:
        """The source that a model of any name was or would be exported from, which is fetched if need be.

        Raises ModelError: The model is unknown, or its source cannot be found.
        """
        name, _ = self.split_name(model)
        if (folder := self.fixed_folder(model)) is None:
            return self._fetch(CATALOG[name]) if name in CATALOG else self.locate(name)
        manifest = read_manifest(folder)
        source = manifest.source
        if source.is_merged:
            raise ModelError(
                f"{folder} is {source.name}; merge the adapter with PEFT, export the result, and name that instead"
            )
        if source.hub_id is None:
            if noted := self.advice.noted_source(folder):
                return self.locate(noted)
            raise ModelError(
                f"{folder} does not say where {source.name} came from; name that file or folder instead"
            )
        return self.locate(source.hub_id, source.revision)

    @contextmanager
    def preview(self, source: str, revision: str | None = None) -> Iterator[Preview | None]:
        """A source of an export, of which no weights are fetched; raises as locate() does.

        None for a file of the catalogue that is not here yet, of which the catalogue says all.
        """
        hub_id, entry = find_hub_id(source), CATALOG.get(source)
        if revision is None and entry is not None and not Path(source).exists():
            if isinstance(entry.source, HubRepository):
                hub_id, revision = HubId(entry.source.repository), entry.source.revision
            elif not (file := self.path / "downloads" / entry.source.file).exists():
                yield None
                return
            else:
                source = str(file)
        if hub_id is None:
            found = self.locate(source, revision)
            yield Preview(path=found.path, sizes={}, fetch_bytes=0, name=found.origin.name)
            return
        with self._hub.preview(hub_id, revision or "main") as preview:
            yield preview

    @property
    def models(self) -> Path:
        return self.path / "models"

    @property
    def _hub(self) -> HubFolder:
        return HubFolder(self.path / "downloads" / "hub", self.report, self.offline, self.progress, self._hold)

    def _hold(self, download: Path, held: ExitStack | None = None) -> None:
        """Keep a download until an export has ended, or another stack, if its folder can be written to."""
        with suppress(OSError):
            download.parent.mkdir(parents=True, exist_ok=True)
            (held or self.held).enter_context(hold_mark(download))

    def _fetch(self, entry: CatalogEntry, judge: Judge | None = None) -> LocalSource:
        source = entry.source
        if isinstance(source, HubRepository):
            found = self._hub.fetch(HubId(source.repository), source.revision, judge)
            origin = replace(found.origin, license=found.origin.license or entry.license)
            return replace(found, origin=origin)
        folder = self.path / "downloads"
        with ExitStack() as held:  # from before its hash is compared, since others may delete it from then on
            self._hold(folder / source.file, held)
            path = fetch(source, folder, self.report, offline=self.offline, progress=self.progress)
            self.held.enter_context(held.pop_all())
        hub = next((place for place in source.sources if isinstance(place, HubSource)), None)
        repository, revision = (hub.repository, hub.revision) if hub else (None, None)
        origin = Origin(repository=repository, revision=revision, license=entry.license)
        return LocalSource(path=path, origin=origin, fetched=(path,) if is_new(path) else ())

    @property
    def downloads(self) -> Downloads:
        return Downloads(self.path / "downloads")

    def note_export(self, source: LocalSource, *, is_checked: bool) -> None:
        """Note that an export of a source has ended, whose download is needed no more if it was checked."""
        self.held.close()
        if is_checked:
            self.spent.extend(source.fetched)
        else:
            mark_old(source.fetched)

    def settle_downloads(self, *, keep: bool) -> None:
        """Delete what was downloaded for exports that were checked, or keep it from now on."""
        if keep:
            mark_old(self.spent)
        elif size := self.downloads.delete_weights(self.spent, lambda error: None):  # unless it is in use
            self.report(f"deleted the download ({format_bytes(size)}), which the prepared model does not need")
        self.spent.clear()

    def drafter_of(self, model: str, form: str = "cpu") -> str | None:
        """The drafter that the catalogue has for a model, once it is prepared in this home in a form.

        None for a folder that is used as it is, which may have the name of a model of the catalogue.
        """
        entry = None if self.fixed_folder(model) else CATALOG.get(self.split_name(model)[0])
        if entry is None or entry.drafter is None:
            return None
        folder = self._place(_folder_name(entry.drafter, form, None))
        return entry.drafter if (folder / FILE_NAME).is_file() else None

    @property
    def uses(self) -> ModelUses:
        return ModelUses(self.models)

    def _from_path(self, source: Path, wanted: "_Wanted") -> Path | None:
        if source.is_dir():
            source, name = source.resolve(), source_name(source)
            files = [each for each in sorted(source.iterdir()) if each.suffix in _READ and each.is_file()]
        else:  # by the name of a link, since parts are known by theirs
            source, name = source.parent.resolve() / source.name, Path(whole_name(source_name(source))).stem
            files = [each for each in part_paths(source) if each.exists()]
        states = [f"{os.fsencode(file)!r} {(stat := file.stat()).st_size} {stat.st_mtime_ns}" for file in files]
        key = hashlib.sha256("\n".join(states).encode()).hexdigest()[:8]
        name = os.fsdecode(f"{name}-{key}".encode())  # by its bytes, where the system's names are not UTF-8
        return self._prepare(name, wanted, "source", lambda judge: LocalSource(path=source))

    def _require_writable(self) -> None:
        """Raises EdgeSpecError: No model can be prepared in this home."""
        with explain_folder_errors(self.models):
            self.models.mkdir(parents=True, exist_ok=True)
            with TemporaryFile(dir=self.models):  # permission bits alone say nothing on Windows, or to root
                pass

    def _prepare(
        self, name: str, wanted: "_Wanted", usual: str, fetch_source: Callable[[Judge], LocalSource]
    ) -> Path | None:
        """The folder of a source, by its name and what is wanted of it, exported unless it is there.

        None where it is not there and is not to be exported.

        usual: The precision that a folder without a precision in its name has.
        """
        form, asked, place = wanted.form, wanted.precision, partial(self._place, repository=wanted.repository)
        gpu_bytes = wanted.nvidia_bytes() if form == "gpu" and asked is None else None
        fast = place(_folder_name(name, form, "fp16"))
        if gpu_bytes and (fast / FILE_NAME).is_file() and fits_in_half_floats(fast, gpu_bytes):
            return fast
        if asked in (("source", "fp16") if form == "npu" else (usual,)):
            asked = None  # folder names leave the usual precision of the form out
        folder = place(_folder_name(name, form, asked))
        if (folder / FILE_NAME).is_file():
            return folder
        if form == "gpu" and asked != "fp32" and wanted.lacks_half_floats():
            if asked is not None:
                raise DeviceUnavailable(
                    f"the device has no half floats, which the gpu form has in {asked}; name the model with :fp32"
                )
            asked = "fp32"
            folder = place(_folder_name(name, form, asked))
            if (folder / FILE_NAME).is_file():
                return folder
            if not wanted.is_prepared:
                self.report(
                    "the device has no half floats: the model is prepared in fp32, which takes more memory"
                )
        if wanted.may_be_damaged and os.path.lexists(folder):
            return folder
        if os.path.lexists(folder):
            way = self.advice.repair_of(folder) or "name it in edgespec models pull as here, with its --device"
            raise ModelError(f"{folder} is damaged: it has no {FILE_NAME}; repair it: {way}")
        if wanted.is_prepared:
            return None
        precision = asked or ("fp16" if form == "npu" else usual)
        if gguf := published(name, self._hub) if asked is None and form != "npu" and not gpu_bytes else None:
            precision, fetch_source = "source", partial(self._hub.fetch, gguf, "main")
        if precision == "w8a16" and form == "npu" and self.measure_ranges is None:
            raise ModelError(
                f"{name} is not prepared in w8a16, for which its activations are measured on prompts; "
                f"run: edgespec models pull MODEL:w8a16 --device npu"
            )
        self._require_writable()
        source = fetch_source(partial(judge, self.models, precision, form))
        if gpu_bytes and prefers_half_floats(source.path, usual, self.models, gpu_bytes, self.report):
            precision, folder = "fp16", fast
        self._export(source, folder, precision, form)
        return folder

    def _place(self, folder_name: str, repository: str | None = None) -> Path:
        """The folder of a model of the home; one that the user has named has that name.

        repository: That it is of. org/m-int8 and the int8 of org/m share a name; the second gets a longer one.
        """
        folder = self.models / (given_name(self.path, folder_name) or folder_name)
        if repository is None:
            return folder
        longer = self._place(f"{folder_name}-{hashlib.sha256(repository.encode()).hexdigest()[:8]}")
        return longer if longer.exists() or _is_of_another(folder, repository) else folder

    def export(self, source: LocalSource, output: Path, *, is_checked: bool = True, **settings: Any) -> Manifest:
        """Export a source to a folder, as export_model() does, and note if its download is needed no more."""
        from edgespec.export.convert import export_model  # 0.3 s, and only a first use needs it

        settings |= {"origin": source.origin, "open_decoder": self.open_decoder if is_checked else None}
        settings |= {"measure_ranges": self.measure_ranges, "report": self.report, "progress": self.progress}
        with self.held:
            manifest = export_model(source.path, output, **settings)
        self.note_export(source, is_checked=manifest.check is not None)
        is_source_enough = source.origin.repository is None and not manifest.source.is_merged
        if output.parent == self.models and is_source_enough:
            name = self.current_name(output.name)  # another process may have found and named it already
            note_source(self.path, name, source.origin.name or str(source.path.absolute()))
        return manifest

    def _export(self, source: LocalSource, folder: Path, precision: str, form: str) -> None:
        """Export a source to a folder, unless another process does so meanwhile."""
        how = {"precision": precision, "form": form, "is_quick": self.is_quick}
        most_bytes, is_checked = total_memory() if form == "cpu" else None, not (self.is_quick and form == "npu")
        try:
            self.export(source, folder, is_checked=is_checked, most_bytes=most_bytes, **how)
        except UsageError:
            if not (folder / FILE_NAME).is_file():
                raise
            self.report("another process has prepared this model meanwhile")


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A model as a user wants it: a form, and the precision if one was named."""

    form: str
    precision: str | None = None
    repository: str | None = None  # of the hub
    lacks_half_floats: Callable[[], bool] = lambda: False
    nvidia_bytes: Callable[[], int | None] = lambda: None
    is_prepared: bool = False  # nothing is exported
    may_be_damaged: bool = False  # a folder without its manifest is found too


@contextmanager
def explain_name(model: str) -> Iterator[None]:
    """Raises ModelError: Nothing can have the name of a model that is looked for, or it may not be read."""
    try:
        yield
    except PermissionError as error:
        raise ModelError(
            f"{error.filename or model} cannot be read; fix its permissions or change EDGESPEC_HOME"
        ) from None
    except (RuntimeError, ValueError, OSError) as error:  # unknown user, a NUL, a name too long
        why = getattr(error, "strerror", None) or error  # without repeating the path
        raise ModelError(f"'{model[:200]}' cannot be opened ({why}); give a name, a folder or a file") from None


def _folder_name(name: str, form: str, precision: str | None) -> str:
    """The name of a model's folder, such as tiny, tiny-int8, tiny-gpu or tiny-fp32-gpu."""
    return "-".join([name, *([precision] if precision else []), *([form] if form != "cpu" else [])])


def _is_of_another(folder: Path, repository: str) -> bool:
    """True if a folder holds a model of a repository whose name is longer or shorter than that of another."""
    with suppress(EdgeSpecError, OSError):
        found = read_manifest(folder, has_files=False).source.repository or repository
        return found.startswith(f"{repository}-") or repository.startswith(f"{found}-")
    return False


def _is_source(path: Path) -> bool:
    """True if a path is that of a file, or of a folder with a model that may be exported."""
    return path.is_file() or (path / "config.json").is_file()


def _is_ready(folder: Path) -> bool:
    """True if a folder holds a model or a pair that is ready to load."""
    return any((folder / file).is_file() for file in (FILE_NAME, genai.FILE_NAME)) or is_pair(folder)
