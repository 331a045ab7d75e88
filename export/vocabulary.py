"""Rebuild a tokenizer from GGUF metadata as a tokenizer.json.

Byte-level BPE ("gpt2") with the pre-tokenizer that the file names, and SentencePiece BPE ("llama") with
its merges recovered from the scores. A file of phi3 does not state that its control tokens absorb the white space
after them. Knows nothing of weights.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from edgespec.errors import SourceError
from edgespec.text.stored_template import join_templates, set_end_token

_MAX_PIECE = 1024  # the longest in use are runs of 256 spaces; recovering merges takes its square
_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 2, 3, 4, 5

# Tokens that end an answer though a file may not list them as such.
END_OF_TURN = (
    "<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|end_of_text|>", "<|eom_id|>", "<|end|>",
    "<end_of_turn>", "</s>",
)  # fmt: skip
# The control tokens of phi3 that do not absorb the white space after them.
_KEEP_SPACE = {"<unk>", "<s>", "<|endoftext|>"}

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LETTERS = r"|[^\r\n\p{L}\p{N}]?\p{L}+"
_QWEN2 = _CONTRACTIONS + _LETTERS + r"|\p{N}" + _TAIL
_LLAMA3 = _CONTRACTIONS + _LETTERS + r"|\p{N}{1,3}" + _TAIL
_NFC = ("qwen2", "deepseek-r1-qwen")
_WHOLE_WORDS_FIRST = ("llama-bpe", "llama3", "llama-v3", "smaug-bpe")
_SINGLE_DIGITS = ("smollm", "starcoder")
# Pre-tokenizers by the name in a file; None for GPT-2's, which the library has built in.
_PATTERNS = {
    **dict.fromkeys(("gpt-2", "olmo", *_SINGLE_DIGITS), None),
    **dict.fromkeys(_NFC, _QWEN2),
    **dict.fromkeys(("dbrx", *_WHOLE_WORDS_FIRST), _LLAMA3),
}


def _pre_tokenizer(name: str) -> pre_tokenizers.PreTokenizer:
    pattern = _PATTERNS[name]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None)
    if pattern is not None:
        return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), byte_level])
    if name in _SINGLE_DIGITS:
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    return byte_level


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """A tokenizer, its special tokens and its chat template."""

    tokenizer_json: str
    chat_template: str | None
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    add_bos: bool


def vocabulary_from_gguf(path: object, metadata: Mapping[str, Any]) -> Vocabulary:
    """The tokenizer that the metadata describes. Raises SourceError: There is none, or one of an unknown kind."""

    def get(key: str, default: Any = None) -> Any:
        return metadata.get(f"tokenizer.ggml.{key}", default)

    kind, pieces = get("model"), get("tokens")
    if not kind or not isinstance(pieces, list) or not pieces:
        raise SourceError(f"{path} carries no tokenizer; use a GGUF file that is made for text generation")
    types = get("token_type", [1] * len(pieces))
    if len(types) != len(pieces):
        raise SourceError(f"{path} has {len(pieces)} tokens but {len(types)} token types; the file is damaged")
    pieces = pieces[: _count_real(pieces, types)]
    types = types[: len(pieces)]
    add_bos, prefix = bool(get("add_bos_token", kind == "llama")), bool(get("add_space_prefix", True))
    if kind == "gpt2":
        tokenizer = _byte_level(path, pieces, get("merges"), get("pre", "default"))
    elif kind == "llama":
        tokenizer = _sentencepiece(path, pieces, get("scores"), types, prefix)
    else:
        raise SourceError(f"{path} has a tokenizer of kind '{kind}'; known are gpt2 and llama")
    typed = list(zip(pieces, types, strict=True))
    control = [piece for piece, type_ in typed if _is_control(piece, type_)]
    defined = [piece for piece, type_ in typed if type_ == _USER_DEFINED and not _is_control(piece, type_)]
    is_phi3 = kind == "llama" and metadata.get("general.architecture") == "phi3"  # Phi-4's tokenizer is gpt2
    absorbing = set(control) - _KEEP_SPACE if is_phi3 else set()
    tokenizer.add_special_tokens(
        [AddedToken(piece, special=True, normalized=False, rstrip=piece in absorbing) for piece in control]
    )
    # Runs of spaces, which gemma's files spell ▁▁, are found once the text is spelled so too.
    tokenizer.add_tokens([AddedToken(piece, normalized=not prefix and set(piece) == {"▁"}) for piece in defined])
    ends, eos = _end_tokens(metadata, pieces, set(control)), get("eos_token_id")
    piece = pieces[eos] if eos in ends else None
    return Vocabulary(
        tokenizer_json=tokenizer.to_str(),
        chat_template=set_end_token(_template(metadata), ends, eos, piece),
        bos_token_id=get("bos_token_id"),
        eos_token_ids=ends,
        add_bos=add_bos,
    )


def _template(metadata: Mapping[str, Any]) -> Any:
    """The chat template; one for a purpose has its name behind the key."""
    key = "tokenizer.chat_template"
    named = {name[len(key) + 1 :]: text for name, text in metadata.items() if name.startswith(f"{key}.")}
    stated = metadata.get(key)
    return join_templates(named | {"default": stated}) if named and isinstance(stated, str) else stated


def _count_real(pieces: list[str], types: list[int]) -> int:
    """The number of tokens before the padding, which converters name [PAD0], [PAD1], …"""
    used = len(pieces)
    while used and types[used - 1] == _UNUSED and pieces[used - 1] == f"[PAD{used - 1}]":
        used -= 1
    return used


def _is_control(piece: str, type_: int) -> bool:
    """True if a token controls turns; some files declare <end_of_turn> as user-defined."""
    # gemma's </s> is HTML, and really is user-defined.
    return type_ == _CONTROL or (type_ == _USER_DEFINED and piece in END_OF_TURN and piece != "</s>")


def _end_tokens(metadata: Mapping[str, Any], pieces: list[str], control: set[str]) -> tuple[int, ...]:
    stated = [metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")]
    ids = {token for token in stated if isinstance(token, int) and 0 <= token < len(pieces)}
    named = control.intersection(END_OF_TURN)
    ids |= {token for token, piece in enumerate(pieces) if piece in named}
    return tuple(sorted(ids))


def _byte_level(path: object, pieces: list[str], merges: Any, pre: str) -> Tokenizer:
    if pre not in _PATTERNS:
        known = ", ".join(sorted(_PATTERNS))
        raise SourceError(f"{path} names the pre-tokenizer '{pre}'; known are {known}")
    if not isinstance(merges, list):
        raise SourceError(f"{path} has no merges for its byte-level tokenizer; the file is damaged")
    pairs = [tuple(merge.split(" ", 1)) for merge in merges]
    vocab = {piece: token for token, piece in enumerate(pieces)}
    try:
        model = models.BPE(vocab, pairs, ignore_merges=pre in _WHOLE_WORDS_FIRST)
    except Exception as error:  # the library raises its own bare Exception
        raise SourceError(f"{path}: its merges and tokens do not fit ({error}); the file is damaged") from None
    tokenizer = Tokenizer(model)
    if pre in _NFC:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _pre_tokenizer(pre)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(path: object, pieces: list[str], scores: Any, types: list[int], prefix: bool) -> Tokenizer:
    """SentencePiece BPE joins the pair whose joined piece scores best: merges ranked by that score."""
    if not isinstance(scores, list) or len(scores) < len(pieces):
        raise SourceError(f"{path} has no scores for its SentencePiece tokenizer; the file is damaged")
    if (longest := max(pieces, key=len)) and len(longest) > _MAX_PIECE:
        raise SourceError(f"{path} has a token of {len(longest)} characters, at most {_MAX_PIECE} are read")
    vocab = {piece: token for token, piece in enumerate(pieces)}
    ranked: list[tuple[float, int, tuple[str, str]]] = []
    for token, piece in enumerate(pieces):
        if types[token] == 1:
            rank = -scores[token] if math.isfinite(scores[token]) else math.inf
            ranked += [
                (rank, token, (piece[:i], piece[i:]))
                for i in range(1, len(piece))
                if piece[:i] in vocab and piece[i:] in vocab
            ]
    merges = [pair for _, _, pair in sorted(ranked, key=lambda entry: entry[:2])]
    unknown = next((pieces[i] for i, type_ in enumerate(types) if type_ == _UNKNOWN), None)
    tokenizer = Tokenizer(models.BPE(vocab, merges, byte_fallback=True, fuse_unk=True, unk_token=unknown))
    steps: list[normalizers.Normalizer] = [normalizers.Prepend("▁")] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer
