"""The whole engine on a tiny random model: text in, text out."""

import gc
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any
from weakref import ref

import numpy as np
import pytest
import tiny
from table_decoder import TableDecoder

import edgespec
from edgespec import (
    Chunk,
    Completion,
    ContextOverflow,
    EdgeSpecError,
    Engine,
    IntegrityError,
    ManifestError,
    Message,
    SamplingParams,
    UsageError,
    VocabularyMismatch,
    load,
)
from edgespec.engine.generation import LoadedModel
from edgespec.engine.target_caches import TargetCaches
from edgespec.export.convert import export_model
from edgespec.manifest import read_manifest, write_manifest
from edgespec.runtimes.devices import find_device, machine_key
from edgespec.setup.profile import LearnedStats, write_learned_stats
from edgespec.text.chat_template import TemplateProcess
from edgespec.text.prompt_encoder import PromptEncoder
from edgespec.text.tokenizer import Tokenizer

slow = pytest.mark.slow
SAMPLED = SamplingParams(temperature=0.8, seed=11, repetition_penalty=1.1)


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Engine:
    return load(tiny_model, deterministic=True, drafter="none")


@pytest.fixture(scope="module")
def plain_answers(engine: Engine) -> list[Completion]:
    """Sampled and greedy."""
    return [engine.generate("in the an", sampling=each, max_tokens=120) for each in (SAMPLED, SamplingParams())]


@pytest.mark.parametrize("length", [1, pytest.param(3, marks=slow), pytest.param(8, marks=slow), "auto"])
@pytest.mark.parametrize("drafter", ["ngram", "suffix", "lookahead", "model"])
def test_deterministic_text_does_not_depend_on_the_drafter(
    plain_answers: list[Completion], tiny_model: Path, tiny_drafter: Path, drafter: str, length: int | str
) -> None:
    named = str(tiny_drafter) if drafter == "model" else drafter
    with load(tiny_model, drafter=named, draft_length=length, deterministic=True) as speculative:
        for plain, sampling in zip(plain_answers, (SAMPLED, SamplingParams()), strict=True):
            answer = speculative.generate("in the an", sampling=sampling, max_tokens=120)
            assert answer.token_ids == plain.token_ids
            assert answer.text == plain.text
            assert (answer.stats.acceptance_rate is not None) or length == "auto"


def test_stream_joins_to_what_generate_gives(engine: Engine) -> None:
    chunks = list(engine.stream("the in", sampling=SAMPLED, max_tokens=50))
    answer = engine.generate("the in", sampling=SAMPLED, max_tokens=50)
    assert "".join(chunk.text for chunk in chunks) == answer.text
    assert tuple(token for chunk in chunks for token in chunk.token_ids) == answer.token_ids
    assert [chunk.finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].stats is not None
    assert answer.text == engine.tokenizer.decode(answer.token_ids)


@pytest.mark.parametrize("max_tokens", [0, 1, 4])
def test_the_prompt_of_an_answer_that_is_over_was_read(engine: Engine, max_tokens: int) -> None:
    stream = engine.stream("the in an", max_tokens=max_tokens)
    assert stream.num_read == 0
    assert list(stream)[-1].finish_reason == "length"
    assert stream.num_read == stream.prompt_tokens


def test_same_seed_same_text_other_seed_other_text(engine: Engine) -> None:
    answers = [
        engine.generate("the", sampling=SamplingParams(temperature=1.0, seed=seed), max_tokens=30).text
        for seed in (1, 1, 2)
    ]
    assert answers[0] == answers[1] != answers[2]


def test_max_tokens_is_exact(engine: Engine) -> None:
    answer = engine.generate("the", max_tokens=7)
    assert (len(answer.token_ids), answer.finish_reason) == (7, "length")


def test_answer_ends_where_the_context_does(engine: Engine) -> None:
    prompt = "the in " * 150
    answer = engine.generate(prompt, sampling=SamplingParams(temperature=2.0))
    assert answer.finish_reason in ("context", "stop")
    if answer.finish_reason == "context":
        assert answer.prompt_tokens + len(answer.token_ids) == tiny.CONTEXT + 1


def test_prompt_beyond_the_context_is_refused_before_any_work(engine: Engine) -> None:
    with pytest.raises(ContextOverflow, match="shorten the prompt"):
        engine.stream("the in " * 5000)


@pytest.mark.parametrize("bad", [-2, True, 2.5])
def test_max_tokens_is_a_count(engine: Engine, bad: int) -> None:
    with pytest.raises(UsageError, match="max_tokens"):
        engine.stream("the", max_tokens=bad)


@pytest.mark.parametrize("method", ["stream", "generate", "chat"])
def test_unknown_arguments_are_refused_by_the_name_of_the_method(engine: Engine, method: str) -> None:
    said = rf"^Engine\.{method}\(\) got an unexpected keyword argument 'max_token'; did you mean max_tokens\?$"
    with pytest.raises(TypeError, match=said):
        getattr(engine, method)("the", max_token=1)


def test_unknown_role_is_refused(engine: Engine) -> None:
    with pytest.raises(UsageError, match="wizard"):
        engine.stream([Message("wizard", "hi")])


def test_stop_string_cuts_text_wherever_blocks_fall(tiny_model: Path, tiny_drafter: Path) -> None:
    with load(tiny_model, drafter="none", deterministic=True) as plain:
        whole = plain.generate("the", sampling=SAMPLED, max_tokens=60).text
        stop = whole[20:23]
        wanted = whole[: whole.index(stop)]
        assert plain.generate("the", sampling=SAMPLED, max_tokens=60, stop=[stop]).text == wanted
    with load(tiny_model, drafter=str(tiny_drafter), draft_length=5, deterministic=True) as speculative:
        answer = speculative.generate("the", sampling=SAMPLED, max_tokens=60, stop=[stop])
    assert (answer.text, answer.finish_reason) == (wanted, "stop")


@pytest.mark.parametrize("drafter", ["ngram", "suffix", "model"])
@pytest.mark.parametrize("length", [1, pytest.param(3, marks=slow), 8])
def test_stop_strings_end_ids_and_text_alike_whatever_drafts(
    engine: Engine, tiny_model: Path, tiny_drafter: Path, drafter: str, length: int
) -> None:
    whole = engine.generate("the", sampling=SAMPLED, max_tokens=80).text
    stops = [whole[30:33], whole[31:32], whole[50:54]]
    wanted = engine.generate("the", sampling=SAMPLED, max_tokens=80, stop=stops)
    named = str(tiny_drafter) if drafter == "model" else drafter
    with load(tiny_model, drafter=named, draft_length=length, deterministic=True) as speculative:
        answer = speculative.generate("the", sampling=SAMPLED, max_tokens=80, stop=stops)
    assert (answer.text, answer.token_ids) == (wanted.text, wanted.token_ids)
    assert answer.finish_reason == wanted.finish_reason == "stop"


def test_a_stop_string_that_spells_a_special_token_ends_the_answer_at_it(engine: Engine, tiny_model: Path) -> None:
    spellings = engine.tokenizer.special_tokens
    spelling, token = next(each for each in spellings.items() if each[1] not in engine.manifest.eos_token_ids)
    biased = replace(SAMPLED, seed=13, logit_bias={token: 3.5})
    whole = engine.generate("the", sampling=biased, max_tokens=80)
    assert spelling not in whole.text
    assert 3 < whole.token_ids.index(token) < 80
    for drafter in ("none", "ngram"):
        with load(tiny_model, drafter=drafter, deterministic=True) as other:
            answer = other.generate("the", sampling=biased, max_tokens=80, stop=["never", spelling])
            assert answer.token_ids == whole.token_ids[: whole.token_ids.index(token)]
            assert answer.finish_reason == "stop"


def test_one_stop_string_need_not_be_in_a_list(engine: Engine) -> None:
    whole = engine.generate("the", sampling=SAMPLED, max_tokens=40).text
    one = engine.generate("the", sampling=SAMPLED, max_tokens=40, stop=whole[10:13])
    assert one.text == engine.generate("the", sampling=SAMPLED, max_tokens=40, stop=[whole[10:13]]).text


def test_messages_can_be_dicts(engine: Engine) -> None:
    messages = [Message("user", "hi")]
    assert engine.encode([{"role": "user", "content": "hi"}]) == engine.encode(messages)
    with pytest.raises(UsageError, match="wanted role and content"):
        engine.encode([{"who": "me"}])


def test_end_token_ends_the_answer_and_is_not_part_of_it(engine: Engine) -> None:
    first = engine.generate("the", max_tokens=5).token_ids
    ending = replace(engine.manifest, eos_token_ids=(first[3],))
    short = Engine(
        LoadedModel(manifest=ending, encoder=PromptEncoder(ending, engine.tokenizer, tiny.TEMPLATE)),
        TargetCaches(engine.target),
    )
    answer = short.generate("the", max_tokens=50)
    assert (answer.token_ids, answer.finish_reason) == (first[: first.index(first[3])], "stop")


def test_closing_a_stream_leaves_the_engine_usable(engine: Engine) -> None:
    wanted = engine.generate("the in", max_tokens=20)
    stream = engine.stream("an other", max_tokens=100)
    list(islice(stream, 3))
    stream.close()  # type: ignore[attr-defined]
    assert engine.generate("the in", max_tokens=20).token_ids == wanted.token_ids


def test_interleaved_streams_do_not_disturb_each_other(engine: Engine) -> None:
    prompts = ["the in the", "another on"]
    wanted = [engine.generate(prompt, sampling=SAMPLED, max_tokens=25).text for prompt in prompts]
    streams = [engine.stream(prompt, sampling=SAMPLED, max_tokens=25) for prompt in prompts]
    found: list[list[Chunk]] = [[], []]
    for pair in zip(*streams, strict=True):
        for i, chunk in enumerate(pair):
            found[i].append(chunk)
    assert ["".join(chunk.text for chunk in chunks) for chunks in found] == wanted


def test_threads_can_share_an_engine(engine: Engine) -> None:
    prompts = ["the in the", "another on", "re re re"]
    wanted = [engine.generate(prompt, sampling=SAMPLED, max_tokens=25).text for prompt in prompts]
    with ThreadPoolExecutor(3) as pool:
        asked = [pool.submit(engine.generate, prompt, sampling=SAMPLED, max_tokens=25) for prompt in prompts]
        assert [answer.result().text for answer in asked] == wanted


def test_closed_engine_says_so(tiny_model: Path) -> None:
    with load(tiny_model) as engine:
        pass
    with pytest.raises(EdgeSpecError, match="closed"):
        engine.generate("the")
    with pytest.raises(EdgeSpecError, match="closed"):
        engine.opens_reasoning("the")
    with pytest.raises(EdgeSpecError, match="closed"), engine:
        pass
    assert engine.tokenize("the") != ()


def test_a_target_that_another_thread_closes_is_given_or_refused_in_words(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with load(tiny_model) as engine:
        target = engine.target
        found = iter([[target], []])  # as it is while the engine is closed meanwhile
        monkeypatch.setattr(TargetCaches, "decoders", property(lambda caches: next(found)))
        assert engine.target is target


def test_closing_cancels_the_answers_that_are_open(tiny_model: Path) -> None:
    with load(tiny_model, drafter="suffix") as engine:
        begun, untouched = engine.stream("the in", max_tokens=300), engine.stream("the", max_tokens=300)
        first = next(begun)
    assert first.finish_reason is None
    assert [chunk.finish_reason for chunk in begun] == ["cancelled"]
    assert [chunk.finish_reason for chunk in untouched] == ["cancelled"]


def test_prompt_shared_by_two_turns_is_read_once(tiny_model: Path) -> None:
    with load(tiny_model, drafter="none") as engine:
        first = engine.generate("the in the an on", max_tokens=10)
        fed = engine.target.num_fed
        turns = [Message("user", "the in the an on"), Message("assistant", first.text), Message("user", "re")]
        second = engine.generate(turns, max_tokens=1)
        assert engine.target.num_fed - fed < second.prompt_tokens - first.prompt_tokens + 3


@pytest.mark.parametrize("name", ["model.onnx", "model.onnx.data", "tokenizer.json"])
def test_changed_file_is_refused_at_load(tiny_model: Path, tmp_path: Path, name: str) -> None:
    folder = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    data = bytearray((folder / name).read_bytes())
    data[len(data) // 2] ^= 1
    (folder / name).write_bytes(data)
    with pytest.raises(IntegrityError, match=name):
        load(folder)


def test_drafter_with_hardly_a_token_in_common_is_refused_at_load(tiny_model: Path, tmp_path: Path) -> None:
    tiny.write_gguf(tmp_path / "a.gguf", tiny.random_weights(), override=tiny.FOREIGN)
    export_model(tmp_path / "a.gguf", tmp_path / "other")
    with pytest.raises(VocabularyMismatch, match=r"the drafter other has \d% of the tokens"):
        load(tiny_model, drafter=str(tmp_path / "other"))


def test_drafter_with_another_vocabulary_is_translated(tiny_model: Path, tmp_path: Path) -> None:
    tiny.write_gguf(tmp_path / "a.gguf", tiny.random_weights(), override={"tokenizer.ggml.tokens": tiny.SWAPPED})
    export_model(tmp_path / "a.gguf", tmp_path / "other", precision="fp32")
    with load(tiny_model, drafter="none", deterministic=True) as engine:
        plain = engine.generate("the cat", max_tokens=12)
    lines: list[str] = []
    with load(
        tiny_model, drafter=str(tmp_path / "other"), draft_length=3, deterministic=True, report=lines.append
    ) as engine:
        drafted = engine.generate("the cat", max_tokens=12)
    assert drafted.token_ids == plain.token_ids
    assert any("100% of the tokens of ordinary text" in line for line in lines)


@pytest.mark.parametrize("threads", [0, 10**11])
def test_number_of_threads_out_of_range_is_refused(tiny_model: Path, threads: int) -> None:
    with pytest.raises(UsageError, match="threads"):
        load(tiny_model, num_threads=threads)


@pytest.mark.parametrize("chain", ["{near},ngram", "{near},{target},suffix", "{near},{near}", "auto+{near}"])
@pytest.mark.parametrize("length", [3, pytest.param("auto", marks=slow)])
def test_cascade_gives_the_text_of_plain_decoding(
    tiny_model: Path, tiny_drafter: Path, chain: str, length: int | str
) -> None:
    named = chain.format(near=tiny_drafter, target=tiny_model)
    with load(tiny_model, drafter=named, draft_length=length, deterministic=True) as engine:
        for sampling in (SamplingParams(), SAMPLED):
            plain = engine.plain().generate("the in the", sampling=sampling, max_tokens=40)
            answer = engine.generate("the in the", sampling=sampling, max_tokens=40)
            assert answer.token_ids == plain.token_ids
    if length != "auto":  # which leaves out what does not pay
        assert answer.stats.num_drafted > 0


@pytest.mark.parametrize(
    "chain", ["suffix,ngram", "{near},auto", "{near},", ",{near}", "ngram,{near}", "auto+", "none+ngram"]
)
def test_cascade_of_other_things_than_models_is_refused(tiny_model: Path, tiny_drafter: Path, chain: str) -> None:
    with pytest.raises(UsageError, match="in place of a model"):
        load(tiny_model, drafter=chain.format(near=tiny_drafter))


def test_drafter_without_a_name_is_refused(tiny_model: Path) -> None:
    with pytest.raises(UsageError, match="the drafter is empty"):
        load(tiny_model, drafter="")


@pytest.mark.parametrize("acceptance", ["perhaps", None, ["equality"]])
def test_unknown_acceptance_is_refused(tiny_model: Path, acceptance: Any) -> None:
    with pytest.raises(UsageError, match="acceptance is"):
        load(tiny_model, acceptance=acceptance)


@pytest.mark.slow
def test_rejection_keeps_more_of_a_near_model_and_repeats_itself(tiny_model: Path, tiny_drafter: Path) -> None:
    rates = {}
    for rule in ("equality", "rejection"):
        with load(tiny_model, drafter=str(tiny_drafter), draft_length=3, acceptance=rule) as engine:
            answers = [
                engine.generate("the in", sampling=SamplingParams(temperature=1.5, seed=seed), max_tokens=120)
                for seed in (*range(8), 7)  # of one seed chance decides
            ]
        assert answers[-1].token_ids == answers[-2].token_ids
        num_accepted, num_verified = (
            sum(getattr(answer.stats, name) for answer in answers) for name in ("num_accepted", "num_verified")
        )
        rates[rule] = num_accepted / num_verified
    assert rates["rejection"] > rates["equality"] + 0.01


@pytest.mark.parametrize("length", ["many", "-1", 65])
def test_draft_length_out_of_range_is_refused(tiny_model: Path, length: str | int) -> None:
    with pytest.raises(UsageError, match="draft length"):
        load(tiny_model, draft_length=length)


def test_engine_runs_on_a_decoder_without_weights(tiny_model: Path) -> None:
    manifest = read_manifest(tiny_model)
    engine = Engine(
        LoadedModel(manifest=manifest, encoder=PromptEncoder(manifest, Tokenizer(tiny_model / "tokenizer.json"))),
        TargetCaches(TableDecoder(tiny.VOCAB, seed=3, context_length=200)),
    )
    assert len(engine.generate("the", max_tokens=30, sampling=SAMPLED).token_ids) > 0


def test_stats_add_up(tiny_model: Path, tiny_drafter: Path) -> None:
    with load(tiny_model, drafter=str(tiny_drafter), draft_length=3) as engine:
        answer = engine.generate("the", sampling=SAMPLED, max_tokens=60)
    stats = answer.stats
    assert stats.tokens_per_pass == pytest.approx(len(answer.token_ids) / stats.passes)
    assert len(stats.acceptance_by_position) == 3
    assert stats.acceptance_rate is not None
    assert stats.acceptance_rate == pytest.approx(np.mean(stats.acceptance_by_position), abs=0.05)
    assert list(stats.acceptance_by_position) == sorted(stats.acceptance_by_position, reverse=True)
    assert (stats.drafter, stats.draft_length, stats.drafter_device) == ("tiny-int4", "3", "cpu")
    assert stats.decode_tokens_per_second is not None
    assert stats.prefill_tokens_per_second is not None


@pytest.mark.parametrize("stop", [[], ["e"], ["th", "an"]])
@pytest.mark.parametrize("max_tokens", [1, 9, 60])
def test_counted_tokens_are_those_that_the_user_got(
    tiny_model: Path, tiny_drafter: Path, stop: list[str], max_tokens: int
) -> None:
    with load(tiny_model, drafter=str(tiny_drafter), draft_length=5) as engine:
        answer = engine.generate("the", sampling=SAMPLED, max_tokens=max_tokens, stop=stop)
    stats = answer.stats
    assert stats.num_emitted == len(answer.token_ids)
    assert stats.num_corrections + stats.num_bonuses == stats.passes
    assert stats.num_accepted <= stats.num_verified <= stats.num_drafted


def test_public_names_are_the_listed_ones() -> None:
    assert sorted(edgespec.__all__) == edgespec.__all__
    assert all(hasattr(edgespec, name) for name in edgespec.__all__)


@pytest.mark.parametrize(
    "arguments",
    [
        {"prompt": {"role": "user", "content": "hi"}},
        {"prompt": 5},
        {"prompt": [{"role": "user", "content": None}]},
        {"prompt": ["hi"]},
        {"prompt": "the", "max_tokens": 1.5},
        {"prompt": "the", "max_tokens": True},
        {"prompt": "the", "system": 3},
        {"prompt": "the", "stop": 3},
        {"prompt": "the", "stop": [3]},
        {"prompt": "the", "sampling": {"temperature": 1}},
    ],
)
def test_arguments_of_another_kind_are_refused_in_words(engine: Engine, arguments: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=r"wanted|put it in a list"):
        engine.generate(**arguments)


@pytest.mark.parametrize("asked", [1.5, True, "9" * 5000, -1, 65, None])
def test_draft_length_of_another_kind_is_refused(tiny_model: Path, asked: Any) -> None:
    with pytest.raises(UsageError, match="draft length"):
        load(tiny_model, draft_length=asked)


@pytest.mark.parametrize(
    "arguments", [{"num_threads": 1.5}, {"num_threads": "2"}, {"home": 3}, {"deterministic": "no"}]
)
def test_settings_of_another_kind_are_refused_in_words(tiny_model: Path, arguments: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="wanted"):
        load(tiny_model, **arguments)


def test_streams_that_are_over_or_were_never_read_keep_no_model(tiny_model: Path) -> None:
    gc.collect()
    gc.disable()  # so that what only the collector of garbage would free is seen
    try:
        with load(tiny_model, drafter="none") as engine:
            model, streams = ref(engine.target), [engine.stream("the", max_tokens=4) for _ in range(3)]
            assert len(list(streams[0])) > 1
            next(streams[1])
            streams[1].close()
        for stream in streams:
            stream.close()
        assert model() is None
        del streams
    finally:
        gc.enable()


@pytest.mark.parametrize("schedule", ["serial", "pipelined"])
def test_closing_frees_target_and_drafter_at_once(tiny_model: Path, tiny_drafter: Path, schedule: str) -> None:
    gc.collect()
    gc.disable()  # so that what only the collector of garbage would free is seen
    try:
        with load(tiny_model, drafter=str(tiny_drafter), schedule=schedule, draft_length=2) as engine:
            models = [ref(engine.target), *map(ref, engine._drafting.pool.decoders.values())]
            stream = engine.stream("the", max_tokens=8)  # held behind its end
            assert sum(len(chunk.token_ids) for chunk in stream) == 8
        assert [model() for model in models] == [None, None]
    finally:
        gc.enable()


def test_closed_engine_starts_nothing(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgespec.engine.load.TemplateProcess", TemplateProcess)
    engine = load(tiny_model)
    assert engine._encoder._renderer._process is not None
    engine.close()
    with pytest.raises(EdgeSpecError, match="closed"):
        engine.generate("hi")
    assert engine._encoder._renderer._process is None


def test_text_does_not_depend_on_what_earlier_sessions_left(tiny_model: Path, tmp_path: Path) -> None:
    answers = []
    for _ in range(3):
        with load(
            tiny_model, drafter="suffix", draft_length=4, deterministic=True, answer_cache=True, home=tmp_path
        ) as remembering:
            assert remembering.speculation.name == "suffix+answers"
            answers.append(remembering.generate("in the an", sampling=SAMPLED, max_tokens=60).token_ids)
    assert answers[0] == answers[1] == answers[2]
    (path,) = (tmp_path / "memory").iterdir()
    kept = np.frombuffer(path.read_bytes()[-4 * 61 :], "<i4").tolist()
    assert kept == [*answers[0], -1]


def test_folder_without_a_tree_graph_is_refused_in_words(tiny_model: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    manifest = read_manifest(folder)
    write_manifest(folder, replace(manifest, tree_graph=None))
    with pytest.raises(ManifestError, match="export it again"):
        load(folder, drafter="lookahead")


def test_lookahead_engine_holds_one_session_and_runs_whole_trees(tiny_model: Path) -> None:
    with load(tiny_model, drafter="lookahead", draft_length=2) as engine:
        answer = engine.generate("in the an", max_tokens=60)
        assert not engine._drafting.pool.decoders
    assert answer.stats.drafter == "lookahead"
    assert answer.stats.passes < 60


@pytest.mark.parametrize("seed", [2, 2**64 - 1])
def test_rejection_gives_a_seed_its_text_again_in_deterministic_mode(
    tiny_model: Path, tiny_drafter: Path, seed: int
) -> None:
    """The drafter's rows are the same to the bit, whatever it has run before, and whatever else is asked for."""
    settings: dict[str, Any] = {"draft_length": 2, "acceptance": "rejection", "deterministic": True}
    sampling = SamplingParams(temperature=1.5, top_k=5, top_p=0.7, min_p=0.05, seed=seed)
    with load(tiny_model, drafter=f"auto+{tiny_drafter},suffix", **settings) as engine:
        engine.generate("the in the an on er in the", sampling=sampling, max_tokens=80)
        asked = partial(engine.generate, "", sampling=sampling, max_tokens=80)
        texts = [asked().token_ids for _ in range(2)]
        with ThreadPoolExecutor(2) as pool:  # a drafter model drafts for one of several answers
            texts += [each.result().token_ids for each in [pool.submit(asked) for _ in range(2)]]
    assert len({*texts}) == 1


@pytest.mark.parametrize("length", [1, 3])
def test_length_beside_lookahead_is_that_of_every_drafter(tiny_model: Path, length: int) -> None:
    with load(tiny_model, drafter="suffix+lookahead", draft_length=length) as engine:
        stats = engine.generate("in the an", max_tokens=60).stats
    assert stats.draft_length == str(length)
    assert {"suffix", "lookahead"} <= stats.sources.keys()
    assert len(stats.acceptance_by_position) == length


@pytest.mark.parametrize(("row_cost", "takes_part"), [(0.25, False), (0.002, True)], ids=["cpu", "gpu"])
def test_auto_takes_lookahead_where_passes_are_known_to_be_cheap(
    tiny_model: Path, tmp_path: Path, row_cost: float, takes_part: bool
) -> None:
    folder = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    machine = machine_key(find_device("auto"), None, False)
    ratios = {width: 1 + row_cost * (width - 1) for width in (1, 2, 16)}
    write_learned_stats(folder, LearnedStats({machine: ratios}))
    with load(folder, deterministic=False) as engine:
        assert ("lookahead" in engine.speculation.name) == takes_part
        answer = engine.generate("in the an", max_tokens=60)
    assert (answer.stats.sources.get("lookahead") is not None) == takes_part
    assert len(answer.stats.acceptance_by_position) <= 24
