"""Rebuild a tokenizer from GGUF metadata as a tokenizer.json.

Byte-level BPE ("gpt2") with the pre-tokenizer that the file names, SentencePiece BPE ("llama") with its merges
recovered from the scores, and that ("gemma4") with merges that the file lists. A file of phi3 does not state that
its control tokens absorb the white space after them. Knows nothing of weights.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from edgespec.errors import SourceError
from edgespec.system.tables import read_table
from edgespec.text.stored_template import join_templates, set_end_token, turn_marks
from edgespec.text.tokenizer import TWIN
from edgespec.tools.channels import CHANNEL

_MAX_TWINS = 2000  # each takes a character more than the one before
_MAX_PIECE = 1024  # the longest in use are runs of 256 spaces; recovering merges takes its square
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 1, 2, 3, 4, 5
_TEXTS, _SPECIAL = (_NORMAL, _USER_DEFINED), (_CONTROL, _UNKNOWN)
_PIPED = re.compile(r"<[|｜][^<>\s]+[|｜]>")

_TABLE = read_table(__file__, "pre_tokenizers.toml")
END_OF_TURN: tuple[str, ...] = _TABLE["turns"]["ends"]
_END_OF_MESSAGES: tuple[str, ...] = _TABLE["turns"]["ends_of_messages"]
_TRAITS: Mapping[str, tuple[str, ...]] = _TABLE["traits"]
_PATTERNS: dict[str, tuple[str, ...]] = {
    name: each["cuts"] for each in _TABLE["patterns"] for name in each["names"]
}
# The control tokens of phi3 that do not absorb the white space after them.
_KEEP_SPACE = {"<unk>", "<s>", "<|endoftext|>"}


def make_pre_tokenizer(name: str) -> pre_tokenizers.PreTokenizer:
    """What cuts a text, by its name in a GGUF file."""
    patterns = _PATTERNS[name]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not patterns)
    if patterns:
        splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
        return pre_tokenizers.Sequence([*splits, byte_level])
    if name in _TRAITS["single_digits"]:
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    return byte_level


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """A tokenizer, its special tokens and its chat template.

    suppressed_token_ids: Tokens that are never to be written.
    notes: What is to be said of how they were read.
    """

    tokenizer_json: str
    chat_template: str | None
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    add_bos: bool
    suppressed_token_ids: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def special_tokens(self) -> dict[str, Any]:
        """The fields of a manifest about them."""
        return {
            "bos_token_id": self.bos_token_id,
            "eos_token_ids": self.eos_token_ids,
            "add_bos": self.add_bos,
            "suppressed_token_ids": self.suppressed_token_ids,
        }


def ends_of_turn(special: Collection[str]) -> tuple[str, ...]:
    """Tokens that end an answer of a model with these special tokens."""
    return _END_OF_MESSAGES if CHANNEL in special else END_OF_TURN


def read_suppressed(path: object, stated: Any, num_tokens: int) -> tuple[int, ...]:
    """The tokens that a source says never to write, ascending, of those that the model has.

    Raises SourceError: They are no list of token ids.
    """
    if stated is not None and not (isinstance(stated, list) and all(type(token) is int for token in stated)):
        raise SourceError(
            f"{path}: suppress_tokens is {stated!r}, wanted a list of token ids; correct or remove it"
        )
    return tuple(sorted({token for token in stated or () if 0 <= token < num_tokens}))


def say_left_out(num_tokens: int) -> tuple[str, ...]:
    """The note on tokens that the model has no rows for."""
    return (f"leaving out {num_tokens} tokens that the embedding has no rows for",) if num_tokens else ()


def require_ids(path: object, vocabulary: Vocabulary, size: int, tokenizer: Tokenizer) -> None:
    """Raises SourceError: An id exceeds the rows of the embedding, so that a look-up would read past its end."""
    largest = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=0)
    ends = [("eos", token) for token in vocabulary.eos_token_ids]
    for what, token in [("largest", largest), ("bos", vocabulary.bos_token_id), *ends]:
        if token is not None and not 0 <= token < size:
            raise SourceError(
                f"{path}: the {what} token id of its tokenizer is {token}, "
                f"but its embedding has {size} rows; tokenizer and weights do not belong together"
            )


def vocabulary_from_gguf(path: object, metadata: Mapping[str, Any], num_rows: int | None = None) -> Vocabulary:
    """The tokenizer that the metadata describes.

    num_rows: Of the embedding; added tokens behind them are left out.

    Raises SourceError: There is none, one of an unknown kind, or one of another model.
    """

    def get(key: str, default: Any = None) -> Any:
        return metadata.get(f"tokenizer.ggml.{key}", default)

    def token_id(key: str, default: int | None = None) -> int | None:
        found = get(f"{key}_token_id", default)
        if found is not None and type(found) is not int:  # True is an int too
            raise SourceError(f"{path}: {key}_token_id is {found!r}, wanted a token's number; the file is damaged")
        return found

    kind, pieces = get("model"), get("tokens")
    if not kind or not isinstance(pieces, list) or not pieces:
        raise SourceError(f"{path} carries no tokenizer; use a GGUF file that is made for text generation")
    types = get("token_type", [_NORMAL] * len(pieces))
    if len(types) != len(pieces):
        raise SourceError(f"{path} has {len(pieces)} tokens but {len(types)} token types; the file is damaged")
    notes = say_left_out(_count_real(pieces, types, None) - _count_real(pieces, types, num_rows))
    if kind == "gpt2" and get("pre", "default") == "default":
        notes += ("the file names no pre-tokenizer: text is cut as llama.cpp cuts it, which may be worse",)
    types = types[: _count_real(pieces, types, num_rows)]
    pieces = _distinct(path, pieces[: len(types)])
    prefix, template = bool(get("add_space_prefix", True)) and kind != "gemma4", _template(metadata)
    tokenizer = _tokenizer(path, get, pieces, types, prefix)
    typed = list(zip(pieces, types, strict=True))
    found = (*map(token_id, ("eos", "eot", "eom")), *get("eos_token_ids", ()))
    stated = {token for token in found if type(token) is int and 0 <= token < len(pieces)}
    marks = {pieces[token] for token in stated} | _marks(template, typed)
    control = [piece for piece, type_ in typed if type_ in _SPECIAL or (type_ in _TEXTS and piece in marks)]
    defined = [piece for piece, type_ in typed if type_ == _USER_DEFINED and piece not in marks]
    is_phi3 = kind == "llama" and metadata.get("general.architecture") == "phi3"  # Phi-4's tokenizer is gpt2
    _add_tokens(tokenizer, control, defined, set(control) - _KEEP_SPACE if is_phi3 else set(), prefix)
    named = set(control).intersection(ends_of_turn(control))
    ends = tuple(sorted(stated | {token for token, piece in enumerate(pieces) if piece in named}))
    usual = 1 if kind == "llama" and types[1:2] == [_CONTROL] else None  # SentencePiece files of 2023 leave it out
    bos = token_id("bos", usual)
    bos = usual if bos is not None and not 0 <= bos < len(pieces) else bos  # as 2^32 - 1, which is for none
    eos, begins = token_id("eos"), kind == "llama" or get("pre") in _TRAITS["bos_first"]
    vocabulary = Vocabulary(
        tokenizer_json=tokenizer.to_str(),
        chat_template=set_end_token(template, ends, eos, pieces[eos] if eos in ends else None),
        bos_token_id=bos,
        eos_token_ids=ends,
        # Files of Gemma 4 say false, and without this token it writes rubbish.
        add_bos=kind == "gemma4" or bool(get("add_bos_token", begins)),
        suppressed_token_ids=read_suppressed(path, get("suppress_tokens"), len(pieces)),
        notes=notes,
    )
    if num_rows is not None and len(pieces) > num_rows:
        require_ids(path, vocabulary, num_rows, tokenizer)
    return vocabulary


def _tokenizer(
    path: object, get: Callable[..., Any], pieces: list[str], types: list[int], prefix: bool
) -> Tokenizer:
    """The tokenizer of the kind that the file names, without added tokens; get: Looks a setting up."""
    kind = get("model")
    if kind == "gpt2":
        return _byte_level(path, pieces, get("merges"), get("pre", "default"))
    if kind == "llama":
        return _sentencepiece(pieces, _merges_by_score(path, pieces, get("scores"), types), types, prefix)
    if kind != "gemma4":
        raise SourceError(
            f"{path} has a tokenizer of kind '{kind}'; take the model's safetensors, with a tokenizer.json; "
            "known are gpt2, llama and gemma4"
        )
    tokenizer = _checked(path, lambda: _sentencepiece(pieces, _stated_merges(path, get("merges")), types, prefix))
    # No merge joins a line end to something else.
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"\n+"), "isolated")
    return tokenizer


def _add_tokens(
    tokenizer: Tokenizer, control: Sequence[str], defined: Sequence[str], absorbing: Collection[str], prefix: bool
) -> None:
    """Add control tokens, of which some absorb the white space after them, and those that a user defined."""
    tokenizer.add_special_tokens(
        [AddedToken(piece, special=True, normalized=False, rstrip=piece in absorbing) for piece in control]
    )
    # Runs of spaces, which gemma's files spell ▁▁, are found once the text is spelled so too.
    tokenizer.add_tokens([AddedToken(piece, normalized=not prefix and set(piece) == {"▁"}) for piece in defined])


def _marks(template: Any, typed: Iterable[tuple[str, int]]) -> set[str]:
    """Tokens that control turns though a file may give them another type, as some do with <end_of_turn>."""
    # gemma's </s> is HTML, and really is user-defined.
    ends = set(END_OF_TURN) - {"</s>"}
    added = {piece for piece, type_ in typed if type_ == _USER_DEFINED or _PIPED.fullmatch(piece)}
    return ends | turn_marks(template, added)


def _distinct(path: object, pieces: list[str]) -> list[str]:
    """Pieces, no two of them equal: the last of equal ones is found in text, others are marked as its twins."""
    last, known, found = {piece: token for token, piece in enumerate(pieces)}, set(pieces), []
    if (num_twins := len(pieces) - len(known)) > _MAX_TWINS:
        raise SourceError(
            f"{path} has {num_twins} tokens that are spelled as others are, at most {_MAX_TWINS} are read; the "
            "file is damaged"
        )
    num_marks: Counter[str] = Counter()
    for token, piece in enumerate(pieces):
        twin = piece
        while last[piece] != token and twin in known:
            num_marks[piece] += 1
            twin = piece + TWIN * num_marks[piece]
        known.add(twin)
        found.append(twin)
    return found


def _template(metadata: Mapping[str, Any]) -> Any:
    """The chat template; one for a purpose has its name behind the key."""
    key = "tokenizer.chat_template"
    named = {name[len(key) + 1 :]: text for name, text in metadata.items() if name.startswith(f"{key}.")}
    stated = metadata.get(key)
    return join_templates(named | ({} if stated is None else {"default": stated})) if named else stated


def _count_real(pieces: list[str], types: list[int], num_rows: int | None) -> int:
    """The number of tokens before padding, which converters name [PAD0], …, and before added ones without rows."""
    used = len(pieces)
    while used and (
        (types[used - 1] == _UNUSED and pieces[used - 1] == f"[PAD{used - 1}]")
        or (num_rows is not None and used > num_rows and types[used - 1] in (_CONTROL, _USER_DEFINED))
    ):
        used -= 1
    return used


def _byte_level(path: object, pieces: list[str], merges: Any, pre: str) -> Tokenizer:
    if pre not in _PATTERNS:
        known = ", ".join(sorted(_PATTERNS))
        raise SourceError(
            f"{path} names the pre-tokenizer '{pre}', and not how it cuts text; take the model's safetensors, "
            f"where tokenizer.json says how; known are {known}"
        )
    pairs = _stated_merges(path, merges)
    vocab = {piece: token for token, piece in enumerate(pieces)}
    first = pre in (*_TRAITS["bos_first"], *_TRAITS["whole_words"])
    tokenizer = _checked(path, lambda: Tokenizer(models.BPE(vocab, pairs, ignore_merges=first)))
    if pre in _TRAITS["nfc"]:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = make_pre_tokenizer(pre)
    untwin = _untwin(pieces)
    tokenizer.decoder = decoders.Sequence([*untwin, decoders.ByteLevel()]) if untwin else decoders.ByteLevel()
    return tokenizer


def _stated_merges(path: object, merges: Any) -> list[tuple[str, str]]:
    if not isinstance(merges, list):
        raise SourceError(f"{path} has no merges for its tokenizer; the file is damaged")
    return [(first, second) for first, _, second in (merge.partition(" ") for merge in merges)]


def _checked(path: object, make: Callable[[], Tokenizer]) -> Tokenizer:
    try:
        return make()
    except SourceError:
        raise
    except Exception as error:  # the library raises its own bare Exception
        raise SourceError(f"{path}: its merges and tokens do not fit ({error}); the file is damaged") from None


def _untwin(pieces: Iterable[str]) -> list[decoders.Decoder]:
    """The step that decodes twins; none where there are none."""
    return [decoders.Replace(TWIN, "")] if any(piece.endswith(TWIN) for piece in pieces) else []


def _merges_by_score(path: object, pieces: list[str], scores: Any, types: list[int]) -> list[tuple[str, str]]:
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
    return [pair for _, _, pair in sorted(ranked, key=lambda entry: entry[:2])]


def _sentencepiece(
    pieces: list[str], merges: Sequence[tuple[str, str]], types: list[int], prefix: bool
) -> Tokenizer:
    """Characters that are merged, and bytes for those that are no piece; prefix: a space stands before a text."""
    vocab = {piece: token for token, piece in enumerate(pieces)}
    unknown = next((pieces[i] for i, type_ in enumerate(types) if type_ == _UNKNOWN), None)
    tokenizer = Tokenizer(models.BPE(vocab, merges, byte_fallback=True, fuse_unk=True, unk_token=unknown))
    steps: list[normalizers.Normalizer] = [normalizers.Prepend("▁")] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    tokenizer.decoder = decoders.Sequence(
        [*_untwin(pieces), decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer
