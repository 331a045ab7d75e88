"""The formats in which drafting heads are published, and the one that a head is in."""

from pathlib import Path

from edgespec.errors import SourceError
from edgespec.export.heads.assistant import ASSISTANT_DIALECT
from edgespec.export.heads.dflash import BLOCK_DIALECTS
from edgespec.export.heads.eagle import EAGLE_DIALECTS
from edgespec.export.heads.head_source import Dialect, HeadSource, is_pickle, read_head
from edgespec.export.heads.head_tensors import PUBLISHED
from edgespec.export.heads.medusa import HYDRA_DIALECT, MEDUSA_DIALECT
from edgespec.export.heads.mlp_speculator import SPECULATOR_DIALECTS
from edgespec.export.heads.mtp import MTP_DIALECTS, is_mtp_alone
from edgespec.export.settings import SourceSettings, read_json

# In the order in which they are tried.
DIALECTS: tuple[Dialect, ...] = (
    ASSISTANT_DIALECT,
    *BLOCK_DIALECTS,
    *EAGLE_DIALECTS,
    HYDRA_DIALECT,
    *SPECULATOR_DIALECTS,
    MEDUSA_DIALECT,
    *MTP_DIALECTS,
)


def find_dialect(source: HeadSource) -> Dialect:
    """The first dialect that recognizes a head. Raises SourceError: None does."""
    found = next((dialect for dialect in DIALECTS if dialect.recognizes(source)), None)
    if found is None:
        stated = source.settings.get("speculators_model_type") or ", ".join(source.architectures) or "nothing"
        raise SourceError(
            f"{source.path} is a drafting head of a kind that is not read (its config.json says {stated}); known "
            f"are {', '.join(dialect.name for dialect in DIALECTS)}"
        )
    return found


def is_head(path: Path) -> bool:
    """True if a file or folder is a drafting head, and not a model that runs by itself."""
    if path.is_file():
        return path.suffix == ".safetensors" or is_pickle(path)
    return is_recognized(path)


def is_recognized(path: Path) -> bool:
    """True if the settings or the tensors of a file or folder are those of a drafting head."""
    try:
        settings = SourceSettings(path, read_json(path / "config.json") if path.is_dir() else {})
        if any(settings.get(key) is not None for key in PUBLISHED["settings"]):
            return True
        source = read_head(path)
    except (SourceError, OSError):  # read again as a model, whose reader says what is wrong
        return False
    # A model's own layers for multi-token prediction are drafted with as its head, not the model.
    others = (dialect for dialect in DIALECTS if dialect not in MTP_DIALECTS)
    return is_mtp_alone(source) or any(dialect.recognizes(source) for dialect in others)
