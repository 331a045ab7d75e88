"""How the makers of a model suggest to sample its tokens, as the files of a source state it."""

from collections.abc import Mapping
from typing import Any

from edgespec.errors import SourceError
from edgespec.manifest import SuggestedSampling
from edgespec.system.typed_json import read_as

_CUTS = ("top_k", "top_p", "min_p")
_NAMES = ("temperature", *_CUTS, "repetition_penalty")
# What a GGUF file calls them; newer converters write them there.
_GGUF_NAMES = {"temperature": "temp", "repetition_penalty": "penalty_repeat"}
_DIGITS = 6  # of single precision, in which GGUF has them


def sampling_from_json(path: object, stated: Mapping[str, Any]) -> SuggestedSampling | None:
    """The sampling that a generation_config.json states; None where it states none.

    As transformers reads it: nothing is sampled where do_sample is false, and the temperature is 1 where none is
    stated. Where do_sample is missing, a temperature or a cut says that tokens are sampled.

    Raises SourceError: A value is no number, or out of range.
    """
    found = {name: value for name in _NAMES if (value := stated.get(name)) is not None}
    samples = stated.get("do_sample")
    if not found and samples is None:
        return None
    if samples is None:
        samples = any(name in found for name in ("temperature", *_CUTS))
    found = {"temperature": 1.0} | found if samples else {**found, "temperature": 0.0}
    if type(found.get("top_k")) is int:
        found["top_k"] = max(0, found["top_k"])  # some files state -1 for all
    try:
        return read_as(SuggestedSampling, found)
    except ValueError as error:
        raise SourceError(
            f"{path} suggests a sampling that makes no sense: {error}; correct that value or remove it"
        ) from None


def sampling_from_gguf(path: object, metadata: Mapping[str, Any]) -> SuggestedSampling | None:
    """The sampling that the metadata of a GGUF file states; None and errors as for JSON."""
    values = {name: metadata.get(f"general.sampling.{_GGUF_NAMES.get(name, name)}") for name in _NAMES}
    rounded = {
        name: round(value, _DIGITS) if isinstance(value, float) else value for name, value in values.items()
    }
    return sampling_from_json(path, rounded)
