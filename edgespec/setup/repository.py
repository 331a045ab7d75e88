"""A repository of the hub: its id, its files, and which of them a model needs. Knows no networks and disks."""

import json
import re
from dataclasses import dataclass
from pathlib import PurePosixPath

from edgespec.errors import ModelError, NotOnHub
from edgespec.system.split_files import part_names, whole_name
from edgespec.system.text_files import decode_text
from edgespec.system.units import format_bytes

_ADDRESS = r"(?:(?:https://)?(?:hf\.co|huggingface\.co)/)?"  # as ollama's users and browsers write a name
_ID = re.compile(_ADDRESS + r"([a-zA-Z0-9][\w.-]*/[a-zA-Z0-9_][\w.-]*)(?::([\w.+/-]+))?", re.ASCII)
_MAX_ID = 96
_FILE_ENDINGS = (".gguf", ".safetensors", ".json", ".jinja", ".onnx", ".bin", ".pt", ".zip")

NOTHING_FETCHED = (
    "nothing is fetched with --offline or HF_HUB_OFFLINE, or for a request to a server; fetch it first: edgespec "
    "models pull MODEL"
)
INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_ADAPTER = "adapter_model.safetensors"  # low-rank changes of another repository's model
_TEXTS = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "special_tokens_map.json",  # of older folders
    "chat_template.json",  # of processors, until transformers 4.51
    "processor_config.json",
    "additional_chat_templates/tool_use.jinja",
    "quantize_config.json",  # of AutoGPTQ until 2023
    "hf_quant_config.json",  # of modelopt
    "modules.json",  # of sentence-transformers, for embeddings
    "1_Pooling/config.json",
)


@dataclass(frozen=True)
class HubId:
    """A repository and, where it holds several GGUF files, the choice: a file name or a tag like Q4_K_M."""

    repository: str
    choice: str | None = None

    @property
    def name(self) -> str:
        """The name of its folder; unique, since a repository never has two hyphens in a row."""
        return "--".join([self.repository, *([self.choice] if self.choice else [])]).replace("/", "--")


@dataclass(frozen=True, kw_only=True)
class RemoteFile:
    """A file as its commit lists it; digest is a SHA-256, or the id of a git blob for small ones."""

    name: str
    bytes: int
    digest: str


@dataclass(frozen=True, kw_only=True)
class Commit:
    """The files of a repository at one commit; is_part: only those of them that are on this machine."""

    repository: str
    sha: str
    license: str | None
    files: tuple[RemoteFile, ...]
    is_part: bool = False

    def find(self, name: str) -> RemoteFile | None:
        return next((file for file in self.files if file.name == name), None)

    def lacks(self, name: str, otherwise: ModelError) -> ModelError:
        """The error where it does not list a file: otherwise, unless the hub may have it."""
        if not self.is_part:
            return otherwise
        return ModelError(
            f"the download of {self.repository} in the cache of huggingface_hub is incomplete: {name} is "
            f"missing, and {NOTHING_FETCHED}"
        )


def parse_hub_id(text: str) -> HubId | None:
    """Parse `org/name`, `org/name:Q4_K_M` or `org/name:file.gguf`, also behind hf.co/; None for any other text."""
    match = _ID.fullmatch(text)
    if not match or len(match[1]) > _MAX_ID or "--" in match[1] or ".." in match[1]:
        return None
    return None if match[1].lower().endswith(_FILE_ENDINGS) else HubId(match[1], match[2])


def choose_files(commit: Commit, choice: str | None) -> list[RemoteFile]:
    """The files that a model needs; for sharded safetensors the index, which names the other shards.

    Raises ModelError: there is nothing that can be exported, or the choice fits no file or several.
    """
    models = _gguf_models(commit)
    if choice is not None:
        return _choose_gguf(commit, models, choice)
    named = [file for file in commit.files if file.name.endswith(".safetensors") and "/" not in file.name]
    is_single = not commit.is_part and [file.name for file in named] == [_SINGLE]  # any index is of earlier parts
    if commit.find(INDEX) or commit.find(_SINGLE):
        wanted = (*_TEXTS, *([] if is_single else [INDEX]), _SINGLE)
        return [file for name in wanted if (file := commit.find(name))]
    if len(models) == 1:
        return _require_whole(commit, next(iter(models.values())))
    if len(named) == 1 and not models and named[0].name != _ADAPTER:  # a drafting head may have its own name
        return [*(file for name in _TEXTS if (file := commit.find(name))), *named]
    if models:
        raise ModelError(
            f"{commit.repository} holds {len(models)} GGUF models; name one as in "
            f"{commit.repository}:{PurePosixPath(next(iter(models))).name}. {_list_sizes(models)}"
        )
    if commit.find(_ADAPTER):
        raise ModelError(
            f"{commit.repository} is a LoRA adapter, which runs with its base alone: hf download "
            f"{commit.repository} --local-dir ADAPTER, then edgespec export BASE --adapter ADAPTER --output MODEL"
        )
    why = "weights in other formats (.bin, .pt) are not fetched, since loading them runs code"
    endings = {PurePosixPath(file.name).suffix for file in commit.files}
    if ".onnx" in endings and not endings & {".bin", ".pt"}:
        why = (
            "its ONNX models are not fetched. Use the model that they were made from; those of GenAI's model "
            f"builder load from a local folder with genai_config.json: hf download {commit.repository} "
            "--local-dir FOLDER"
        )
    none = ModelError(f"{commit.repository} holds no model.safetensors and no .gguf file; {why}")
    raise commit.lacks("the file of weights", none)


def _gguf_models(commit: Commit) -> dict[str, list[RemoteFile]]:
    """GGUF files by name; a split file has the name of the whole, and all its parts."""
    models: dict[str, list[RemoteFile]] = {}
    for file in sorted(commit.files, key=lambda file: file.name):
        name = PurePosixPath(file.name)
        is_part = re.search("mmproj|^mtp-", name.name.lower())  # what sees images, and layers that draft
        if name.suffix == ".gguf" and not is_part:
            models.setdefault(str(name.with_name(whole_name(name.name))), []).append(file)
    return models


def _choose_gguf(commit: Commit, models: dict[str, list[RemoteFile]], choice: str) -> list[RemoteFile]:
    named = PurePosixPath(choice)
    by_name = str(named.with_name(whole_name(named.name))) if named.name else choice
    found = [name for name in models if name == by_name]
    found = found or [name for name in models if PurePosixPath(name).name == by_name]  # as manifests name it
    for behind in ("", "-.*"):  # a tag ends the name, or stands within it as in m_q4_0-it.gguf
        tag = re.compile(rf"(.*[-._/])?{re.escape(choice)}{behind}\.gguf", re.IGNORECASE)
        found = found or [name for name in models if tag.fullmatch(name)]
    if len(found) > 1:
        few = {name: models[name] for name in found}
        raise ModelError(
            f"'{choice}' matches {len(found)} files of {commit.repository}; name one. {_list_sizes(few)}"
        )
    if not found:
        none = NotOnHub(f"{commit.repository} has no GGUF file '{choice}'. {_list_sizes(models)}")
        raise commit.lacks(choice, none)
    return _require_whole(commit, models[found[0]])


def _require_whole(commit: Commit, files: list[RemoteFile]) -> list[RemoteFile]:
    first = PurePosixPath(files[0].name)
    if missing := {str(first.with_name(part)) for part in part_names(first.name)} - {file.name for file in files}:
        what = f"{commit.repository} lacks {min(missing)}, a part of one model with {first}"
        raise commit.lacks(min(missing), NotOnHub(f"{what}; choose another file"))
    return files


def _list_sizes(models: dict[str, list[RemoteFile]]) -> str:
    sizes = (f"{name} ({format_bytes(sum(file.bytes for file in files))})" for name, files in models.items())
    return f"It has {', '.join(sizes)}" if models else "It has none"


def shard_files(commit: Commit, index: bytes) -> list[RemoteFile]:
    """The files that an index names; model.safetensors alone where it is there and the index is of other weights.

    Raises ModelError: One is not a safetensors file of the commit.
    """
    try:
        names = sorted(set(json.loads(decode_text(index))["weight_map"].values()))
        files = {name: commit.find(name) for name in names if name.endswith(".safetensors")}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(
            f"the index of {commit.repository} is damaged ({error}); choose another revision"
        ) from None
    if (single := commit.find(_SINGLE)) and _SINGLE not in files:
        return [single]
    if missing := [name for name in names if files.get(name) is None]:
        what = f"the index of {commit.repository} names '{missing[0]}'"
        foreign = ModelError(f"{what}, which is not a safetensors file of the repository; choose another revision")
        raise commit.lacks(missing[0], foreign)
    return [file for file in files.values() if file]
