"""How the command line reads: errors, help, talk."""

import logging
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest

from edgespec.cli.main import command_parser, main
from edgespec.cli.parser import CommandParser
from edgespec.system.console import info, log_to_stderr, warn


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("caht", "edgespec: no command 'caht'; did you mean chat?"),
        ("help nosuch", "edgespec: no command 'nosuch'. Known are"),
        ("models lits", "edgespec models: no action 'lits'; did you mean list?"),
        (
            "chat --temprature 1",
            "unrecognized arguments: --temprature; did you mean --temperature?",
        ),
        ("config get nothing-like-it", "no key 'nothing-like-it'. The help lists all of them"),
        ("config set no-answer true", "edgespec config set: no key 'no-answer'; did you mean no-answer-cache?"),
        (
            "export x --output y --precision int99",
            "edgespec export: no --precision 'int99'. Known are auto, source,",
        ),
        ("export x --output y --block-size 33", "edgespec export: no --block-size '33'. Known are 32, 64, 128"),
        ("chat --max-tokens many", "edgespec chat: --max-tokens is 'many'; wanted a whole number"),
        ("chat --top-p many", "edgespec chat: --top-p is 'many'; wanted a number"),
        ("chat m why is it", "edgespec chat: unrecognized arguments: is it; a prompt is one argument, in quotes"),
        ("chat --promt why", "edgespec chat: unrecognized arguments: --promt; did you mean --prompt?"),
        ("chat --num_predict 5", "unrecognized arguments: --num_predict; did you mean --max-tokens?"),
        ("chat -n 5 hello", "unrecognized arguments: -n; did you mean --max-tokens?"),
        ("chat --num-ctx=5", "unrecognized arguments: --num-ctx=5; did you mean --context?"),
        ("serve -c 4096", "unrecognized arguments: -c; did you mean --context?"),
        ("chat --format json", "unrecognized arguments: --format; did you mean --schema?"),
        ("chat -z", "unrecognized arguments: -z\n"),
        ("chat m -s", "unrecognized arguments: -s; did you mean --system?"),
        ("chat m --keepalive", "unrecognized arguments: --keepalive\n"),
        ("serve m --keepalive 5m", "unrecognized arguments: --keepalive 5m; did you mean --idle-timeout?"),
        ("bench --model m", "edgespec bench: unrecognized arguments: --model; the model needs no flag"),
        ("chat --temp 0.2", "edgespec chat: unrecognized arguments: --temp; did you mean --temperature?"),
        ("-V", "edgespec: unrecognized arguments: -V\n"),
        ("--verison", "edgespec: unrecognized arguments: --verison; did you mean --version?"),
        ("-p hello", "edgespec: unrecognized arguments: -p; it is a flag of edgespec chat"),
        (
            "--json models list",
            "unrecognized arguments: --json; it goes behind the command, as in edgespec chat --json",
        ),
        ("devices extra", "edgespec devices: unrecognized arguments: extra\n"),
        ("chat --schedule pipline", "edgespec chat: no --schedule 'pipline'; did you mean pipelined?"),
    ],
)
def test_mistyped_words_get_the_nearest_one(line: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(line.split())
    error = capsys.readouterr().err
    assert ended.value.code == 2
    assert message in error
    assert error.count("\n") == 2


@pytest.mark.parametrize(
    ("line", "meant"),
    [
        ("run smollm2-135m", "chat"),
        ("list", "models list"),
        ("rm smollm2-135m", "models remove"),
        ("ps", "models ps"),
        ("create x", "preset create"),
        ("cp a b", "preset create NAME --from MODEL"),
        ("stop x", "service stop"),
        ("models info x", "models show"),
        ("models default x", "config set model NAME"),
    ],
)
def test_commands_of_other_programs_lead_to_those_here(
    line: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(line.split())
    assert ended.value.code == 2
    assert capsys.readouterr().err.endswith(f"'; did you mean edgespec {meant}?\n")


def test_the_name_of_an_option_behind_config_leads_to_its_value(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["config", "threads"])
    assert capsys.readouterr().err.endswith("did you mean edgespec config get threads?\n")


@pytest.mark.parametrize(
    ("word", "meant"),
    [("smollm2-135m", "chat smollm2-135m"), ("Why is the sky blue?", "chat 'Why is the sky blue?'")],
)
def test_a_model_or_a_prompt_without_a_command_leads_to_chat(
    word: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([word])
    assert capsys.readouterr().err == f"edgespec: no command '{word}'; did you mean edgespec {meant}?\n"


def test_no_command_is_a_question_for_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([])
    assert ended.value.code == 0
    assert "talk to a model" in capsys.readouterr().out


def test_a_command_by_itself_has_all_of_its_arguments() -> None:
    whole = command_parser()
    assert whole.commands is not None
    helps = {name: [leaf.format_help() for leaf in each.leaves()] for name, each in whole.commands.choices.items()}
    for name in helps:
        commands = command_parser(name).commands
        assert commands is not None
        assert [leaf.format_help() for leaf in commands.choices[name].leaves()] == helps[name]
    assert command_parser("--help").format_help() == command_parser("-h").format_help() == whole.format_help()


@pytest.mark.parametrize("columns", [80, 100, 200])
def test_help_of_each_command_fits_the_terminal_and_has_examples(
    columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    parser = command_parser()
    assert parser.commands is not None
    for name, command in parser.commands.choices.items():
        command.everyday = None
        options, _, examples = command.format_help().partition("examples:")
        assert name == "help" or f"edgespec {name}" in examples
        assert all(len(line) <= min(columns, 110) for line in options.splitlines() if line.startswith(" "))


def all_parsers(parser: CommandParser) -> Iterator[CommandParser]:
    yield parser
    for inner in parser.commands.choices.values() if parser.commands else ():
        yield from all_parsers(inner)


def test_every_line_of_help_fits_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    parsers = list(all_parsers(command_parser()))
    assert {"edgespec", "edgespec models pull", "edgespec config set"} <= {parser.prog for parser in parsers}
    texts = [parser.format_help() for parser in parsers]
    for parser in parsers:
        parser.everyday = None
    texts += [parser.format_help() for parser in parsers]
    assert [line for text in texts for line in text.splitlines() if len(line) > 80] == []


@pytest.mark.parametrize(
    "command", ["chat", "serve", "bench", "export", "plan", "train", "preset create", "service install"]
)
def test_help_lists_everyday_options_and_names_the_way_to_all(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = []
    for flag in ("--help", "--help-all"):
        with pytest.raises(SystemExit) as ended:
            main([*command.split(), flag])
        assert ended.value.code == 0
        flags.append({*re.findall(r"^ +(?:-\w \w+, )?(--[\w-]+)", capsys.readouterr().out, re.MULTILINE)})
    everyday, all_of_them = flags
    assert everyday < all_of_them
    assert len(everyday) <= 15
    parser = next(each for each in all_parsers(command_parser()) if each.prog == f"edgespec {command}")
    assert parser.everyday is not None
    assert {*parser.everyday} <= set(parser._option_string_actions), "each is a flag"


def test_everyday_help_fits_a_screen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    for parser in all_parsers(command_parser()):
        if parser.everyday is not None:
            options = parser.format_help().partition("\noptions:\n")[2].partition("\n\n")[0]
            assert options.count("\n") < 20, parser.prog


@pytest.mark.parametrize("command", ["chat", "preset create"])
def test_help_does_not_state_a_default_that_the_files_of_a_model_replace(command: str) -> None:
    parser = next(each for each in command_parser().leaves() if each.prog == f"edgespec {command}")
    options = {flag: each.help or "" for each in parser._actions for flag in each.option_strings}
    for flag in ("--temperature", "--top-k", "--top-p", "--min-p", "--repetition-penalty"):
        assert re.findall(r"\(default: .*?\)", options[flag]) in (
            ["(default: MODEL's own, else 0)"],
            ["(default: MODEL's own, else 1)"],
        )


def test_help_imports_no_package_but_our_own() -> None:
    program = "import sys; before = {*sys.modules}; from edgespec.cli.main import main\n"
    program += "try: main(['--help'])\nexcept SystemExit: print(*{*sys.modules} - before)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "COMMAND" in done.stdout
    packages = {name.partition(".")[0] for name in done.stdout.splitlines()[-1].split()}
    assert packages - sys.stdlib_module_names == {"edgespec"}


def test_help_is_a_command_too(capsys: pytest.CaptureFixture[str]) -> None:
    texts = []
    for line in (["help", "models", "list"], ["models", "list", "--help"]):
        with pytest.raises(SystemExit) as ended:
            main(line)
        texts.append(capsys.readouterr().out)
        assert ended.value.code == 0
    assert texts[0] == texts[1]


def test_help_has_no_codes_of_colours(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # as on a terminal, where Python 3.14 colours help
    for line in (["--help"], ["models", "pull", "--help"], ["chat", "--help"]):
        with pytest.raises(SystemExit):
            main(line)
        assert "x1b" not in capsys.readouterr().out


def test_every_command_can_be_quiet_or_verbose() -> None:
    for leaf in command_parser().leaves():
        if leaf.prog not in ("edgespec help", "edgespec completion"):
            assert {"quiet", "verbose", "json"} <= {action.dest for action in leaf._actions}, leaf.prog


@pytest.mark.parametrize(
    ("settings", "message"),
    [({}, ["stage", "wrong"]), ({"quiet": True}, ["wrong"]), ({"verbose": True}, ["stage", "wrong", "[x] why"])],
)
def test_quiet_says_problems_alone_and_verbose_decisions_too(
    settings: dict[str, bool], message: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with log_to_stderr(**settings):
        info("stage")
        warn("wrong")
        logging.getLogger("edgespec.x").debug("%s", "why")
        logging.getLogger("edgespec.rounds").debug("{}")
    warn("not shown")
    assert capsys.readouterr().err.splitlines() == [f"edgespec: {line}" for line in message]
