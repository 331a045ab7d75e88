"""Small tokenizers of the kinds that model families have, as the keys of a GGUF file.

Each has three control tokens, all bytes, and merges. The merges that are learned here know no words, so that they
show where a pre-tokenizer cuts.
"""

from collections.abc import Iterable
from typing import Any

from tiny import MERGES, byte_pieces
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from edgespec.export.vocabulary import vocabulary_from_gguf

_CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_LLAMA3 = ("<|begin_of_text|>", "<|start_header_id|>", "<|eot_id|>")
_SENTENCEPIECE = ("<unk>", "<s>", "</s>")
_GRANITE = ("<|end_of_text|>", "<|start_of_role|>", "<|end_of_role|>")
_DEEPSEEK = ("<｜begin▁of▁sentence｜>", "<｜User｜>", "<｜end▁of▁sentence｜>")
# By the name in a GGUF file, the control tokens that go with it: begin, a mark of turns, end.
BYTE_LEVEL: dict[str, tuple[str, str, str]] = {
    **dict.fromkeys(("gpt-2", "default", "smollm", "qwen2", "qwen35", "dbrx", "olmo", "starcoder"), _CHATML),
    **dict.fromkeys(("a.x-4.0", "mellum", "trillion", "granite-docling", "minerva-7b", "megrez"), _CHATML),
    **dict.fromkeys(("kormo", "f2llmv2", "minicpm5", "solar-open"), _CHATML),
    **dict.fromkeys(("lfm2", "falcon-h1"), _LLAMA3),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "smaug-bpe", "falcon3", "pixtral", "midm-2.0"), _LLAMA3),
    **dict.fromkeys(("deepseek-llm", "deepseek-coder", "deepseek-v3", "deepseek-r1-qwen"), _DEEPSEEK),
    "minimax-m2": ("]~!b[", "]~b]", "[e~["),
    "tekken": ("<s>", "[INST]", "</s>"),
    "refact": _GRANITE,
    "gpt-4o": ("<|endoftext|>", "<|user|>", "<|end|>"),
    **dict.fromkeys(("glm4", "chatglm-bpe"), ("[gMASK]", "<|user|>", "<|endoftext|>")),
    **dict.fromkeys(("exaone", "exaone4", "exaone-moe"), ("[BOS]", "[|user|]", "[|endofturn|]")),
    **dict.fromkeys(("hunyuan", "hunyuan-dense"), ("<|startoftext|>", "<|extra_0|>", "<|eos|>")),
    "seed-coder": ("<seed:bos>", "<seed:tool_call>", "<seed:eos>"),
}
# Of SentencePiece: with a space before each text, and without.
SENTENCEPIECE = {"spm": True, "spm without a space before": False}
GEMMA4 = "gemma4"  # pieces of SentencePiece whose merges are listed
KINDS = (*BYTE_LEVEL, *SENTENCEPIECE, GEMMA4)
# The kind of a family where it is not llama's SentencePiece.
_FAMILIES = {
    "llama3": "llama-bpe",
    **dict.fromkeys(("qwen2", "qwen2-yarn", "qwen3", "qwen3_moe", "mimo"), "qwen2"),
    **dict.fromkeys(("granite", "granitemoe", "granitemoehybrid"), "refact"),
    "smollm3": "smaug-bpe",
    **dict.fromkeys(("olmo2", "olmo3"), "dbrx"),
    **dict.fromkeys(("gemma2", "gemma3"), "spm without a space before"),
    **dict.fromkeys(("gemma4", "gemma4-shared"), "gemma4"),
    **dict.fromkeys(("phi3-partial", "gpt_oss", "gpt_oss-limit"), "gpt-4o"),  # phi3-partial as Phi-4-mini
    **dict.fromkeys(("lfm2", "lfm2_moe"), "lfm2"),
    **dict.fromkeys(("falcon_h1", "falcon_h1-normed"), "falcon-h1"),
    "minimax_m2": "minimax-m2",
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe"), "qwen35"),
    **dict.fromkeys(("qwen3_next", "qwen2_moe"), "qwen2"),
    "olmoe": "olmo",
    "seed_oss": "seed-coder",
    "glm4": "glm4",
    "exaone4": "exaone4",
    "hunyuan_v1_dense": "hunyuan-dense",
    "ministral3": "tekken",
}


def kind_of(family: str) -> str:
    """The kind of tokenizer that a family's models have."""
    return _FAMILIES.get(family, "spm")


def gguf_keys(kind: str, merges: Iterable[str] | None = None) -> dict[str, Any]:
    """A GGUF file's keys of a tokenizer; with the few merges of tiny models, or with others."""
    if kind == GEMMA4:
        return _gemma4(merges)
    return (_sentencepiece if kind in SENTENCEPIECE else _byte_level)(kind, merges)


def tokenizer_json(kind: str) -> str:
    """The text of a tokenizer.json that cuts and merges as the GGUF keys of this kind say."""
    return vocabulary_from_gguf("made", gguf_keys(kind)).tokenizer_json


def learn_merges(texts: Iterable[str], num_merges: int) -> list[str]:
    """Merges of bytes that cross the borders of words, most frequent first."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = byte_pieces()
    trainer = trainers.BpeTrainer(
        vocab_size=len(alphabet) + num_merges, min_frequency=1, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    vocab = tokenizer.get_vocab()
    found = sorted(vocab, key=lambda piece: vocab[piece])[len(alphabet) :]
    return [" ".join(_halves(piece, vocab)) for piece in found]


def _halves(piece: str, vocab: dict[str, int]) -> tuple[str, str]:
    """Two pieces that were there before, which make this one."""
    cuts = ((piece[:i], piece[i:]) for i in range(1, len(piece)))
    earlier = (cut for cut in cuts if all(vocab.get(part, vocab[piece]) < vocab[piece] for part in cut))
    return min(earlier, key=lambda cut: max(vocab[part] for part in cut))


def _byte_level(kind: str, merges: Iterable[str] | None) -> dict[str, Any]:
    joined = list(MERGES if merges is None else merges)
    begin, *others = BYTE_LEVEL[kind]
    pieces = [begin, *others, *byte_pieces(), *dict.fromkeys(merge.replace(" ", "") for merge in joined)]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": kind,
        "tokenizer.ggml.tokens": pieces,
        "tokenizer.ggml.token_type": [3] * 3 + [1] * (len(pieces) - 3),
        "tokenizer.ggml.merges": joined,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.add_bos_token": kind in ("llama-bpe", "tekken"),
    }


_WORDS = ("▁", "t", "h", "e", "i", "n", "▁t", "he", "in", "▁the")


def _sentencepiece(kind: str, words: Iterable[str] | None) -> dict[str, Any]:
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    joined = [word for word in (_WORDS if words is None else words) if word not in bytes_]
    pieces = [*_SENTENCEPIECE, *bytes_, *joined]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": pieces,
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(i) for i in range(len(joined))],
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(joined),
        "tokenizer.ggml.merges": [],
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_space_prefix": SENTENCEPIECE[kind],
    }


def _gemma4(words: Iterable[str] | None) -> dict[str, Any]:
    """Keys that the converter of Gemma 4 writes: what tells calls and thoughts apart is user-defined."""
    keys = _sentencepiece("spm", words)
    pieces = keys["tokenizer.ggml.tokens"]
    own = [piece for piece in pieces[259:] if len(piece) > 1]
    merges = [f"{piece[:at]} {piece[at:]}" for piece in own for at in range(1, len(piece))]
    known = {*pieces}
    return keys | {
        "tokenizer.ggml.model": GEMMA4,
        "tokenizer.ggml.merges": [merge for merge in merges if known.issuperset(merge.split(" "))],
        "tokenizer.ggml.add_space_prefix": False,
    }


def learn_words(texts: Iterable[str], num_words: int) -> list[str]:
    """Pieces of SentencePiece, best first: characters, and what they are joined to."""
    spelled = [text.replace(" ", "▁") for text in texts]
    tokenizer = Tokenizer(models.BPE())
    trainer = trainers.BpeTrainer(vocab_size=num_words, min_frequency=1, show_progress=False)
    tokenizer.train_from_iterator(spelled, trainer)
    vocab = tokenizer.get_vocab()
    in_order = [piece for piece in sorted(vocab, key=lambda piece: vocab[piece]) if "\0" not in piece]
    longer = [piece for piece in in_order if len(piece) > 1]
    return [*longer, *(piece for piece in in_order if len(piece) == 1)]
