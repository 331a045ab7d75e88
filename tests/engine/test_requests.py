"""What may be asked of an engine beside a text: ids, raw texts, beginnings, log-probabilities, banned texts."""

import asyncio
import inspect
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
from scripted import scripted_engine
from table_decoder import TableDecoder

from edgespec import (
    ContextOverflow,
    Conversation,
    Engine,
    FormatError,
    LoadProgress,
    Message,
    ModelError,
    SamplingParams,
    UsageError,
    load,
)
from edgespec.decoding.decoder import BEST, Argmax, Can, Pass, Rows
from edgespec.engine.generation import LoadedModel
from edgespec.engine.target_caches import TargetCaches
from edgespec.manifest import SuggestedSampling

SAMPLED = SamplingParams(temperature=0.8, seed=11, repetition_penalty=1.1, frequency_penalty=0.2)
SAMPLINGS = [SamplingParams(), SAMPLED]
PROMPT = "in the an"
MESSAGES = [{"role": "user", "content": PROMPT}]


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Iterator[Engine]:
    with load(tiny_model, deterministic=True, drafter="none") as engine:
        yield engine


@pytest.fixture(scope="module", params=["suffix", "lookahead", "pipelined"])
def drafting(request: pytest.FixtureRequest, tiny_model: Path, tiny_drafter: Path) -> Iterator[Engine]:
    """Engines that draft from the text, in trees, and with a model that runs ahead."""
    options: dict[str, Any] = {"drafter": request.param}
    if request.param == "pipelined":
        options = {"drafter": str(tiny_drafter), "schedule": "pipelined"}
    with load(tiny_model, deterministic=True, draft_length=3, **options) as engine:
        yield engine


# -- prompts -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("as_given", [list, tuple, np.asarray, lambda ids: np.asarray(ids, np.uint64)])
def test_ids_of_a_prompt_are_the_prompt(engine: Engine, as_given: Any) -> None:
    ids = as_given(engine.encode(PROMPT))
    assert engine.generate(ids, max_tokens=20).token_ids == engine.generate(PROMPT, max_tokens=20).token_ids
    assert engine.encode(ids) == tuple(ids)
    assert engine.count(ids) == len(ids)


@pytest.mark.parametrize(
    ("prompt", "options", "refused"),
    [
        (b"the in", {}, "the prompt is b'the in'; wanted a text"),
        (MESSAGES[0], {}, "the prompt is one message; put it in a list: "),
        (Message("user", "hi"), {}, "the prompt is one message; put it in a list: "),
        ({"role": "user", "content": "hi"}, {}, "the prompt is one message; put it in a list: "),
        ([1.5], {}, "the prompt has 1.5; wanted token ids, which are whole numbers"),
        ([True], {}, "the prompt has True; wanted token ids, which are whole numbers"),
        ([{"role": "user", "content": 3}], {}, "a message is {'role': 'user', 'content': 3}; wanted a role"),
        (PROMPT, {"raw": "yes"}, "raw is 'yes'; wanted True or False"),
        (PROMPT, {"prefill": 5}, "prefill is 5; wanted a text or token ids"),
        (PROMPT, {"whole_tool_calls": "yes"}, "whole_tool_calls is 'yes'; wanted True or False"),
    ],
)
def test_what_has_the_wrong_type_is_refused_by_its_name(
    engine: Engine, prompt: Any, options: dict[str, Any], refused: str
) -> None:
    with pytest.raises(UsageError, match=re.escape(refused)):
        engine.generate(prompt, **options)


@pytest.mark.parametrize(("name", "given"), [("progress", 5), ("report", 0)])
def test_what_is_to_be_called_while_loading_is_a_function(tiny_model: Path, name: str, given: Any) -> None:
    options: dict[str, Any] = {name: given}
    with pytest.raises(UsageError, match=f"{name} is {given}; wanted a function"):
        load(tiny_model, **options)


@pytest.mark.parametrize(
    ("model", "options", "refused"),
    [
        (None, {}, "model is None; wanted a text or a path"),
        ("no-such-model", {"offline": "x"}, "offline is 'x'; wanted True or False"),
    ],
)
def test_what_load_is_given_is_checked_before_a_model_is_looked_for(
    model: Any, options: dict[str, Any], refused: str
) -> None:
    with pytest.raises(UsageError, match=re.escape(refused)):
        load(model, **options)


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("max_tokens", "a"),
        ("max_tokens", 0),
        ("stop", 5),
        ("sampling", {"temperature": 1}),
        ("ends_loops", "yes"),
        ("parallel_tool_calls", 1),
    ],
)
def test_a_chat_refuses_a_wrong_option_before_its_first_message(engine: Engine, name: str, given: Any) -> None:
    options: dict[str, Any] = {name: given}
    with pytest.raises(UsageError, match=re.escape(f"{name} is {given!r}; wanted ")):
        engine.chat(**options)


@pytest.mark.parametrize("name", ["save_prefix", "load_prefix"])
def test_a_file_of_a_prefix_has_a_path_and_a_cache_a_number(engine: Engine, tmp_path: Path, name: str) -> None:
    act = getattr(engine, name)
    with pytest.raises(UsageError, match="path is 5; wanted the path of a file"):
        act(5)
    with pytest.raises(UsageError, match="the cache is 'x'; wanted 0 to"):
        act(tmp_path / "kept", "x")
    with pytest.raises(UsageError, match="path is 5; wanted the path of a file"):
        engine.chat().save(5)  # type: ignore[arg-type]


def test_a_whole_answer_takes_every_option_of_a_stream(engine: Engine) -> None:
    answer = engine.generate(PROMPT, max_tokens=3, whole_tool_calls=True)
    assert answer.text == engine.generate(PROMPT, max_tokens=3).text
    with pytest.raises(UsageError, match="a whole answer has whole calls"):
        engine.generate(PROMPT, whole_tool_calls=False)


def test_the_rendered_template_as_raw_text_is_the_chat(engine: Engine) -> None:
    rendered = f"<|im_start|>user\n{PROMPT}<|im_end|>\n<|im_start|>assistant\n"
    assert engine.encode(rendered, raw=True) == engine.encode(PROMPT)
    raw, chat = engine.generate(rendered, raw=True, max_tokens=20), engine.generate(MESSAGES, max_tokens=20)
    assert (raw.text, raw.token_ids, raw.prompt_tokens) == (chat.text, chat.token_ids, chat.prompt_tokens)


def test_a_raw_text_without_special_tokens_is_its_tokens(engine: Engine) -> None:
    assert engine.encode("the in", raw=True) == engine.tokenize("the in")
    assert engine.detokenize(engine.tokenize("the in é")) == "the in é"
    assert engine.detokenize([]) == ""


@pytest.mark.parametrize(
    "arguments",
    [
        {"prompt": [1, tiny.VOCAB]},
        {"prompt": [3, -1]},
        {"prompt": [3, 2**70]},
        {"prompt": [3, "a"]},
        {"prompt": [3, [4]]},
        {"prompt": np.zeros((2, 2), np.int32)},
        {"prompt": np.array([0.5])},
        {"prompt": [3], "system": "Be brief."},
        {"prompt": "the", "system": "Be brief.", "raw": True},
        {"prompt": MESSAGES, "raw": True},
        {"prompt": "the", "prefill": 5},
        {"prompt": "the", "prefill": [tiny.VOCAB]},
        {"prompt": "the", "logprobs": -1},
        {"prompt": "the", "logprobs": True},
        {"prompt": "the", "banned": ""},
        {"prompt": "the", "banned": [3]},
        {"prompt": "the", "timeout_s": 0},
        {"prompt": "the", "timeout_s": "2"},
        {"prompt": "the", "timeout_s": float("nan")},
        {"prompt": "the", "sampling": SamplingParams(logit_bias={tiny.VOCAB: 1.0})},
    ],
)
def test_what_cannot_be_answered_is_refused_in_words(engine: Engine, arguments: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=r"wanted|put its text into"):
        engine.stream(**arguments)


def test_prompt_and_prefill_must_fit_together(engine: Engine) -> None:
    num_free = engine.context_length - engine.count(PROMPT)
    assert len(engine.generate(PROMPT, prefill=[3] * num_free).token_ids) <= 1
    with pytest.raises(ContextOverflow, match=str(engine.context_length + 1)):
        engine.stream(PROMPT, prefill=[3] * (num_free + 1))
    with pytest.raises(ContextOverflow):
        engine.stream(PROMPT, prefill="the in " * 5000)


# -- the beginning of an answer ----------------------------------------------------------------------


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "sampled"])
@pytest.mark.parametrize("num_given", [1, 23])
def test_a_beginning_and_its_rest_are_the_whole_answer(
    engine: Engine, drafting: Engine, num_given: int, sampling: SamplingParams
) -> None:
    whole = engine.generate(PROMPT, sampling=sampling, max_tokens=40)
    given = whole.token_ids[:num_given]
    rest = drafting.generate(PROMPT, sampling=sampling, max_tokens=40 - num_given, prefill=given)
    assert given + rest.token_ids == whole.token_ids
    assert rest.prompt_tokens == whole.prompt_tokens + num_given
    assert whole.text.endswith(rest.text)
    if num_given > 1 and "\N{REPLACEMENT CHARACTER}" not in engine.detokenize(given):
        assert engine.detokenize(given) + rest.text == whole.text


def test_a_beginning_may_be_text_and_end_in_the_middle_of_a_character(engine: Engine) -> None:
    text = "the é"
    ids = engine.tokenize(text)
    by_text = engine.generate(PROMPT, prefill=text, max_tokens=20)
    assert engine.generate(PROMPT, prefill=ids, max_tokens=20).token_ids == by_text.token_ids
    by_bytes = {spelling: token for token, spelling in engine.tokenizer.spellings.items()}
    first, second = (by_bytes[bytes([byte])] for byte in "é".encode())
    broken = engine.generate(
        PROMPT, prefill=[*engine.tokenize("the "), first], max_tokens=1, sampling=_only(second)
    )
    assert (broken.text, broken.token_ids) == ("é", (second,))


def _only(token: int) -> SamplingParams:
    return SamplingParams(logit_bias={each: -100 for each in range(tiny.VOCAB) if each != token})


def test_special_tokens_in_the_text_of_a_beginning_are_text(engine: Engine) -> None:
    found = engine._encoder.encode_prefill("<|im_end|>").tolist()
    assert found == list(engine.tokenize("<|im_end|>"))
    assert engine.tokenizer.special_tokens["<|im_end|>"] not in found


# -- log-probabilities -------------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "sampled"])
def test_logprobs_are_equal_to_the_bit_whatever_drafts(
    engine: Engine, drafting: Engine, sampling: SamplingParams
) -> None:
    plain = engine.generate(PROMPT, sampling=sampling, max_tokens=40, logprobs=3)
    drafted = drafting.generate(PROMPT, sampling=sampling, max_tokens=40, logprobs=3)
    assert drafted.logprobs == plain.logprobs
    assert drafted.stats.num_drafted > 0
    assert drafted.token_ids == engine.generate(PROMPT, sampling=sampling, max_tokens=40).token_ids


def test_logprobs_are_the_log_softmax_of_the_targets_own_logits(engine: Engine) -> None:
    answer = engine.generate(PROMPT, sampling=SAMPLED, max_tokens=12, logprobs=5, stop="zzz")
    tokens = np.concatenate([engine.encode(PROMPT), np.array(answer.token_ids, np.int32)])
    num = len(answer.token_ids)
    rows = engine.target.logits(tokens[:-1], num).astype(np.float64)
    rows -= np.log(np.exp(rows).sum(axis=1, keepdims=True))
    assert [each.token_id for each in answer.logprobs] == list(answer.token_ids)
    for row, each in zip(rows, answer.logprobs, strict=True):
        best = np.argsort(-row, kind="stable")[:5]
        assert each.logprob == pytest.approx(row[each.token_id])
        assert [token for token, _ in each.top] == best.tolist()
        assert [logprob for _, logprob in each.top] == pytest.approx(row[best].tolist())


def test_chunks_have_a_logprob_for_each_token_if_asked(drafting: Engine) -> None:
    chunks = list(drafting.stream(PROMPT, max_tokens=30, logprobs=0))
    assert all(tuple(each.token_id for each in chunk.logprobs) == chunk.token_ids for chunk in chunks)
    assert all(each.top == () for chunk in chunks for each in chunk.logprobs)
    assert drafting.generate(PROMPT, max_tokens=5).logprobs == ()


def test_tokens_behind_a_stop_string_have_no_logprob(drafting: Engine) -> None:
    whole = drafting.generate(PROMPT, sampling=SAMPLED, max_tokens=40)
    answer = drafting.generate(PROMPT, sampling=SAMPLED, max_tokens=40, stop=whole.text[10:12], logprobs=1)
    found = tuple(each.token_id for each in answer.logprobs)
    assert found == answer.token_ids[: len(found)]
    assert len(found) < len(answer.token_ids)
    assert drafting.detokenize(found).startswith(answer.text.rstrip("\ufffd"))


@pytest.mark.parametrize("written", ["<think>Hm", "So <tool_cap>", 'So <tool_call>{"name": 1} Hm'])
@pytest.mark.parametrize("stop", ["think", "tool_ca", "l>"])
def test_tokens_whose_text_waited_for_a_mark_have_a_logprob_only_where_it_is_shown(
    tiny_model: Path, tmp_path: Path, written: str, stop: str
) -> None:
    with scripted_engine(tiny_model, tmp_path, lambda prompt: written) as engine:
        answer = engine.generate(PROMPT, tools=[{"name": "look"}], stop=stop, logprobs=0)
        assert answer.text == written.partition(stop)[0]
        assert engine.detokenize([each.token_id for each in answer.logprobs]) == answer.text


class Choosing(TableDecoder):
    """Finds the likeliest tokens itself, and counts how often it is asked for them."""

    can, num_asked = Can(best=True), 0

    def run(self, given: Pass) -> Rows:
        if given.wants is not BEST:
            return super().run(given)
        self.num_asked += 1
        rows = self.logits(given.tokens, given.num_rows)
        return Rows(best=Argmax(rows.argmax(axis=1), np.isfinite(rows).all(axis=1)))


@pytest.mark.parametrize("options", [{"logprobs": 2}, {"banned": "zz"}])
def test_whole_rows_are_read_where_the_likeliest_token_is_not_enough(
    engine: Engine, options: dict[str, Any]
) -> None:
    decoder = Choosing(tiny.VOCAB, seed=3)
    choosing = Engine(LoadedModel(manifest=engine.manifest, encoder=engine._encoder), TargetCaches(decoder))
    usual = choosing.generate(PROMPT, max_tokens=12)
    num_asked = decoder.num_asked
    assert num_asked > 0
    answer = choosing.generate(PROMPT, max_tokens=12, **options)
    assert (answer.token_ids, decoder.num_asked) == (usual.token_ids, num_asked)
    assert [token for each in answer.logprobs for token, _ in each.top[:1]] == [
        *(answer.token_ids if answer.logprobs else ())
    ]


# -- biases and banned texts -------------------------------------------------------------------------


def test_a_banned_token_never_comes_whatever_drafts(engine: Engine, drafting: Engine) -> None:
    usual = engine.generate(PROMPT, sampling=SAMPLED, max_tokens=60).token_ids
    banned = max(usual, key=usual.count)
    sampling = replace(SAMPLED, logit_bias={banned: -100})
    answers = [each.generate(PROMPT, sampling=sampling, max_tokens=60).token_ids for each in (engine, drafting)]
    assert answers[0] == answers[1]
    assert banned not in answers[0]


@pytest.mark.parametrize("options", [{}, {"response_format": {"type": "regex", "regex": "[a-z ]{30}"}}])
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "sampled"])
def test_a_token_that_the_models_files_forbid_is_banned_in_every_answer(
    engine: Engine,
    drafting: Engine,
    sampling: SamplingParams,
    options: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its log-probabilities stay those of the model, as those of a text."""
    options |= {"max_tokens": 40, "logprobs": 2, "prompt_logprobs": True}
    usual = engine.generate(PROMPT, sampling=sampling, **options)
    letters = [token for token in usual.token_ids if engine.detokenize([token]).isalpha()]  # no grammar needs one
    banned = max(letters, key=letters.count)
    wanted = engine.generate(PROMPT, sampling=replace(sampling, logit_bias={banned: -100}), **options)
    assert banned not in wanted.token_ids
    for asked in (engine, drafting):
        stated = replace(asked.manifest, suppressed_token_ids=(banned,))
        monkeypatch.setattr(asked._requests, "manifest", stated)
        for bias in ({}, {banned: 50.0}):
            found = asked.generate(PROMPT, sampling=replace(sampling, logit_bias=bias), **options)
            assert (found.token_ids, found.logprobs) == (wanted.token_ids, wanted.logprobs)
            assert found.prompt_logprobs[1:] == usual.prompt_logprobs[1:]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "sampled"])
def test_banned_texts_never_come_whatever_drafts(
    engine: Engine, drafting: Engine, sampling: SamplingParams
) -> None:
    usual = engine.generate(PROMPT, sampling=sampling, max_tokens=60).text
    banned = re.findall("[ -~]{1,3}", usual)[1:4]
    assert banned
    answers = [
        each.generate(PROMPT, sampling=sampling, max_tokens=60, banned=banned) for each in (engine, drafting)
    ]
    assert answers[0].token_ids == answers[1].token_ids
    assert not [text for text in banned if text in answers[0].text]
    assert len(answers[0].token_ids) == 60


def test_a_banned_text_may_not_be_completed_from_the_beginning_of_an_answer(engine: Engine) -> None:
    sampling = SamplingParams(logit_bias=dict.fromkeys(engine.tokenize("n"), 100))
    assert engine.generate(PROMPT, prefill="i", sampling=sampling, max_tokens=1).text == "n"
    assert engine.generate(PROMPT, prefill="i", sampling=sampling, max_tokens=1, banned="in").text != "n"


# -- what the model's files suggest, embeddings, progress --------------------------------------------


def tokens(asked: Engine | Conversation, **options: Any) -> tuple[int, ...]:
    answer = asked.generate if isinstance(asked, Engine) else asked.say
    return answer(PROMPT, max_tokens=20, **options).token_ids


def test_fields_of_the_sampling_may_stand_by_themselves(engine: Engine) -> None:
    single: dict[str, Any] = {"temperature": 0.8, "seed": 11, "top_k": 30, "logit_bias": {5: 2.0}}
    wanted = tokens(engine, sampling=SamplingParams(**single))
    assert tokens(engine, **single, top_p=None) == tokens(engine.chat(), **single) == wanted
    other = tokens(engine, sampling=SAMPLED, seed=12)
    assert other == tokens(engine, sampling=replace(SAMPLED, seed=12)) != tokens(engine, sampling=SAMPLED)
    with pytest.raises(UsageError, match=r"temperature is '1'; wanted a number from 0\.0"):
        engine.generate(PROMPT, temperature="1")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"sampling is 0.7; wanted SamplingParams"):
        engine.generate(PROMPT, sampling=0.7)  # type: ignore[arg-type]


@pytest.mark.parametrize("reasoning", ["", "hm"])
def test_a_last_message_of_the_assistant_is_continued(engine: Engine, reasoning: str) -> None:
    begun = {"role": "assistant", "content": "in", "reasoning_content": reasoning}
    wanted = engine.generate(
        PROMPT, prefill=f"<think>\n{reasoning}\n</think>\n\nin" if reasoning else "in", max_tokens=9
    )
    assert engine.generate([*MESSAGES, begun], max_tokens=9).token_ids == wanted.token_ids
    for nothing in ([], [begun]):
        with pytest.raises(UsageError, match="nothing to answer; give a message of the user"):
            engine.generate(nothing)


def test_the_content_of_a_message_may_be_parts_of_text(engine: Engine) -> None:
    parts = [{"type": "text", "text": "in the"}, {"type": "text", "text": " an"}]
    assert engine.encode([{"role": "user", "content": parts}]) == engine.encode(MESSAGES)
    picture = {"type": "image_url", "image_url": {"url": "data:"}}
    with pytest.raises(UsageError, match="of the type 'image_url'; wanted text alone: images are not read"):
        engine.encode([{"role": "user", "content": [*parts, picture]}])
    with pytest.raises(UsageError, match="wanted a role and a content, which is text"):
        engine.encode([{"role": "user", "content": 3}])


def test_errors_name_the_argument_that_was_given(engine: Engine) -> None:
    with pytest.raises(UsageError, match=r"drafting is 3; wanted Drafting"):
        engine.generate(PROMPT, drafting=3)
    with pytest.raises(TypeError, match=r"temperature .* give it to say or stream .* sampling="):
        engine.chat(temperature=0.5)
    with pytest.raises(TypeError, match=r"timeout_s is an option of an answer; give it to say or stream"):
        engine.chat(timeout_s=3)
    for options in ({"schema": {"not": {}}}, {"schema": list[str], "max_tokens": 1}):
        with pytest.raises(UsageError, match="schema") as refused:
            engine.generate(PROMPT, **options)
        assert "response_format" not in str(refused.value)
    talk = engine.chat(max_tokens=4)
    talk.say("in")
    with pytest.raises(ContextOverflow, match=r"raise context= if you gave one.*overflow='drop-oldest'"):
        talk.say("the in " * engine.context_length)


@pytest.mark.parametrize(
    ("method", "given", "advice"),
    [
        ("generate", "temprature", "did you mean temperature?"),
        ("stream", "max_new_tokens", "did you mean max_tokens?"),
        ("generate", "n_ctx", "context is an argument of load"),
        ("generate", "verbose", "report is an argument of load"),
        ("agenerate", "chat_template_kwargs", "did you mean template_options?"),
        (
            "chat",
            "repeat_penalty",
            "repetition_penalty is an option of an answer; give it to say or stream of the ",
        ),
    ],
)
def test_an_option_by_the_name_of_another_library_is_refused_with_ours(
    engine: Engine, method: str, given: str, advice: str
) -> None:
    async def ask() -> None:
        asked = getattr(engine, method)(*([] if method == "chat" else [PROMPT]), **{given: 1})
        await asked

    with pytest.raises(TypeError, match=rf"^Engine\.{method}\(\) .* '{given}'; {re.escape(advice)}"):
        asyncio.run(ask())


def test_none_shows_nothing_and_drafts_nothing(tiny_model: Path, tmp_path: Path) -> None:
    with load(tiny_model, drafter=None, report=None, progress=None, home=tmp_path) as engine:
        assert engine.open_drafters == ()


def test_a_conversation_and_load_refuse_options_as_a_single_answer_does(engine: Engine, tiny_model: Path) -> None:
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'temprature'; did you mean temperature\?"):
        engine.chat().say(PROMPT, temprature=1)  # type: ignore[call-arg]
    for given, advice in (("n_threads", "did you mean num_threads?"), ("do_sample", "temperature is an option")):
        with pytest.raises(TypeError, match=rf"^load\(\) got .* '{given}'; {re.escape(advice)}"):
            load(tiny_model, **{given: 1})


@pytest.mark.parametrize(
    "method", [Engine.generate, Engine.agenerate, Engine.stream, Engine.chat, Conversation.say]
)
def test_help_lists_the_options(method: Any) -> None:
    listed = inspect.signature(method).parameters
    assert {"max_tokens", "schema"} <= listed.keys()
    assert not {"options", "settings"} & listed.keys()
    assert "overflow" not in listed or listed["overflow"].default == "error"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_tokens": -2}, "max_tokens is -2; wanted a whole number from 0, or -1 or None for no limit"),
        ({"max_tokens": "5"}, "max_tokens is '5'; wanted a whole number from 0"),
        ({"top_k": 2.5}, "top_k is 2.5; wanted a whole number from 0"),
        ({"seed": "a"}, "seed is 'a'; wanted a whole number from 0 to 18446744073709551615"),
        ({"stop": ""}, "stop has an empty text"),
        ({"stop": ["a", ""]}, "stop has an empty text"),
        ({"stop": "a\ud800"}, r"stop has 'a\\ud800', half of a surrogate pair"),
        ({"banned": "\udfff"}, r"banned has '\\udfff', half of a surrogate pair"),
    ],
)
def test_what_no_answer_can_have_is_refused_with_what_is_wanted(
    engine: Engine, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        engine.generate(PROMPT, **options)


def test_a_schema_that_the_context_cuts_is_refused_with_the_context(engine: Engine) -> None:
    long = {"type": "string", "minLength": 5000}
    with pytest.raises(
        FormatError, match="; shorten the prompt, raise context= if you gave one, or use a smaller"
    ):
        engine.generate(PROMPT, schema=long)
    with pytest.raises(FormatError, match="; allow more tokens or use a smaller"):
        engine.generate(PROMPT, schema=long, max_tokens=9)


def test_an_answer_is_shown_in_a_line(engine: Engine) -> None:
    answer = engine.generate(PROMPT, max_tokens=9)
    assert json.loads(json.dumps(answer.token_ids + engine.encode(PROMPT)))
    assert repr(answer) == f"<Completion {answer.text!r}, length, 9 tokens>"
    assert re.fullmatch(
        r"<Stats of 9 tokens in \d passes(, [\d.]+ tokens/s)?(, \d of \d drafted accepted)?>", repr(answer.stats)
    )
    *_, last = engine.stream(PROMPT, max_tokens=2)
    assert repr(last) == f"<Chunk {last.text!r}, {len(last.token_ids)} tokens, length>"


def test_a_question_is_no_system_message(engine: Engine) -> None:
    with pytest.raises(UsageError, match=r"engine\.chat\(\)\.say\(text\)"):
        engine.chat(PROMPT)


def test_model_sampling_is_what_the_manifest_has(engine: Engine) -> None:
    assert engine.model_sampling is None
    suggested = SuggestedSampling(temperature=0.7, top_k=20, top_p=0.8, repetition_penalty=1.05)
    engine.manifest, before = replace(engine.manifest, sampling=suggested), engine.manifest
    try:
        wanted = SamplingParams(temperature=0.7, top_k=20, top_p=0.8, repetition_penalty=1.05)
        assert engine.model_sampling == wanted
        assert tokens(engine) == tokens(engine, sampling=wanted) == tokens(engine.chat())
        assert tokens(engine, temperature=0.0) == tokens(engine, sampling=replace(wanted, temperature=0.0))
    finally:
        engine.manifest = before


def test_embeddings_are_refused_in_words(engine: Engine) -> None:
    with pytest.raises(ModelError, match=r"tiny is a model that writes text \(of the family llama\)"):
        engine.embed("the")


def _steps(seen: Sequence[LoadProgress], stage: str) -> list[LoadProgress]:
    return [each for each in seen if each.stage == stage]


def test_loading_tells_how_far_it_is(tiny_gguf: Path, tmp_path: Path) -> None:
    seen: list[LoadProgress] = []
    said: list[str] = []
    with load(tiny_gguf, home=tmp_path, drafter="none", progress=seen.append, report=said.append) as engine:
        name = engine.manifest.name
    told = f"its name is {name} from now on; to change it: models.rename({name!r}, NAME)"
    assert said.count(told) == 1
    load(tiny_gguf, home=tmp_path, drafter="none", progress=lambda at: None, report=said.append).close()
    assert said.count(told) == 1, "it is prepared already"
    assert [each.stage for each in seen] == sorted(each.stage for each in seen)  # export, then open
    for stage in ("export", "open"):
        steps = _steps(seen, stage)
        assert {(each.name, each.total_bytes) for each in steps} == {(name, steps[0].total_bytes)}
        assert [each.done_bytes for each in steps] == sorted(each.done_bytes for each in steps)
        assert steps[-1].done_bytes == steps[-1].total_bytes > 0


def test_what_a_progress_raises_ends_the_loading(tiny_model: Path) -> None:
    def stop(progress: LoadProgress) -> None:
        raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        load(tiny_model, drafter="none", progress=stop)


def test_what_an_engine_gives_prints_shortly(engine: Engine) -> None:
    conversation = engine.chat(system="the", max_tokens=3)
    answer = conversation.say(PROMPT)
    assert str(answer) == answer.text == "".join(map(str, engine.stream(conversation.messages[:2], max_tokens=3)))
    assert (repr(engine), repr(conversation)) == ("<Engine tiny, on cpu>", "<Conversation with tiny, 3 messages>")
