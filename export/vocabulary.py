"""Rebuild a tokenizer from GGUF metadata as a tokenizer.json.

Byte-level BPE ("gpt2") with the pre-tokenizer that the file names, and SentencePiece BPE ("llama") with
its merges recovered from the scores. What a file leaves to its architecture's name is known of phi3, whose control
tokens take the white space behind them. Knows nothing of weights.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from edgespec.errors import SourceError

_MAX_PIECE = 1024  # the longest in use are runs of 256 spaces; recovering merges takes its square
_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 2, 3, 4, 5

# Tokens that end an answer though a file may not list them as such.
END_OF_TURN = (
    "<|im_end|>",
    "<|endoftext|>",
    "<|eot_id|>",
    "<|end_of_text|>",
    "<|eom_id|>",
    "<|end|>",
    "<end_of_turn>",
    "</s>",
)
# Of phi3's control tokens, these alone leave the white space behind them.
_KEEP_SPACE = {"<unk>", "<s>", "<|endoftext|>"}

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LETTERS = r"|[^\r\n\p{L}\p{N}]?\p{L}+"


def _split(pattern: str) -> pre_tokenizers.PreTokenizer:
    parts = [
        pre_tokenizers.Split(Regex(pattern), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
    return pre_tokenizers.Sequence(parts)


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _single_digits() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _qwen2() -> pre_tokenizers.PreTokenizer:
    return _split(_CONTRACTIONS + _LETTERS + r"|\p{N}" + _TAIL)


def _llama3() -> pre_tokenizers.PreTokenizer:
    return _split(_CONTRACTIONS + _LETTERS + r"|\p{N}{1,3}" + _TAIL)


_PRE_TOKENIZERS = {
    "gpt-2": _gpt2,
    "olmo": _gpt2,
    "smollm": _single_digits,
    "starcoder": _single_digits,
    "qwen2": _qwen2,
    "deepseek-r1-qwen": _qwen2,
    "dbrx": _llama3,
    "llama-bpe": _llama3,
    "llama3": _llama3,
    "llama-v3": _llama3,
    "smaug-bpe": _llama3,
}
_NFC = ("qwen2", "deepseek-r1-qwen")
_WHOLE_WORDS_FIRST = ("llama-bpe", "llama3", "llama-v3", "smaug-bpe")


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """A tokenizer and what a chat needs to know about it."""

    tokenizer_json: str
    chat_template: str | None
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    add_bos: bool


def vocabulary_from_gguf(path: object, metadata: Mapping[str, Any]) -> Vocabulary:
    """Raises SourceError: no tokenizer in the file, or one of a kind that is not known."""

    def get(key: str, default: Any = None) -> Any:
        return metadata.get(f"tokenizer.ggml.{key}", default)

    kind, pieces = get("model"), get("tokens")
    if not kind or not isinstance(pieces, list) or not pieces:
        raise SourceError(f"{path} carries no tokenizer; use a GGUF file that is made for text generation")
    types = get("token_type", [1] * len(pieces))
    if len(types) != len(pieces):
        raise SourceError(f"{path} has {len(pieces)} tokens but {len(types)} token types; the file is damaged")
    pieces = pieces[: _num_used(pieces, types)]
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
    taking = set(control) - _KEEP_SPACE if is_phi3 else set()
    tokenizer.add_special_tokens(
        [AddedToken(piece, special=True, normalized=False, rstrip=piece in taking) for piece in control]
    )
    # Runs of spaces, which gemma's files spell ▁▁, are found once the text is spelled so too.
    tokenizer.add_tokens([AddedToken(piece, normalized=not prefix and set(piece) == {"▁"}) for piece in defined])
    return Vocabulary(
        tokenizer_json=tokenizer.to_str(),
        chat_template=metadata.get("tokenizer.chat_template"),
        bos_token_id=get("bos_token_id"),
        eos_token_ids=_end_tokens(metadata, pieces, set(control)),
        add_bos=add_bos,
    )


def _num_used(pieces: list[str], types: list[int]) -> int:
    """How many tokens there are before the padding, whose pieces a converter made up as [PAD0], [PAD1], …"""
    used = len(pieces)
    while used and types[used - 1] == _UNUSED and pieces[used - 1] == f"[PAD{used - 1}]":
        used -= 1
    return used


def _is_control(piece: str, type_: int) -> bool:
    """Some files hold <end_of_turn> as a token of the user's own; gemma's </s> is HTML, and is one."""
    return type_ == _CONTROL or (type_ == _USER_DEFINED and piece in END_OF_TURN and piece != "</s>")


def _end_tokens(metadata: Mapping[str, Any], pieces: list[str], control: set[str]) -> tuple[int, ...]:
    stated = [metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")]
    ids = {token for token in stated if isinstance(token, int) and 0 <= token < len(pieces)}
    named = control.intersection(END_OF_TURN)
    ids |= {token for token, piece in enumerate(pieces) if piece in named}
    return tuple(sorted(ids))


def _byte_level(path: object, pieces: list[str], merges: Any, pre: str) -> Tokenizer:
    if pre not in _PRE_TOKENIZERS:
        known = ", ".join(sorted(_PRE_TOKENIZERS))
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
    tokenizer.pre_tokenizer = _PRE_TOKENIZERS[pre]()
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
            splits = ((piece[:i], piece[i:]) for i in range(1, len(piece)))
            ranked += [(-scores[token], token, pair) for pair in splits if pair[0] in vocab and pair[1] in vocab]
    merges = [pair for _, _, pair in sorted(ranked, key=lambda entry: (_rank(entry[0]), entry[1]))]
    unknown = next((pieces[i] for i, type_ in enumerate(types) if type_ == _UNKNOWN), None)
    tokenizer = Tokenizer(models.BPE(vocab, merges, byte_fallback=True, fuse_unk=True, unk_token=unknown))
    steps: list[normalizers.Normalizer] = [normalizers.Prepend("▁")] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer


def _rank(negative_score: float) -> float:
    return negative_score if math.isfinite(negative_score) else math.inf
