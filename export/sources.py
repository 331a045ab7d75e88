"""Read a source but its weights: a GGUF file or a local Hugging Face folder."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Any

from tokenizers import AddedToken, Tokenizer

from edgespec.errors import SourceError
from edgespec.export.decoder_config import DecoderConfig
from edgespec.export.families import FAMILIES, family_of_huggingface
from edgespec.export.gguf import read_gguf
from edgespec.export.pooling import pooling_from_gguf, pooling_of_folder
from edgespec.export.quantized import read_quantized, require_method
from edgespec.export.read_config import config_from_gguf, config_from_huggingface
from edgespec.export.roles import tensors_by_role
from edgespec.export.safetensors import read_tensors, require_floats, weight_files
from edgespec.export.settings import (
    ADAPTER_SETTINGS,
    UNUSUAL,
    UnreadLayout,
    missing,
    read_json,
    read_text,
    sampling_from_gguf,
    sampling_from_json,
    translate_unusual,
)
from edgespec.export.tensors import NO_SIZES, Sizes, StoredTensor, Tensors
from edgespec.export.text_part import decoder_part, in_usual_names
from edgespec.export.vocabulary import (
    END_OF_TURN,
    Vocabulary,
    ends_of_turn,
    make_pre_tokenizer,
    read_suppressed,
    require_ids,
    say_left_out,
    vocabulary_from_gguf,
)
from edgespec.manifest import Pooling, Source, SuggestedSampling
from edgespec.system.command_line import quote
from edgespec.system.file_hashes import file_record
from edgespec.system.split_files import source_name, utf8_name
from edgespec.text.stored_template import find_tags, join_templates, set_end_token, set_tokens, turn_marks
from edgespec.text.tokenizer import open_tokenizer, translate_errors

_MAX_TOKEN_ID = 1 << 22
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")  # of an added token
# Special tokens that only chat templates ask for; the manifest has the others.
_OTHER_TOKENS = ("unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
_GENERATION = "generation_config.json"
_GPTQ = "quantize_config.json"  # of AutoGPTQ until 2023, beside a config.json that says nothing of it
_MODELOPT = "hf_quant_config.json"  # of NVIDIA's modelopt, likewise


@dataclass(frozen=True, kw_only=True)
class LoadedSource:
    """A source as read; only headers and the tokenizer are in memory."""

    config: DecoderConfig
    tensors: dict[str, StoredTensor]
    vocabulary: Vocabulary
    source: Source
    notes: tuple[str, ...] = ()  # lines on how its weights were read
    num_left_out: int = 0  # tensors of a vision tower, or of layers for multi-token prediction
    mask_token_id: int | None = None  # of a model that drafts several tokens in one pass
    sampling: SuggestedSampling | None = None
    pooling: Pooling | None = None

    @property
    def use_of_left_out(self) -> str:
        """The use of the tensors that are left out, for messages."""
        if self.config.architecture == "mimo":
            return "for multi-token prediction; --drafter mtp exports them as a drafting head"
        if self.config.architecture.startswith(("ernie", "glm4_moe")):
            return "for multi-token prediction, which no drafting head here is made of"
        if self.config.architecture == "qwen3_5":
            return "that see images or draft; --drafter mtp exports what drafts as a drafting head"
        return "that see images or draft; the export reads text"

    @property
    def head(self) -> StoredTensor:
        """The output projection, which in many models is the embedding."""
        return self.tensors.get("head", self.tensors["embedding"])


def read_source(source: Path, context_length: int | None = None, sizes: Sizes = NO_SIZES) -> LoadedSource:
    """Read all of a source but its weights, for texts of up to context_length tokens if that is given.

    sizes: Of files of which only the header is here; then the source has no hash.

    Raises SourceError: It is missing, broken, foreign or unsupported.
    """
    with translate_unusual(source):
        if not source.exists():
            raise missing(source, "does not exist", "give a .gguf file or a folder with safetensors weights")
        load = _load_huggingface if source.is_dir() else _load_gguf
        loaded = load(source, context_length, sizes)
        _require_types(source, loaded.vocabulary)
    return loaded


def read_vocabulary(folder: Path) -> Vocabulary:
    """Tokenizer, special tokens and chat template of a Hugging Face folder.

    Raises SourceError: They are damaged.
    """
    try:
        config = read_json(folder / "config.json")
        vocabulary = _huggingface_vocabulary(folder, config, config.get("vocab_size"))
    except UNUSUAL as error:
        raise SourceError(f"{folder} cannot be understood ({type(error).__name__}: {error})") from error
    _require_types(folder, vocabulary)
    return vocabulary


def _require_types(source: Path, vocabulary: Vocabulary) -> None:
    if not isinstance(vocabulary.chat_template, (str, NoneType)):
        raise SourceError(f"{source} has a chat template that is not text; it is damaged")
    ids = (*vocabulary.eos_token_ids, 0 if vocabulary.bos_token_id is None else vocabulary.bos_token_id)
    if not all(isinstance(token, int) for token in ids):
        raise SourceError(f"{source} has special token ids {ids}, wanted whole numbers; it is damaged")


def _load_gguf(path: Path, context_length: int | None, sizes: Sizes) -> LoadedSource:
    stored = read_gguf(path, sizes)
    if stored.metadata.get("general.type") == "adapter":
        raise _is_adapter(path, stored.metadata.get("general.base_model.0.name"))
    file = in_usual_names(stored)
    try:
        config = config_from_gguf(path, file.metadata, file.tensors, context_length)
        num_blocks = file.metadata[f"{file.metadata['general.architecture']}.block_count"]
        drafting = range(config.num_layers, num_blocks)  # for multi-token prediction
        tensors = {name: tensor for name, tensor in file.tensors.items() if _block(name) not in drafting}
        by_role = tensors_by_role(path, config, tensors, is_gguf=True)
    except UnreadLayout as error:
        if file is stored:
            raise
        raise SourceError(
            f"{error}. ollama's own converter wrote this file; take one of llama.cpp's, as most on the hub are: "
            "org/NAME-GGUF:Q4_K_M"
        ) from None
    return LoadedSource(
        config=config,
        tensors=by_role,
        num_left_out=len(stored.tensors) - len(tensors),
        vocabulary=vocabulary_from_gguf(path, file.metadata, config.vocab_size),
        source=Source(
            name=utf8_name(file.paths[0].name),
            format="gguf",
            sha256="" if sizes else join_hashes(file.paths),
            license=file.metadata.get("general.license"),
        ),
        sampling=sampling_from_gguf(path, file.metadata),
        pooling=pooling_from_gguf(path, file.metadata),
    )


def _block(name: str) -> int:
    """The number of the block that a tensor of a GGUF file belongs to; -1 where it is none's."""
    kind, _, rest = name.partition(".")
    number = rest.partition(".")[0]
    return int(number) if kind == "blk" and number.isdecimal() else -1


def _load_huggingface(folder: Path, context_length: int | None, sizes: Sizes) -> LoadedSource:
    settings_path = folder / "config.json"
    if (folder / ADAPTER_SETTINGS).is_file() and not settings_path.exists():
        raise _is_adapter(folder, read_json(folder / ADAPTER_SETTINGS).get("base_model_name_or_path"))
    settings = read_json(settings_path)
    family_of_huggingface(folder, decoder_part(settings, {})[0])  # before its weights, of whatever kind they are
    whole, notes = _weights(folder, settings, sizes)
    rows = next((each.rows for name, each in whole.items() if name.endswith("embed_tokens.weight")), None)
    vocabulary = _huggingface_vocabulary(folder, settings, rows)
    pooling = pooling_of_folder(folder, settings, add_bos=vocabulary.add_bos)
    if pooling:
        # By their names below a vocabulary head; models saved without one lack a prefix.
        prefix = "" if any(name.startswith("model.") for name in whole) else "model."
        whole = {name if name.startswith("lm_head.") else prefix + name: each for name, each in whole.items()}
    stated, stored = decoder_part(settings, whole)
    num_left_out = len(whole) - len(stored)
    config = config_from_huggingface(folder, stated, stored, context_length)
    _require_biases(folder, config.architecture, stated, stored)
    head = stored.get("lm_head.weight")
    is_tied = _is_said_tied(folder, settings, has_head=bool(head or pooling))  # vectors need none
    if head and (pooling or (is_tied and (sizes or head.holds_same(stored["model.embed_tokens.weight"])))):
        del stored["lm_head.weight"]
    elif head and is_tied:  # transformers takes it too
        notes += ("its config.json says that its head is its embedding, but it has another head, which is used",)
    sha256 = "" if sizes else join_hashes(sorted({tensor.path for tensor in stored.values()}))
    return LoadedSource(
        config=config,
        tensors=tensors_by_role(folder, config, stored, is_gguf=False),
        vocabulary=vocabulary,
        source=Source(name=source_name(folder), format="safetensors", sha256=sha256),
        num_left_out=num_left_out,
        notes=notes,
        mask_token_id=_mask_token_id(folder, config, settings),
        sampling=read_sampling(folder),
        pooling=pooling,
    )


def _is_adapter(path: Path, base: object) -> SourceError:
    return SourceError(
        f"{path} is an adapter of {base or 'another model'}, which runs with its base alone: edgespec export BASE "
        f"--adapter {quote(path)} --output MODEL"
    )


def _weights(
    folder: Path, settings: Mapping[str, Any], sizes: Sizes
) -> tuple[dict[str, StoredTensor], tuple[str, ...]]:
    """The weights of a folder by name, and lines on how they were read."""
    if quantization := _quantization(folder, settings):
        require_method(folder, quantization)  # before tensors of types that it alone has
    floats, integers = read_tensors(weight_files(folder), sizes)
    if quantization:
        return read_quantized(folder, quantization, floats, integers)
    require_floats(integers)
    return floats, ()


def _quantization(folder: Path, settings: Mapping[str, Any]) -> Any:
    """The settings by which the weights of a folder are quantised; None where they are floats."""
    parts = (settings, settings.get("text_config") or {})
    keys = ("quantization_config", "compression_config", "quantization")  # the last of MLX
    stated = [part.get(key) for part in parts for key in keys]
    beside: dict[str, Any] = {"gptq": read_json(folder / _GPTQ, needed=False)}
    beside["modelopt"] = read_json(folder / _MODELOPT, needed=False).get("quantization")
    older = [{"quant_method": method, **said} for method, said in beside.items() if said]
    return next(filter(None, [*stated, *older]), None)


def is_quantized(source: Path) -> bool:
    """True for a folder of a known family whose headers say too little, since reading it takes scales too.

    Raises SourceError: Its family or its way to quantise is not read.
    """
    with translate_unusual(source):
        if not source.is_dir():
            return False
        settings = read_json(source / "config.json")
        family_of_huggingface(source, decoder_part(settings, {})[0])
        quantization = _quantization(source, settings)
        return quantization is not None and bool(require_method(source, quantization))


def read_sampling(folder: Path) -> SuggestedSampling | None:
    """The sampling that a Hugging Face folder suggests. Raises SourceError: A value makes no sense."""
    path = folder / _GENERATION
    return sampling_from_json(path, read_json(path, needed=False))


def _require_biases(folder: Path, architecture: str, stated: Mapping[str, Any], stored: Tensors) -> None:
    """Raises SourceError: A family has biases in some models, this one's settings state them, and it has none."""
    is_stated = "attention_bias" in FAMILIES[architecture].defaults and stated.get("attention_bias")
    if is_stated and not any(name.endswith(".q_proj.bias") for name in stored):
        raise SourceError(
            f"{folder} has no tensor model.layers.0.self_attn.q_proj.bias, and its config.json says that it has "
            "biases; the folder is incomplete, fetch it again"
        )


def _is_said_tied(folder: Path, settings: Mapping[str, Any], *, has_head: bool) -> bool:
    """True if a config.json says that the embedding is the head, for the whole model or for its text part.

    Raises SourceError: The setting is neither true nor false, or the head that it requires is missing.
    """
    key, parts = "tie_word_embeddings", (settings, settings.get("text_config") or {})
    said = [setting for part in parts if (setting := part.get(key)) is not None]
    if odd := [setting for setting in said if not isinstance(setting, bool)]:
        raise SourceError(f"{folder}: {key} is {odd[0]!r}, wanted true or false; fetch config.json again")
    if said and not any(said) and not has_head:
        raise SourceError(
            f"{folder} has no tensor lm_head.weight, and its config.json sets {key} to false, so that it needs "
            "one; the folder is incomplete, fetch it again"
        )
    return any(said)


def _mask_token_id(folder: Path, config: DecoderConfig, settings: dict[str, Any]) -> int | None:
    """The token in the place of unknown ones, which a parallel drafter (PARD) has.

    Raises SourceError: It is no token of the model.
    """
    token = settings.get("pard_token")
    if token is not None and not (type(token) is int and 0 <= token < config.vocab_size):
        raise SourceError(
            f"{folder}: pard_token is {token!r}, wanted a token id below {config.vocab_size}; fetch it again"
        )
    return token


def join_hashes(paths: Iterable[Path]) -> str:
    """SHA-256 of each, with commas between."""
    return ",".join(file_record(path).sha256 for path in paths)


def _huggingface_vocabulary(folder: Path, config: dict[str, Any], num_rows: int | None) -> Vocabulary:
    """The vocabulary of a folder, without added tokens behind the rows of its embedding, where these are known."""
    path = folder / "tokenizer.json"
    if not path.exists():
        raise SourceError(
            f"{folder} has no tokenizer.json; let transformers write it, by AutoTokenizer.from_pretrained(FOLDER)"
            ".save_pretrained(FOLDER), or take a GGUF file of the model"
        )
    tokenizer = open_tokenizer(path, SourceError, "fetch it again")
    settings = read_json(folder / "tokenizer_config.json", needed=False)
    older = read_json(folder / "special_tokens_map.json", needed=False)
    # What transformers 4.34 and later write declares the added tokens; in older folders the other file is right.
    settings = older | settings if "added_tokens_decoder" in settings else settings | older
    _add_declared(tokenizer, settings)
    cuts_wrongly = _cuts_tekken_wrongly(tokenizer)
    if cuts_wrongly:
        tokenizer.pre_tokenizer = make_pre_tokenizer("tekken")
    # Writing a tokenizer takes time and memory by its largest id, not by their number.
    if (largest := max(tokenizer.get_vocab().values(), default=0)) > _MAX_TOKEN_ID:
        raise SourceError(f"{path} has a token of id {largest}, at most {_MAX_TOKEN_ID} are read; fetch it again")
    named = settings.get("extra_special_tokens")  # of transformers since 4.46, where they have names
    others = {name: _piece(settings.get(name)) for name in _OTHER_TOKENS}
    if isinstance(named, dict):
        others |= {name: _piece(token) for name, token in named.items() if name.isidentifier()}
    template = set_tokens(_template(folder, settings), others)
    num_all = len(tokenizer.get_added_tokens_decoder())
    num_tokens = largest + 1 if num_rows is None else num_rows
    tokenizer = _mended(tokenizer, settings, template, num_tokens)
    generation = read_json(folder / _GENERATION, needed=False)
    stated = generation.get("eos_token_id")
    stated = config.get("eos_token_id") if stated is None else stated
    ids = {stated} if isinstance(stated, int) else set(stated or [])
    # The model gives none without a row; some files say -1 for none.
    ids = {token for token in ids if not isinstance(token, int) or 0 <= token < (num_rows or token + 1)}
    piece = _piece(settings.get("eos_token"))
    eos = tokenizer.token_to_id(piece) if isinstance(piece, str) else None
    ids |= {eos} - {None}
    added = tokenizer.get_added_tokens_decoder().items()
    notes = say_left_out(num_all - len(added))
    if cuts_wrongly:
        notes += ("cutting text as Mistral's own tokenizer does; tokenizer.json cuts words wrongly",)
    special = {each.content: token for token, each in added if each.special}
    turns = {special[piece] for piece in ends_of_turn(special) if piece in special}
    ends = (*sorted(ids), *sorted(turns - ids))
    bos = _piece(settings.get("bos_token"))
    bos_id = tokenizer.token_to_id(bos) if bos else None
    with translate_errors(path, SourceError, "fetch it again"):
        # The tokenizer's own post-processor puts bos first; the runtime adds it in its place.
        add_bos = bos_id is not None and tokenizer.encode("a").ids[:1] == [bos_id]
    vocabulary = Vocabulary(
        tokenizer_json=tokenizer.to_str(),
        chat_template=set_end_token(template, ends, eos, None if eos is None else piece),
        bos_token_id=bos_id,
        eos_token_ids=ends,
        add_bos=add_bos,
        suppressed_token_ids=read_suppressed(
            path.with_name(_GENERATION), generation.get("suppress_tokens"), num_tokens
        ),
        notes=notes,
    )
    if largest >= num_tokens:
        require_ids(folder, vocabulary, num_tokens, tokenizer)
    return vocabulary


def _cuts_tekken_wrongly(tokenizer: Tokenizer) -> bool:
    """True for Mistral's tokenizer Tekken as transformers before 5 wrote many: cut as that of Llama 3 is.

    Tekken has no token of two digits, and its own pattern cuts off each.
    """
    has, cutter = tokenizer.token_to_id, tokenizer.pre_tokenizer
    is_tekken = has("[INST]") is not None and has("1") is not None and has("10") is None
    return is_tekken and cutter is not None and b"p{N}{1,3}" in bytes(cutter.__getstate__())


def _add_declared(tokenizer: Tokenizer, settings: Mapping[str, Any]) -> None:
    """Add the tokens that a tokenizer_config.json declares, with its flags, where their ids fit.

    What it names as the first and the last token is added too where the vocabulary has it, as transformers does.
    """
    known = {each.content: each.special for each in tokenizer.get_added_tokens_decoder().values()}
    declared, size, found = settings.get("added_tokens_decoder") or {}, tokenizer.get_vocab_size(), []
    for number, each in sorted(declared.items(), key=lambda entry: int(entry[0])):
        content, flags = each["content"], {flag: each[flag] for flag in _FLAGS if flag in each}
        own = tokenizer.token_to_id(content)
        if int(number) == (size if own is None else own):
            size += own is None
            known[content] = flags["special"] = known.get(content, flags.get("special", False))
            found.append(AddedToken(content, **flags))
    lacking = (piece for piece in _ends(settings) - known.keys() if tokenizer.token_to_id(piece) is not None)
    tokenizer.add_tokens(found + [AddedToken(piece, special=True, normalized=False) for piece in lacking])


def _ends(settings: Mapping[str, Any]) -> set[str]:
    """The first and the last token of texts, by a tokenizer_config.json."""
    named = (_piece(settings.get(name)) for name in ("bos_token", "eos_token"))
    return {piece for piece in named if isinstance(piece, str)}


def _mended(tokenizer: Tokenizer, settings: Mapping[str, Any], template: Any, num_rows: int) -> Tokenizer:
    """The tokenizer without added tokens behind the embedding, and with the marks of turns as special tokens.

    Fine-tunes add tokens without rows for them; other runtimes leave these out too.
    """
    added = tokenizer.get_added_tokens_decoder()
    contents = {each.content for each in added.values()}
    declared = (settings.get("added_tokens_decoder") or {}).values()
    marks = {each["content"] for each in declared if each.get("special")} - find_tags(contents)
    marks |= turn_marks(template, contents) | (set(END_OF_TURN) - {"</s>"}) | _ends(settings)
    marks &= {each.content for each in added.values() if not each.special}
    lost = {each.content for token, each in added.items() if token >= num_rows}
    if not marks and not lost:
        return tokenizer
    stated = json.loads(tokenizer.to_str())
    kept = (each for each in stated["added_tokens"] if each["content"] not in lost)
    stated["added_tokens"] = [{**each, "special": each["special"] or each["content"] in marks} for each in kept]
    vocab = stated["model"]["vocab"]  # by piece, or of Unigram a list of pieces with scores
    stated["model"]["vocab"] = (
        {piece: token for piece, token in vocab.items() if piece not in lost}
        if isinstance(vocab, dict)
        else [entry for entry in vocab if entry[0] not in lost]
    )
    return Tokenizer.from_str(json.dumps(stated, ensure_ascii=False))


def _template(folder: Path, settings: Mapping[str, Any]) -> Any:
    """The chat template of a folder, from where transformers of any version writes it."""
    files = ("chat_template.json", "processor_config.json")  # of processors, until transformers 4.51
    found = (settings, *(read_json(folder / name, needed=False) for name in files))
    stated = next(filter(None, (each.get("chat_template") for each in found)), None)
    if (file := folder / "chat_template.jinja").exists():
        stated = read_text(file)
    more = {path.stem: read_text(path) for path in sorted(folder.glob("additional_chat_templates/*.jinja"))}
    if more and isinstance(stated, str):
        stated = {"default": stated}
    return join_templates({**stated, **more} if isinstance(stated, dict) else stated or more or None)


def _piece(token: Any) -> str | None:
    return token.get("content") if isinstance(token, dict) else token
