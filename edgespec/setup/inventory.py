"""The models that are prepared on this machine: list, find, verify and remove them."""

import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Literal, Unpack

from edgespec.config.presets import Preset
from edgespec.draft.answer_cache import answers_file
from edgespec.errors import EdgeSpecError, IntegrityError, ManifestError, ModelError, UsageError
from edgespec.manifest import COMPILED, FILE_NAME, Manifest, read_manifest, write_manifest
from edgespec.runtimes.compiled_graphs import compiled_files, compiled_folders, find_damage
from edgespec.setup.downloads import Download, delete_abandoned_exports
from edgespec.setup.foresee import needed_bytes
from edgespec.setup.given_names import note_name, note_source, place_aside, require_name
from edgespec.setup.home import DeviceFacts, ModelHome, explain_name
from edgespec.setup.pair import DRAFTER, TARGET, is_pair, part_folders, read_pair
from edgespec.setup.snapshot import Preview
from edgespec.setup.source_names import near_names
from edgespec.system.command_line import quote
from edgespec.system.disk import explain_change, hold_lock, replace_file
from edgespec.system.file_hashes import verify_files

_IN_USE = "close what uses it, or change the permissions of the folder that it lies in"
_MEASURED = ("experience.json", "row_proofs.json", "device_checks.json", COMPILED)  # on what is damaged


@dataclass(frozen=True, kw_only=True)
class PreparedModel:
    """A model or pair folder of the home; a pair joins what its target and drafter state by " + ".

    Forms that were added to a pair follow its own in brackets.
    """

    name: str
    path: str
    bytes: int
    kind: Literal["model", "pair"] = "model"
    form: str | None = None  # the kind of device it was prepared for: cpu, gpu or npu
    precision: str | None = None
    architecture: str | None = None
    source: str | None = None
    license: str | None = None
    memory_bytes: int | None = None  # that plain decoding takes, with the drafter of a pair open
    last_used: str | None = None  # in UTC; None before the first use
    check: str | None = None  # the export compared with its source; None where that was skipped
    problem: str | None = None  # why the folder cannot be read; then the fields before are unknown

    def __repr__(self) -> str:
        return f"<PreparedModel {self.name}, {self.problem or f'{self.form} {self.precision}'}>"


@dataclass(frozen=True, kw_only=True)
class CatalogModel:
    """A model that has a name: pull(name) and load(name) fetch and prepare it.

    precision: That it is prepared in, unless another one is named, as in "qwen2.5-7b:int8".
    drafter: The name of a smaller model that drafts for it.
    fetch_bytes, disk_bytes, memory_bytes: Of its download, of the prepared model, and of plain decoding, about.
    is_gated: The hub asks to accept its terms first.
    was_run: Which file of it edgespec was tested with; None where it was not.
    head: A drafting head that was made for it, as drafter= of export takes it: of the hub, or mtp for layers of
        its own checkpoint. None where none is known.
    machine_gb: The memory of a machine on which a newcomer may begin with it, and the reason; 0 for the others.
    """

    name: str
    title: str
    license: str
    is_gated: bool
    num_parameters: int
    precision: str
    drafter: str | None
    fetch_bytes: int
    repository: str | None
    revision: str | None
    disk_bytes: int
    memory_bytes: int
    was_run: str | None
    head: str | None
    machine_gb: int
    reason: str

    def __repr__(self) -> str:
        return f"<CatalogModel {self.name}, {self.fetch_bytes / 1e9:.1f} GB to download>"


@dataclass(frozen=True, slots=True)
class Inventory:
    """The models that are prepared in a home."""

    home: ModelHome

    def models(self) -> Iterator[PreparedModel]:
        """The models of the home, sorted by name."""
        if self.home.path.exists() and not self.home.path.is_dir():
            raise EdgeSpecError(
                f"{self.home.path} is not a folder; set EDGESPEC_HOME to one, or in Python the argument home"
            )
        for folder in sorted(self.home.models.iterdir()) if self.home.models.is_dir() else []:
            if folder.is_dir() and not folder.name.startswith("."):
                yield self._describe(folder)

    def describe(self, model: str) -> PreparedModel:
        """A model as models() lists it, given by name or folder. Raises ModelError: the model is not prepared."""
        return self._describe(self.find(model))

    def _describe(self, folder: Path) -> PreparedModel:
        try:
            return _describe(folder, self.home.uses.last(folder.name))
        except (EdgeSpecError, OSError) as error:
            size, problem = 0, str(self.home.advice.on_damage(folder, error))
            with suppress(OSError):
                size = sum(path.stat().st_size for path in _files(folder))
            return PreparedModel(name=folder.name, path=str(folder), bytes=size, problem=problem)

    def find(self, model: str) -> Path:
        """The folder of a model, given by name, preset or folder. Raises ModelError: the model is not prepared."""
        model = self.home.current_name(self.home.presets.model_of(model))
        if model in self.home.names():
            return self.home.models / model
        folder = Path(model)
        with explain_name(model):
            if not model or not folder.is_dir():
                raise ModelError(f"'{model}' is not a prepared model and not a folder; {self._advice(model)}")
        if not any((place / FILE_NAME).is_file() for place in (folder, folder / TARGET)):
            raise ModelError(
                f"{folder} is a folder without {FILE_NAME}, so not a prepared model; see edgespec models list"
            )
        return folder

    def verify(self, model: str) -> tuple[int, list[str]]:
        """Compare the files of a prepared model with their hashes; return their number, and the names of others.

        Raises:
            ModelError: The model is not prepared, a file is missing, or the check of a pair is damaged.
            IntegrityError: A file differs.
        """
        folder = self.find(model)
        pair = read_pair(folder)
        if pair and pair.problem:
            again = f"to write it again, run: edgespec pair check {quote(folder)}"
            raise ManifestError(f"{pair.problem}; {'use a newer edgespec' if pair.is_later else again}")
        try:
            parts = part_folders(folder) if pair else [folder]
            found = [_verify_folder(part) for part in parts]
        except EdgeSpecError as error:
            raise self.home.advice.on_damage(folder, error) from None
        return sum(num_files for num_files, _ in found), [name for _, names in found for name in names]

    def repaired(self, model: str, form: str, **about: Unpack[DeviceFacts]) -> Path:
        """The folder that a model is resolved to; prepared once more where a file of it is damaged or missing.

        What else lies in the folder stays there. What was compiled of it and is damaged is deleted.

        Raises EdgeSpecError: It cannot be prepared again, and stays as it is.
        """
        if (folder := self.home.place_of(model, form, **about)) is None:
            return self.home.resolve(model, form, **about)
        if folder.is_symlink() or not folder.is_dir():
            if not (folder / FILE_NAME).is_file():
                raise ModelError(f"{folder} is in the way: it is a link or not a folder; move it away")
            return folder
        if folder.parent != self.home.models or self._find_damage(folder) is None:
            return folder
        if self.home.fixed_folder(model) is not None:
            model = self.home.advice.find_pulled(folder, form, **about) or model
        report, resolve = self.home.report, partial(self.home.resolve, model, form, **about)
        aside = place_aside(folder)
        with ExitStack() as held:
            with explain_change(f"replace {folder}", _IN_USE):
                # Else models prune deletes it, and another process repairs it too.
                lock = hold_lock(
                    aside.with_suffix(".lock"), lambda who: report(f"{who} is repairing this model; waiting")
                )
                held.enter_context(lock)
            if not folder.is_dir():
                return resolve()
            if (damage := self._find_damage(folder)) is None:
                return folder
            report(f"{damage}; preparing it again")
            self.require_unused(folder.name)
            with explain_change(f"replace {folder}", _IN_USE):
                shutil.rmtree(aside, ignore_errors=True)  # of a repair that was killed
                os.rename(folder, aside)
            try:
                repaired = resolve()
            except BaseException:
                os.rename(aside, folder)
                raise
            for path in aside.iterdir():
                if path.name not in _MEASURED and not os.path.lexists(repaired / path.name):
                    os.rename(path, repaired / path.name)
            shutil.rmtree(aside, ignore_errors=True)
        return repaired

    def _find_damage(self, folder: Path) -> str | None:
        """What is wrong with the files of a model or pair. Deletes what was compiled and is damaged."""
        try:
            parts = part_folders(folder) if is_pair(folder) else [folder]
            for part in parts:
                verify_files(part, read_manifest(part).files)
        except (EdgeSpecError, OSError) as error:
            return str(error).rpartition("; ")[0] or str(error)
        for compiled in (each for part in parts for each in _compiled(part)):
            if damage := find_damage(compiled):
                self.home.report(f"{compiled} is damaged ({damage}) and deleted; the next load compiles it again")
                shutil.rmtree(compiled, ignore_errors=True)
        return None

    def export(self, source: str, output: Path, revision: str | None = None, **settings: Any) -> Manifest:
        """Export a source, which is fetched if need be, to a folder; raises as locate() and export_model() do.

        settings: Fields of ExportOptions.
        """
        from edgespec.export.options import ExportOptions
        from edgespec.export.output import require_writable
        from edgespec.export.plan import foresee_cost

        options = ExportOptions(**settings)

        def judge(view: Preview) -> None:
            require_writable(output, foresee_cost(view.path, options, view.sizes).write_bytes)

        manifest = self.home.export(self.home.locate(source, revision, judge), output, **settings)
        if output.parent == self.home.models and not (os.path.exists(source) or manifest.source.is_merged):
            note_source(self.home.path, output.name, source)
        return manifest

    def require_free(self, name: str, model: str = "") -> None:
        """Raises UsageError: No model of the home, or not this one, can be given a name."""
        require_name(name)
        folder = self.home.models / name
        if folder.exists() and not folder.samefile(self.home.models / model):  # as on a disk that ignores case
            raise UsageError(f"there is a model '{name}' already; remove it, or give another name")
        if self.home.presets.has(name):
            raise UsageError(
                f"there is a preset '{name}' already; give another name, or: edgespec preset rm {name}"
            )

    def rename(self, model: str, name: str) -> Path:
        """Give a model of the home another name, by which its presets and what it was prepared from find it too.

        Raises:
            ModelError: The home has no such model.
            ManifestError: The model is damaged.
            UsageError: The name cannot be given.
            EdgeSpecError: A program has the model open.
        """
        if name == model and model in self.home.names():
            return self.home.models / model
        self.require_unused(model)
        if self.home.current_name(name) != model or self.home.presets.has(name):  # it may have a former name again
            self.require_free(name, model)
        presets = self.presets_of(model)
        before, folder = self.home.models / model, self.home.models / name
        manifest = read_manifest(before) if (before / FILE_NAME).is_file() and not before.is_symlink() else None
        try:
            os.rename(before, folder)
            note_name(self.home.path, model, name)
            if manifest is not None:
                write_manifest(folder, replace(manifest, name=name))
        except OSError:
            with explain_change(f"rename {model}", _IN_USE):
                if folder.exists():
                    os.rename(folder, before)
                raise
        for preset in presets:
            self.home.presets.write(replace(preset, model=name))
        self.home.uses.forget(model)
        self.home.uses.mark(name)
        if manifest is not None:
            with explain_change(f"give the stored answers of {model} its new name"), suppress(FileNotFoundError):
                self._rename_answers(manifest, name)
        return folder

    def _rename_answers(self, manifest: Manifest, name: str) -> None:
        """Let a model that was renamed have its stored answers; another one that has them too keeps them."""
        key, memory = (manifest.name, manifest.vocab_sha256), self.home.path / "memory"
        old, new = answers_file(memory, *key), answers_file(memory, name, manifest.vocab_sha256)
        others = (self.home.models / other for other in self.home.names())
        if any(self._has_key(part, key) for folder in others for part in (folder, *part_folders(folder))):
            replace_file(new, old.read_bytes())
        else:
            os.replace(old, new)

    @staticmethod
    def _has_key(folder: Path, key: tuple[str, str]) -> bool:
        """True for a model folder that states a name and the hash of a vocabulary."""
        with suppress(EdgeSpecError, OSError):
            found = read_manifest(folder)
            return (found.name, found.vocab_sha256) == key
        return False

    def remove(self, model: str) -> tuple[Path, int]:
        """Delete a prepared model, and the downloads that only it was exported from.

        Returns its folder, and the bytes of these downloads.

        Raises:
            ModelError: The home has no such model.
            EdgeSpecError: A program has it open.
        """
        self.require_unused(model)
        folder = self.home.models / model
        others = (self.home.models / name for name in self.home.names() if name != model)
        spent = self._sources(folder).difference(*map(self._sources, others))
        elsewhere = [each for place in (folder, *part_folders(folder)) for each in _compiled(place)]
        with explain_change(f"remove {folder}"):
            if folder.is_symlink():
                folder.unlink()
            else:
                shutil.rmtree(folder)
        self.home.uses.forget(model)
        for compiled in elsewhere:  # what lay in the folder of the model is gone already
            shutil.rmtree(compiled, ignore_errors=True)
        return folder, self.home.downloads.delete_weights(spent, self.home.report)

    def require_unused(self, model: str) -> None:
        """Raises ModelError: The home has no such model; EdgeSpecError: A program has it open."""
        if model not in self.home.names():
            raise ModelError(self._describe_other(model))
        if holder := self.home.uses.holder(model):
            raise EdgeSpecError(f"{model} is open in {holder}; end that program first")

    def presets_of(self, model: str) -> list[Preset]:
        """The presets of a prepared model, by whatever name they have it."""
        folder = self.home.models / model

        def is_of(preset: Preset) -> bool:
            with suppress(EdgeSpecError):
                return preset.model in (model, str(folder)) or self.home.find(preset.model) == folder
            return False

        return [*filter(is_of, self.home.presets)]

    def _describe_other(self, model: str) -> str:
        if self.home.presets.has(model):
            return f"'{model}' is a preset, not a prepared model; edgespec preset rm {model} deletes it"
        if (now := self.home.current_name(model)) != model:
            return f"the model '{model}' was renamed; use its new name: {now}"
        folder = Path(model)
        with explain_name(model):
            if (folder / FILE_NAME).is_file():
                if folder.resolve().parent == self.home.models.resolve():
                    return f"{model} is the folder of a prepared model; give its name: {folder.resolve().name}"
                return f"{model} is a model folder of your own; rename or delete the folder itself"
        return f"'{model}' is not a prepared model; {self._advice(model)}"

    def _advice(self, model: str) -> str:
        near = near_names(model, self.home.names())
        return f"did you mean {' or '.join(near)}?" if near else "see edgespec models list"

    def _sources(self, folder: Path) -> set[Path]:
        """The downloaded weights that the models of a folder were exported from, as far as they are here."""
        found: set[Path] = set()
        for part in (folder, *part_folders(folder)):
            with suppress(EdgeSpecError, OSError):
                found |= self.home.downloads.of(read_manifest(part).source)
        return found

    def prune(self, *, is_dry: bool = False) -> tuple[list[Download], int]:
        """Delete all downloads that no process uses, and what killed exports left; only name them if is_dry.

        Returns these downloads, and the bytes of the rest.
        """
        deleted = []
        for download in [*self.home.downloads]:
            try:
                self.home.downloads.delete(Path(download.path), is_dry=is_dry)
                deleted.append(download)
            except EdgeSpecError as error:
                self.home.report(str(error))
        return deleted, delete_abandoned_exports(self.home.models, is_dry=is_dry)


def _describe(folder: Path, used_s: float | None) -> PreparedModel:
    size = sum(path.stat().st_size for path in _files(folder))
    has_parts = is_pair(folder)
    first = [folder / TARGET, folder / DRAFTER] if has_parts else [folder]
    manifests = [read_manifest(part) for part in first]
    others = [read_manifest(part) for part in part_folders(folder) if part not in first] if has_parts else []
    form = " + ".join(manifest.form for manifest in manifests)
    if others:
        form += f" ({', '.join(manifest.form for manifest in others)})"
    checks = [
        f"{check.agreement:.0%} same tokens, {check.divergence:.4f} nats apart"
        for manifest in manifests
        if (check := manifest.check)
    ]
    licenses = {manifest.source.license for manifest in manifests} - {None}
    return PreparedModel(
        name=folder.name,
        path=str(folder),
        bytes=size,
        kind="pair" if has_parts else "model",
        form=form,
        precision=" + ".join(manifest.precision for manifest in manifests),
        architecture=" + ".join(manifest.architecture for manifest in manifests),
        source=" + ".join(map(_origin, manifests)),
        license=" + ".join(sorted(map(str, licenses))) or None,
        memory_bytes=sum(needed_bytes(manifest, manifest.weights_bytes) for manifest in manifests),
        last_used=datetime.fromtimestamp(used_s, UTC).isoformat(timespec="seconds") if used_s else None,
        check=" + ".join(checks) or None,
    )


def _files(folder: Path) -> Iterator[Path]:
    for place in (folder, *part_folders(folder)):
        if place.is_dir():
            yield from (path for path in place.iterdir() if path.is_file())
            for compiled in _compiled(place):
                with suppress(OSError, ValueError):
                    yield from compiled_files(compiled)


def _compiled(folder: Path) -> list[Path]:
    """Folders of what was compiled of a model for devices of this machine."""
    with suppress(EdgeSpecError):
        return list(compiled_folders(folder, read_manifest(folder)))
    return []


def _origin(manifest: Manifest) -> str:
    source = manifest.source
    where = f" of {source.repository} at {(source.revision or '?')[:12]}" if source.repository else ""
    return source.name + where


def _verify_folder(folder: Path) -> tuple[int, list[str]]:
    try:
        manifest = read_manifest(folder)
        verify_files(folder, manifest.files)
        num_files = len(manifest.files)
        for compiled in _compiled(folder):
            if damage := find_damage(compiled):
                raise IntegrityError(
                    f"{compiled}, compiled for a device of this machine, is damaged ({damage}); the next load "
                    "compiles it again, or delete it"
                )
            num_files += len(compiled_files(compiled))
        unlisted = {path.name for path in folder.iterdir()} - {*manifest.files, FILE_NAME, COMPILED}
        return num_files, sorted(unlisted)
    except PermissionError as error:
        raise ModelError(f"{error.filename or folder} may not be read; fix its permissions") from None
