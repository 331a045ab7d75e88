"""What was learned of drafting for a model, kept beside it: costs by machine, and how often drafts were kept.

No text is kept, and nothing that a text could be told from.
"""

import json
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from edgespec.chances import Key
from edgespec.disk import replace_file
from edgespec.profile import Profile, document_of, number, profile_from

FILE_NAME = "experience.json"
_VERSION = 1
_LARGEST_BYTES = 1 << 23


@dataclass(frozen=True, slots=True)
class Experience:
    """What passes and drafts take on each machine, and kept and tried tokens by source and evidence.

    ratios: of passes, by width.
    drafts: steps for each token drafted and for each read, by what profile.beside() calls a drafter.
    profiles: what was measured when a plan was made, in seconds; ratios and drafts are kept true by use.
    """

    ratios: Mapping[str, Mapping[int, float]] = field(default_factory=dict)
    drafts: Mapping[str, Mapping[str, tuple[float, float]]] = field(default_factory=dict)
    chances: Mapping[Key, tuple[float, float]] = field(default_factory=dict)
    profiles: Mapping[str, Profile] = field(default_factory=dict)


def read_experience(folder: Path, report: Callable[[str], None]) -> Experience:
    """What the folder holds; nothing where there is none or it cannot be understood, which is reported."""
    path = folder / FILE_NAME
    try:
        stated = path.stat()
        if not stat.S_ISREG(stated.st_mode) or stated.st_size > _LARGEST_BYTES:
            raise ValueError("no file of a size that edgespec writes")
        return _parsed(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return Experience()
    except (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        report(f"{path} cannot be used ({error!r}); measuring anew")
        return Experience()


def write_experience(folder: Path, experience: Experience) -> None:
    """Best effort: a folder that cannot be written is measured again the next time."""
    document = {
        "version": _VERSION,
        "ratios": {machine: dict(ratios) for machine, ratios in experience.ratios.items()},
        "drafts": {machine: dict(drafts) for machine, drafts in experience.drafts.items()},
        "chances": [[*key, *counts] for key, counts in experience.chances.items()],
        "profiles": {machine: document_of(profile) for machine, profile in experience.profiles.items()},
    }
    try:
        replace_file(folder / FILE_NAME, json.dumps(document).encode())
    except OSError:
        return


def _parsed(document: Any) -> Experience:
    if document["version"] != _VERSION:
        raise ValueError(f"version {document['version']}")
    ratios = {
        str(machine): {int(width): number(ratio, 1.0, 1e3) for width, ratio in stated.items()}
        for machine, stated in document["ratios"].items()
    }
    if any(stated.get(1) != 1.0 or min(stated) < 1 for stated in ratios.values()):
        raise ValueError("ratios without a step")
    drafts = {
        str(machine): {
            str(name): (number(step, 1e-6, 1e3), number(row, 0.0, 1e3)) for name, (step, row) in stated.items()
        }
        for machine, stated in document.get("drafts", {}).items()
    }
    chances = {}
    for source, evidence, kept, tried in document["chances"]:
        tried = number(tried, 1e-9, 1e6)
        # Never all: a chance of 1 would promise tokens without end.
        chances[str(source), int(evidence)] = (min(number(kept, 0.0, tried), 0.999 * tried), tried)
    profiles = {str(machine): profile_from(stated) for machine, stated in document.get("profiles", {}).items()}
    return Experience(ratios, drafts, chances, profiles)
