"""What was learned of drafting for a model, kept beside it: costs by machine, and how often drafts were kept.

No text is kept, and nothing that a text could be told from.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from edgespec.chances import Key
from edgespec.disk import replace_file
from edgespec.json_file import read_json
from edgespec.profile import Profile, document_of, number, profile_from

FILE_NAME = "experience.json"
_VERSION = 1
_LARGEST_BYTES = 1 << 23

Report = Callable[[str], None]


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


def read_experience(folder: Path, report: Report = lambda line: None) -> Experience:
    """What the folder holds; nothing where there is none or it cannot be understood, which is reported."""
    path = folder / FILE_NAME
    try:
        return _parsed(read_json(path, _LARGEST_BYTES))
    except FileNotFoundError:
        return Experience()
    except _Unknown as error:
        why = str(error)
    except OSError as error:
        why = error.strerror or "it cannot be read"
    except ValueError as error:
        why = f"it is no sound JSON: {error}"
    report(f"{path} cannot be used ({why}); measuring anew")
    return Experience()


def write_experience(folder: Path, experience: Experience, report: Report = lambda line: None) -> None:
    """Best effort: where a folder cannot be written, which is reported, it is measured again the next time."""
    document = {
        "version": _VERSION,
        "ratios": {machine: dict(ratios) for machine, ratios in experience.ratios.items()},
        "drafts": {machine: dict(drafts) for machine, drafts in experience.drafts.items()},
        "chances": [[*key, *counts] for key, counts in experience.chances.items()],
        "profiles": {machine: document_of(profile) for machine, profile in experience.profiles.items()},
    }
    try:
        replace_file(folder / FILE_NAME, json.dumps(document).encode())
    except OSError as error:
        report(
            f"{folder} cannot be written ({error.strerror}): what was measured and learned of its model on this "
            "machine is not kept for the next time"
        )


class _Unknown(Exception):
    """Why a document is none of ours."""


def _parsed(document: Any) -> Experience:
    """Raises _Unknown: It does not say what it is to."""
    try:
        version = document["version"]
        if version == _VERSION:
            return _stated(document)
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError):
        raise _Unknown("it does not state what edgespec writes there") from None
    raise _Unknown(f"it is of version {str(version)[:20]}, wanted {_VERSION}")


def _stated(document: Any) -> Experience:
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
