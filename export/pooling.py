"""How a model that was trained for embeddings makes a vector of a text: from sentence-transformers, or from GGUF.

Sentence-transformers lists what runs after the model in modules.json, as Pooling and Normalize.
"""

from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from edgespec.errors import SourceError
from edgespec.manifest import POOLING_KINDS, Pooling
from edgespec.system.typed_json import read_json
from edgespec.text.tokenizer import open_tokenizer, translate_errors

MODULES = "modules.json"
_MOST_BEHIND = 8  # tokens behind a text; tokenizers in use put one there
_KNOWN = ("Transformer", "Pooling", "Normalize")
# A setting of 1_Pooling/config.json, each of which is true or false -> kind.
_SWITCHES = {"pooling_mode_lasttoken": "last", "pooling_mode_mean_tokens": "mean"}
_WORDS = {"lasttoken": "last", "mean": "mean"}  # values of pooling_mode, which newer files have instead
_GGUF_KINDS = {1: "mean", 2: "cls", 3: "last", 4: "rank"}  # 0 is none


def pooling_of_folder(folder: Path, settings: Mapping[str, Any], *, add_bos: bool) -> Pooling | None:
    """The pooling of a Hugging Face folder; None where its model writes text.

    Args:
        settings: Of its config.json.
        add_bos: Whether its tokenizer puts the first token of all texts before one.

    Raises SourceError: A vector of a text is made in another way than the export knows.
    """
    path = folder / MODULES
    if not path.exists() and not path.is_symlink():  # a link to nothing is a download that was not finished
        return None
    modules = _read(path)
    if not isinstance(modules, list) or not all(isinstance(each, dict) for each in modules):
        raise SourceError(f"{path} is not a list of modules; fetch it again")
    names = [str(each.get("type")).rpartition(".")[2] for each in modules]
    if unknown := [name for name in names if name not in _KNOWN]:
        raise SourceError(
            f"{path} has the module {unknown[0]} behind the model; vectors are made by "
            f"{' and '.join(_KNOWN[1:])} alone; unsupported"
        )
    if "Pooling" not in names:
        raise SourceError(f"{path} has no module Pooling, so nothing says how a vector is made; fetch it again")
    if names.count("Pooling") > 1 or names[0] != "Transformer" or names.count("Transformer") > 1:
        raise SourceError(
            f"{path} has the modules {', '.join(names)}; wanted Transformer, Pooling and Normalize, in this "
            "order; unsupported"
        )
    if (place := modules[0].get("path")) not in (None, "", "."):
        raise SourceError(f"{path} has its model in {place!r:.60}; wanted it in {folder} itself; unsupported")
    if settings.get("is_causal") is False or settings.get("use_bidirectional_attention"):
        raise SourceError(
            f"{folder}: tokens see those that follow them (config.json), and the export has causal attention "
            "alone; unsupported"
        )
    place = modules[names.index("Pooling")].get("path")
    if not isinstance(place, str) or "\\" in place or len(PurePosixPath(place).parts) != 1 or place in ("..", "/"):
        raise SourceError(
            f"{path} has the settings of Pooling in {place!r:.60}; wanted a folder in {folder}, such as "
            "1_Pooling; fetch it again"
        )
    kind = _kind_of(folder / place / "config.json")
    return Pooling(kind=kind, last_tokens=_tokens_behind(folder / "tokenizer.json", num_before=int(add_bos)))


def pooling_from_gguf(path: object, metadata: Mapping[str, Any]) -> Pooling | None:
    """The pooling of a GGUF file; None where its model writes text.

    Raises SourceError: A vector of a text is made in another way than the export knows.
    """
    architecture = metadata.get("general.architecture")
    number = metadata.get(f"{architecture}.pooling_type", 0)
    if type(number) is not int:
        raise SourceError(
            f"{path}: {architecture}.pooling_type is {number!r:.60}; wanted a whole number; it is damaged"
        )
    if number == 0:
        return None
    kind = _require_kind(path, _GGUF_KINDS.get(number, number))
    if not _flag(path, metadata, f"{architecture}.attention.causal", or_else=True):
        raise SourceError(
            f"{path}: tokens see those that follow them, and the export has causal attention alone; unsupported"
        )
    if not _flag(path, metadata, "tokenizer.ggml.add_eos_token", or_else=False):
        return Pooling(kind=kind)
    end = metadata.get("tokenizer.ggml.eos_token_id")
    if type(end) is not int or not 0 <= end < len(metadata["tokenizer.ggml.tokens"]):
        raise SourceError(
            f"{path} puts a token behind texts and does not name one of its own ({end!r:.60}); the file is damaged"
        )
    return Pooling(kind=kind, last_tokens=(end,))


def _flag(path: object, metadata: Mapping[str, Any], name: str, *, or_else: bool) -> bool:
    found = metadata.get(name, or_else)
    if not isinstance(found, bool):
        raise SourceError(f"{path}: {name} is {found!r:.60}; wanted true or false; it is damaged")
    return found


def _kind_of(path: Path) -> str:
    stated = _read(path)
    if not isinstance(stated, dict):
        raise SourceError(f"{path} does not hold a JSON object; fetch it again")
    if (word := stated.get("pooling_mode")) is not None:
        return _require_kind(path, _WORDS.get(word, word) if isinstance(word, str) else word)
    switches = {key: is_on for key, is_on in stated.items() if key.startswith("pooling_mode_")}
    if wrong := [key for key, is_on in switches.items() if not isinstance(is_on, bool)]:
        raise SourceError(
            f"{path}: {wrong[0]} is {switches[wrong[0]]!r:.60}; wanted true or false; fetch it again"
        )
    switched = [key for key, is_on in switches.items() if is_on]
    kinds = [_SWITCHES.get(key, key.removeprefix("pooling_mode_")) for key in switched]
    return _require_kind(path, " and ".join(kinds) or None)


def _require_kind(path: object, kind: object) -> str:
    if kind not in POOLING_KINDS:
        raise SourceError(
            f"{path} makes a vector by {kind!r:.60}; known are {', '.join(POOLING_KINDS)}; unsupported"
        )
    return str(kind)


def _tokens_behind(path: Path, *, num_before: int) -> tuple[int, ...]:
    """The special tokens that a tokenizer puts behind a text, if it puts num_before before it."""
    tokenizer = open_tokenizer(path, SourceError, "fetch it again")
    with translate_errors(path, SourceError, "fetch it again"):
        alone, whole = (tokenizer.encode("a", add_special_tokens=adds).ids for adds in (False, True))
    end = num_before + len(alone)
    if whole[num_before:end] != alone:
        raise SourceError(
            f"{path} makes the tokens {whole} of the letter a, which are {alone} without special ones; wanted "
            f"{num_before} before them; unsupported"
        )
    behind = tuple(whole[end:])
    if len(behind) > _MOST_BEHIND or any(token >= tokenizer.get_vocab_size() for token in behind):
        raise SourceError(
            f"{path} puts {len(behind)} tokens behind a text, the largest of which is {max(behind)}; wanted at "
            f"most {_MOST_BEHIND}, of its vocabulary of {tokenizer.get_vocab_size()}; fetch it again"
        )
    return behind


def _read(path: Path) -> Any:
    try:
        return read_json(path)
    except FileNotFoundError:
        raise SourceError(
            f"{path.parent} has no {path.name}, which says how a vector is made; fetch it again"
        ) from None
    except ValueError as error:
        raise SourceError(f"{path} is not JSON that can be read ({error}); fetch it again") from None
