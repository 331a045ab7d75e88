"""What a model was or would be exported from, as the command export takes it. Fetches nothing."""

from typing import NamedTuple

from edgespec.manifest import Manifest
from edgespec.models import genai
from edgespec.models.catalog import CATALOG, CatalogEntry, HubRepository, HubSource
from edgespec.models.home import ModelHome, split_precision


class ExportSource(NamedTuple):
    """A file, a folder or a hub id.

    revision: Of a hub id; None for its main branch. precision: None for the source's own.
    """

    source: str
    revision: str | None = None
    precision: str | None = None

    @property
    def words(self) -> list[str]:
        """The words of a command after `edgespec export`."""
        named = {"--revision": self.revision, "--precision": self.precision}
        return [self.source, *(word for flag, value in named.items() if value for word in (flag, value))]


def find_export_source(home: ModelHome, model: str, manifest: Manifest | None) -> ExportSource | None:
    """The source of a model of any name; None where nothing says what it was made from.

    manifest: Of the model folder, where it is prepared.
    """
    name, asked = split_precision(model)
    is_fixed = home.fixed_folder(model) is not None
    if not is_fixed and name in CATALOG:
        return _of_entry(home, CATALOG[name], asked)
    if not is_fixed:
        return ExportSource(name, None, asked if asked != "source" else None)
    if manifest is None or manifest.source.format == genai.FORMAT:
        return None
    source = manifest.source
    precision = manifest.precision if manifest.precision != "source" else None
    if source.repository is None:
        return ExportSource(source.name, None, precision)
    file = f":{source.name}" if source.format == "gguf" else ""
    return ExportSource(source.repository + file, source.revision, precision)


def _of_entry(home: ModelHome, entry: CatalogEntry, asked: str | None) -> ExportSource | None:
    source, wanted = entry.source, asked or entry.precision
    precision = None if wanted == "source" else wanted
    if isinstance(source, HubRepository):
        return ExportSource(source.repository, source.revision, precision)
    if (fetched := home.path / "downloads" / source.file).is_file():
        return ExportSource(str(fetched), None, precision)
    hub = next((place for place in source.sources if isinstance(place, HubSource)), None)
    return ExportSource(f"{hub.repository}:{hub.file}", hub.revision, precision) if hub else None
