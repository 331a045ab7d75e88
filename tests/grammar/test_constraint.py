"""A grammar as the constraint of one answer: masks, forced tokens, and the way to the end."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Thread
from typing import Any

import jsonschema
import numpy as np
import pytest
import tiny
import tokenizers
from schemas import make_schemas

from edgespec.errors import FormatError
from edgespec.grammar.compile import GrammarCompiler
from edgespec.grammar.constraint import GrammarConstraint
from edgespec.grammar.response_format import read_format
from edgespec.grammar.schema import ENSURED_FORMATS
from edgespec.text.tokenizer import Tokenizer
from edgespec.types import TokenIds

END, OTHER_END = 2, 0
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "kind": {"enum": ["alpha", "beta", "gamma"]},
        "home": {
            "type": "object",
            "properties": {"street_name": {"type": "string"}, "code": {"type": "string", "pattern": "^[0-9]{5}$"}},
            "required": ["street_name", "code"],
        },
        "tags": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["name", "age", "kind", "tags"],
    "additionalProperties": False,
}


SMALL = {"type": "array", "items": {"enum": ["up", "down", 30]}, "minItems": 1}


@pytest.fixture(scope="module")
def compiler(tiny_model: Path) -> GrammarCompiler:
    return GrammarCompiler(tiny_model / "tokenizer.json", tiny.VOCAB, (END, OTHER_END))


def constraint_of(
    compiler: GrammarCompiler, stated: dict[str, Any], max_tokens: int = 500, given: TokenIds | None = None
) -> GrammarConstraint:
    wanted = read_format(stated)
    assert wanted
    given = np.zeros(0, np.int32) if given is None else given
    return GrammarConstraint(compiler.compile(wanted), max_tokens, given)


def schema(stated: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": stated}}


def regex(pattern: str) -> dict[str, Any]:
    return {"type": "regex", "regex": pattern}


def grammar(text: str) -> dict[str, Any]:
    return {"type": "grammar", "grammar": text}


def allowed(constraint: GrammarConstraint, answer: TokenIds) -> list[int]:
    bias = constraint.bias(answer)
    assert bias is not None
    assert bias.shape == (tiny.VOCAB,)
    assert set(np.unique(bias).tolist()) <= {0.0, -np.inf}
    found: list[int] = np.flatnonzero(bias == 0).tolist()
    return found


def answer_at_random(constraint: GrammarConstraint, seed: int) -> TokenIds:
    """An answer of tokens that may follow and leave room, at random; what is forced must be all that may."""
    rng, answer = np.random.default_rng(seed), np.zeros(0, np.int32)
    while not len(answer) or answer[-1] not in (END, OTHER_END):
        choices = allowed(constraint, answer)
        if len(forced := constraint.forced(answer, 8)):
            assert choices == [forced[0]]
        tried = rng.permutation(choices)[:4].tolist()
        token = next((each for each in tried if constraint.leaves_room(answer, each)), None)
        answer = np.append(answer, np.int32(constraint.way_out(answer) if token is None else token))
    return answer


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("max_tokens", [75, 90])
def test_an_answer_that_nears_its_limit_ends_validly(
    compiler: GrammarCompiler, tokenizer: Tokenizer, seed: int, max_tokens: int
) -> None:
    answer = answer_at_random(constraint_of(compiler, schema(PERSON), max_tokens), seed)
    assert len(answer) <= max_tokens
    jsonschema.validate(json.loads(tokenizer.decode(answer)), PERSON)


@pytest.mark.parametrize(
    "stated",
    [
        {"enum": ["a" * 90, "b"]},
        {"enum": [1e90, 0.1]},
        {"enum": ["\U0001f600" * 30, "b"]},
        {"type": "array", "items": {"const": -1e-90}},
        {"type": "string", "pattern": "^x(a{90})?$"},
        {"type": "object", "properties": {"\u00e9" * 40: {"type": "null"}}, "additionalProperties": False},
    ],
)
def test_no_value_is_begun_that_is_too_long_to_end(
    compiler: GrammarCompiler, tokenizer: Tokenizer, stated: dict[str, Any]
) -> None:
    for seed in range(4):
        answer = answer_at_random(constraint_of(compiler, schema(stated), 40), seed)
        assert len(answer) <= 40
        jsonschema.validate(json.loads(tokenizer.decode(answer)), stated)


@pytest.mark.parametrize("number", range(17))
def test_random_answers_to_schemas_of_all_kinds_are_valid(
    compiler: GrammarCompiler, tokenizer: Tokenizer, number: int
) -> None:
    case = make_schemas(17, seed=1)[number]
    answer = answer_at_random(constraint_of(compiler, schema(case.schema), 140), number)
    assert len(answer) <= 140
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    jsonschema.Draft202012Validator(case.schema, format_checker=checker).validate(
        json.loads(tokenizer.decode(answer))
    )


@pytest.mark.parametrize(
    ("stated", "text"),
    [
        (schema({"type": "string", "pattern": "REF[0-9]+"}), '"xyzREF0"'),
        (schema({"type": "string", "pattern": "größe|€"}), '"xyz€"'),
        (schema({"type": "string", "format": "email"}), '"a@b.co"'),
        (schema({"type": "integer", "exclusiveMinimum": 0, "multipleOf": 10}), "10"),
        (schema({"type": "string", "minLength": 12}), None),
        (regex("a[bc]+d"), "abd"),
        (regex("(x|y|xy)*z"), "z"),
        (grammar('start: "a" /[bc]+/ "d"'), "abd"),
        (grammar('start: "<" %json {"type": "string", "pattern": "REF[0-9]+"} ">"'), '<"REF0">'),
        (grammar('start: head "!" %json {"const": 1}\nhead[suffix="<call>"]: /(.|\\n)*/'), "<call>!1"),
    ],
)
def test_texts_that_go_on_end_where_few_tokens_are_left(
    compiler: GrammarCompiler, tokenizer: Tokenizer, stated: dict[str, Any], text: str | None
) -> None:
    tokens = 30
    for seed in range(2):
        answer = answer_at_random(constraint_of(compiler, stated, tokens), seed)
        assert len(answer) <= tokens
        assert answer[-1] in (END, OTHER_END)
    if text:
        assert constraint_of(compiler, stated).num_allowed(answer[:0], tokenizer.encode(text)) > 0


def test_all_end_tokens_may_follow_exactly_where_the_text_may_end(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    constraint = constraint_of(compiler, regex("ab?c*d?"))
    may_end = {
        text: {END, OTHER_END} <= {*allowed(constraint, tokenizer.encode(text))} for text in ("", "a", "ab", "acc")
    }
    assert may_end == {"": False, "a": True, "ab": True, "acc": True}
    assert allowed(constraint, tokenizer.encode("abcd")) == [END]  # nothing else may follow, and one will do
    assert constraint.forced(tokenizer.encode("abcd"), 5).tolist() == [END]
    assert constraint.bias(np.append(tokenizer.encode("abcd"), np.int32(END))) is None


def test_what_must_follow_is_forced_up_to_the_first_choice(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    constraint = constraint_of(compiler, schema(PERSON))
    begun = constraint.forced(np.zeros(0, np.int32), 50)
    assert tokenizer.decode(begun) == '{"name":"'[: len(tokenizer.decode(begun))]
    assert len(begun) >= 7
    assert len(constraint.forced(np.zeros(0, np.int32), 3)) == 3
    assert not len(constraint.forced(tokenizer.encode('{"name":"'), 5))


def test_drafts_count_up_to_the_first_token_that_may_not_follow(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    constraint, begun = constraint_of(compiler, regex("[ab]{3}c")), np.zeros(0, np.int32)
    assert constraint.num_allowed(begun, tokenizer.encode("abac")) == 4
    assert constraint.num_allowed(begun, tokenizer.encode("abxc")) == 2
    assert constraint.num_allowed(begun, np.append(tokenizer.encode("abac"), np.int32([END, 7, 8]))) == 5
    assert constraint.num_allowed(begun, np.append(tokenizer.encode("ab"), np.int32([END]))) == 2
    assert constraint.num_allowed(tokenizer.encode("zz"), tokenizer.encode("a")) == 0


def test_every_prefix_gives_the_same_whatever_was_asked_before(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    """It is a pure function of the answer: asked in any order, behind branches too, and in another thread."""
    answer = answer_at_random(constraint_of(compiler, schema(SMALL), 26), 5)
    wanted = []
    for i in range(len(answer)):
        fresh = constraint_of(compiler, schema(SMALL), 26)
        wanted.append((allowed(fresh, answer[:i]), fresh.leaves_room(answer[:i], int(answer[i]))))
    constraint, rng = constraint_of(compiler, schema(SMALL), 26), np.random.default_rng(0)
    found: dict[int, tuple[list[int], bool]] = {}

    def ask(order: list[int]) -> None:
        for i in order:
            constraint.bias(np.append(answer[:i], np.int32(tokenizer.encode("x"))))  # a branch that may not be
            found[i] = allowed(constraint, answer[:i]), constraint.leaves_room(answer[:i], int(answer[i]))

    for is_other_thread in (False, True):
        found.clear()
        order = rng.permutation(len(answer)).tolist()
        if is_other_thread:
            thread = Thread(target=ask, args=[order])
            thread.start()
            thread.join()
        else:
            ask(order)
        assert [found[i] for i in range(len(answer))] == wanted


@pytest.mark.parametrize(
    ("stated", "max_tokens", "reason"),
    [
        (schema(PERSON), 20, "allow more tokens"),
        (schema({"type": "string", "minLength": 40}), 20, "allow more tokens"),
        (schema({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}), 100, "no end"),
        (regex("[a-"), 100, "unclosed"),
        (grammar("start: missing"), 100, "missing"),
        (grammar("root ::= ("), 100, "GBNF"),
        (grammar("\x00"), 100, "grammar of response_format"),
        (schema({"properties": {"a": {"items": {"type": "strin"}}}}), 100, "#/properties/a/items"),
        (schema({"type": "array", "uniqueItems": True}), 100, "uniqueItems"),
        (schema({"anyOf": [{"$ref": "#"}]}), 100, "matches no text: no token can come next"),
    ],
)
def test_what_cannot_be_is_refused_with_its_reason(
    compiler: GrammarCompiler, stated: dict[str, Any], max_tokens: int, reason: str
) -> None:
    with pytest.raises(FormatError, match=reason):
        constraint_of(compiler, stated, max_tokens)


def test_a_beginning_is_part_of_what_has_to_match(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    given = tokenizer.encode("ab")
    constraint = constraint_of(compiler, regex("abc+"), 3, given)
    assert allowed(constraint, given) == tokenizer.encode("c").tolist()
    with pytest.raises(FormatError, match="beginning"):
        constraint_of(compiler, regex("abc+"), 3, tokenizer.encode("ax"))


def test_a_tokenizer_that_the_library_cannot_take_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text("{}")
    with pytest.raises(FormatError, match="tokenizer of this model"):
        GrammarCompiler(path, 300, (2,))


def test_a_model_without_an_end_token_is_refused(tiny_model: Path) -> None:
    with pytest.raises(FormatError, match="no end token"):
        GrammarCompiler(tiny_model / "tokenizer.json", tiny.VOCAB, ())


def sentencepiece_file(path: Path, *, strips: bool) -> int:
    """Write a tokenizer of SentencePiece's kind, with tokens of single bytes; returns how many tokens it has."""
    pieces = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *map(chr, range(33, 127)), "▁"]
    vocabulary = {piece: i for i, piece in enumerate(dict.fromkeys([*pieces, '":', '":"', "▁t", "he", "▁the"]))}
    merges = [('"', ":"), ('":', '"'), ("▁", "t"), ("h", "e"), ("▁t", "he")]
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, merges, byte_fallback=True, unk_token="<unk>"))
    spaces = tokenizers.normalizers.Replace(" ", "▁")
    begin = [tokenizers.normalizers.Prepend("▁")] if strips else []
    made.normalizer = tokenizers.normalizers.Sequence([*begin, spaces])
    decoding = tokenizers.decoders
    strip = [decoding.Strip(" ", 1, 0)] if strips else []
    made.decoder = decoding.Sequence(
        [decoding.Replace("▁", " "), decoding.ByteFallback(), decoding.Fuse(), *strip]
    )
    made.add_special_tokens([tokenizers.AddedToken(piece, special=True) for piece in SPECIAL])
    made.save(str(path))
    return int(made.get_vocab_size())


SPECIAL = ("<unk>", "<s>", "</s>")


@pytest.mark.parametrize("strips", [True, False])
def test_answers_match_with_sentencepiece_too(tmp_path: Path, strips: bool) -> None:
    size = sentencepiece_file(tmp_path / "tokenizer.json", strips=strips)
    tokenizer = Tokenizer(tmp_path / "tokenizer.json")
    end = tokenizer.special_tokens["</s>"]
    compiler = GrammarCompiler(tmp_path / "tokenizer.json", size + 5, (end,))
    for seed in range(2):
        constraint = constraint_of(compiler, schema(PERSON), 90)
        rng, answer = np.random.default_rng(seed), np.zeros(0, np.int32)
        while end not in answer:
            bias = constraint.bias(answer)
            assert bias is not None
            tried = rng.permutation(np.flatnonzero(bias == 0))[:4].tolist()
            token = next((each for each in tried if constraint.leaves_room(answer, each)), None)
            answer = np.append(answer, np.int32(constraint.way_out(answer) if token is None else token))
        jsonschema.validate(json.loads(tokenizer.decode(answer)), PERSON)


def test_a_grammar_whose_end_cannot_be_foreseen_is_followed_without(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    """Any text without k, l and m may come before the end, a pattern of a dialect of its own."""
    constraint = constraint_of(
        compiler, grammar("start: TEXT LAST\nTEXT: /[^k-m]+/\nLAST: /\\pN{0}[k-m][t-w][k-m][t-w]qz/"), 30
    )
    begun = tokenizer.encode("the in")
    assert constraint.has_ample_room(begun)
    assert all(constraint.leaves_room(begun, token) for token in allowed(constraint, begun))
    assert constraint.forced(tokenizer.encode("the inktkt"), 5).tolist() == [*tokenizer.encode("qz"), END]


@pytest.mark.parametrize("pattern", [r".+@.+\..+", r"(?s:.*)END", ".*a.{30}", r"[^!]*!END"])
def test_a_way_to_the_end_is_found_behind_any_text(compiler: GrammarCompiler, pattern: str) -> None:
    assert allowed(constraint_of(compiler, regex(pattern), max_tokens=40), np.zeros(0, np.int32))


def test_lists_that_need_numbers_end_with_the_fewest(compiler: GrammarCompiler) -> None:
    lists = {
        key: {"type": "array", "items": {"type": kind}, "minItems": num}
        for key, kind, num in (("a", "integer", 1), ("b", "integer", 1), ("c", "number", 3))
    }
    stated = {
        "type": "object",
        "properties": {**lists, "d": {"enum": [None, True]}},
        "required": ["a", "b", "c", "d"],
    }
    assert allowed(constraint_of(compiler, schema(stated), 40), np.zeros(0, np.int32))


def test_each_format_of_a_text_is_ensured_or_a_note(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    for each in sorted(ENSURED_FORMATS):
        constraint = constraint_of(compiler, schema({"type": "string", "format": each}), 60)
        assert constraint.num_allowed(np.zeros(0, np.int32), tokenizer.encode('"!!!"')) < 5
    constraint = constraint_of(compiler, schema({"type": "string", "format": "password"}), 60)
    assert constraint.num_allowed(np.zeros(0, np.int32), tokenizer.encode('"!!!"')) > 4


@pytest.mark.parametrize(
    ("reference", "name"),
    [
        ("a%20b", "a b"),
        ("a b", "a b"),
        ("a~1b", "a/b"),
        ("a~0b", "a~b"),
        ("a%7E1b", "a/b"),
        ("a%25b", "a%b"),
        ("List[é]", "List[é]"),
    ],
)
def test_references_are_followed_with_their_escapes(
    compiler: GrammarCompiler, tokenizer: Tokenizer, reference: str, name: str
) -> None:
    stated = {"$defs": {name: {"const": "x"}}, "items": {"$ref": f"#/$defs/{reference}"}, "type": "array"}
    answer = tokenizer.encode('["x"]')
    assert constraint_of(compiler, schema(stated)).num_allowed(answer[:0], answer) == len(answer)
    with pytest.raises(FormatError, match="does not hold"):
        constraint_of(compiler, schema({**stated, "$defs": {}}))


def test_references_through_thousands_of_levels_are_followed(compiler: GrammarCompiler) -> None:
    """Without a stack of their own the library would end the process."""
    levels = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(3000)}
    stated = {"$defs": {**levels, "d3000": {"const": "x"}}, "$ref": "#/$defs/d0"}
    constraint = constraint_of(compiler, schema(stated), max_tokens=5)
    assert len(allowed(constraint, np.zeros(0, np.int32))) == 1


def test_values_that_the_library_does_not_read_are_refused(compiler: GrammarCompiler) -> None:
    deep: list[Any] = []
    for _ in range(300):
        deep = [deep]
    with pytest.raises(FormatError, match="recursion"):
        constraint_of(compiler, schema({"const": deep}))


@pytest.mark.parametrize(
    ("bounds", "within", "outside"),
    [
        ({"exclusiveMinimum": 0, "maximum": 0.5}, ["0.5", "0.01"], ["0", "0.6", "0.0"]),
        ({"exclusiveMinimum": 1, "exclusiveMaximum": 1.5}, ["1.4", "1.01"], ["1", "1.5"]),
        ({"minimum": -0.5, "exclusiveMaximum": 0}, ["-0.5", "-0.1"], ["0", "-0"]),
        ({"exclusiveMinimum": 0}, ["1", "0.5"], ["0", "-1"]),
    ],
)
def test_excluded_bounds_are_left_out(
    compiler: GrammarCompiler,
    tokenizer: Tokenizer,
    bounds: dict[str, float],
    within: list[str],
    outside: list[str],
) -> None:
    constraint = constraint_of(compiler, schema({"type": "number", **bounds}))
    for text in (*within, *outside):
        tokens = np.append(tokenizer.encode(text), np.int32(END))
        assert (constraint.num_allowed(np.zeros(0, np.int32), tokens) == len(tokens)) == (text in within), text


def test_an_object_may_have_many_properties_that_may_be_missing(compiler: GrammarCompiler) -> None:
    stated = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(700)}}
    constraint = constraint_of(compiler, schema(stated), max_tokens=10)
    assert constraint.way_out(np.zeros(0, np.int32)) == constraint.forced(np.zeros(0, np.int32), 1)[0]


def test_true_is_a_schema_and_false_is_refused(compiler: GrammarCompiler) -> None:
    assert len(allowed(constraint_of(compiler, schema(True)), np.zeros(0, np.int32))) > 5
    with pytest.raises(FormatError, match="no value"):
        constraint_of(compiler, schema(False))


def test_large_grammars_are_kept_up_to_a_bound(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled, a multiple of 99,000 takes 25 MB."""
    monkeypatch.setattr("edgespec.grammar.compile._MAX_KEPT", 1_900)
    small = read_format({"type": "regex", "regex": "in"})
    large = [
        read_format({"type": "json_schema", "schema": {"const": str(i) + "a" * 300, "type": "string"}})
        for i in range(6)
    ]
    first = [compiler.compile(wanted) for wanted in (small, *large) if wanted]
    again = [compiler.compile(wanted) for wanted in (*reversed(large), small) if wanted]
    assert [one is other for one, other in zip(reversed(first), again, strict=True)] == [True] * 5 + [False] * 2


def test_one_grammar_is_compiled_at_a_time(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twenty at once took 2 s from whoever waited for the interpreter."""
    busy, most, whole = 0, 0, GrammarCompiler._compile

    def count(self: GrammarCompiler, *given: Any) -> Any:
        nonlocal busy, most
        busy += 1
        most = max(most, busy)
        try:
            return whole(self, *given)
        finally:
            busy -= 1

    monkeypatch.setattr(GrammarCompiler, "_compile", count)
    formats = [read_format({"type": "regex", "regex": "|".join(f"{i}_{j}" for j in range(99))}) for i in range(8)]
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(compiler.compile, formats * 2))
    assert most == 1


@pytest.mark.parametrize(
    ("bounds", "num_items", "is_bound"),
    [
        ({}, 100, False),
        ({"minItems": 105}, 100, True),
        ({"minItems": 400}, 100, True),
        ({"minItems": 90}, 100, False),
        ({"maxItems": 150}, 100, True),
        ({"maxItems": 5000}, 100, False),  # more than there is room for
    ],
)
def test_a_list_repeats_itself_as_long_as_its_schema_says(
    compiler: GrammarCompiler, tokenizer: Tokenizer, bounds: dict[str, int], num_items: int, is_bound: bool
) -> None:
    constraint = constraint_of(compiler, schema({"type": "array", "items": {"enum": [7]}, **bounds}), 1000)
    span = tokenizer.encode("7,", is_behind_text=True)
    answer = np.concatenate([tokenizer.encode("[", is_behind_text=True), *[span] * num_items])
    assert constraint.bounds_loop(answer, len(span)) is is_bound


def test_a_text_that_is_forced_and_too_long_is_refused(compiler: GrammarCompiler) -> None:
    for expression in ("x{2000}", "((x{10}){20}){10}y"):
        with pytest.raises(FormatError, match="more than 512"):
            constraint_of(compiler, {"type": "regex", "regex": expression})
