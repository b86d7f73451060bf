"""Every command that the README, docs/ and the notebooks show: parsed by the parser of its own
subcommand, and run, reduced, in the slow lane where that takes seconds."""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import json
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
from absl import flags

from jaxserve.bench import cli as bench
from jaxserve.command_line import Parser
from jaxserve.commands import cli
from jaxserve.sched import registry
from jaxserve.sched.registry import deployable, make_policy, policies
from jaxserve.server.startup import launch
from jaxserve.simulator.advise import cli as advise
from jaxserve.simulator.simulate import flags as simulate_flags
from jaxserve.simulator.simulate import replay
from jaxserve.simulator.systems.systems import system
from jaxserve_lab.experiments.accelgen.claims import AccelGen
from jaxserve_lab.experiments.aptserve.claims import AptServe
from jaxserve_lab.experiments.bros.claims import Bros
from jaxserve_lab.experiments.claims.single import read_case
from jaxserve_lab.experiments.infermax.claims import InferMax
from tests.engine.simulated.test_engine_agrees import trace
from tests.simulator.test_replay import recorded

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
# Not CHANGELOG.md: what it says of an older version need not be so today.
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *ROOT.glob("tools/*/README.md"),
]
ALL = [*PAGES, *NOTEBOOKS]
NAMES = [str(page.relative_to(ROOT)) for page in ALL]
AZURE = "AzureLLMInferenceTrace_conv.csv"  # of the Azure public dataset
# Flags whose file the command itself writes.
WRITTEN = (
    *("--out", "--markdown", "--json_file", "--chrome_trace", "--summary", "--file"),
    *("--config.engine.record", "--request_log", "--programs_table"),
)
FILE = re.compile(r"[\w./-]+\.(?:jsonl?|csv|txt|py)(?=$|:)")
SIMULATED = ("simulate", "advise")
NEEDED = {  # without which a command does not parse a line
    "optimal": ["--workload=x", "--kv_tokens=1"],
    "keys": ["list", "--file=x"],
    "batch": ["x", "--out=y"],
    "convert": ["x", "y"],
    "observe": ["--url=x", "--out=y"],
}
# What is run, reduced. The others need a server, a checkpoint or a machine to measure: they have
# tests of their own in tests/client, tests/server, tests/models and tests/bench.
PAPERS = {page.name: page.kind for page in (AptServe, Bros, AccelGen, InferMax)}
RUN = (*SIMULATED, "optimal", "keys", "policies")


def text_of(page: Path) -> str:
    """Its words; of a notebook, those of its cells."""
    text = page.read_text(encoding="utf-8")
    if page.suffix != ".ipynb":
        return text
    return "\n".join("".join(cell["source"]) for cell in json.loads(text)["cells"])


def commands(page: Path) -> list[list[str]]:
    """Indented lines that run jaxserve or Python, those that go on joined."""
    text = re.sub(r"\\\n\s+", "", text_of(page))
    lines = re.findall(r"^(?:    |!)(?:\.venv/bin/)?((?:jaxserve|python) .*)$", text, re.MULTILINE)
    return [shlex.split(line, comments=True) for line in lines]


def mentions(page: Path) -> list[list[str]]:
    """Commands within a line, which may be in part."""
    text = re.sub(r"^```.*?^```", "", text_of(page), flags=re.MULTILINE | re.DOTALL)
    found = re.findall(
        r"`(?:\.venv/bin/)?((?:jaxserve|python -m jaxserve[\w.]*)(?: [^`]+)?)`", text
    )
    return [shlex.split(line) for line in found if line != "jaxserve"]


class Seen(Exception):
    """The parser that a command asked, and what it made of the line."""

    def __init__(self, parser: Parser, found: Any) -> None:
        super().__init__()
        self.parser, self.found = parser, found


def parsed(main: Callable[[], Any]) -> Seen:
    """Calls a command, which ends once it has parsed its line."""
    parse = Parser.parse_args

    def parse_args(self: Parser, args: Any = None, namespace: Any = None) -> NoReturn:
        raise Seen(self, parse(self, args, namespace))

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Seen) as seen:
        patch.setattr(Parser, "parse_args", parse_args)
        main()
    return seen.value


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the pages take as there: files of one's own, and recordings."""
    made = tmp_path_factory.mktemp("docs")
    for name in ("docs", "jaxserve", "lab", "tools"):  # as in a clone; without configs/
        (made / name).symlink_to(ROOT / name)
    readme = (ROOT / "README.md").read_text()
    (example,) = (one for one in re.findall(r"```python\n(.*?)```", readme, re.S) if "def " in one)
    (made / "aged.py").write_text(example)
    system("llama-2-7b@a100").save(made / "mine.json")
    lab = (ROOT / "docs/lab.md").read_text()
    lines = re.findall(r'^    (\{"timestamp.*\})$', lab, re.MULTILINE)
    (made / "trace.jsonl").write_text("\n".join(lines) + "\n")
    rows = ["2023-11-16 18:15:46.68,374,44", "2023-11-16 18:15:50.95,396,109"]
    (made / AZURE).write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]) + "\n")
    (made / "mix.csv").write_text("prompt_tokens,output_tokens\n40,20\n90,30\n")
    for name in ("prompts.txt", "prompts.jsonl", "text.txt", "some.txt", "keys.txt"):
        (made / name).write_text("")
    _, path = recorded(tmp_path_factory.mktemp("served"), trace(3, 30.0, True, 24))
    for name in ("served.jsonl", "seen.jsonl"):
        (made / name).write_bytes(path.read_bytes())
    return made


@pytest.fixture(autouse=True)
def there(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    policies()
    monkeypatch.setattr(registry, "_REGISTRY", dict(registry._REGISTRY))  # aged.py registers there


@pytest.mark.parametrize("page", ALL, ids=NAMES)
def test_commands_are_understood(page: Path) -> None:
    """Subcommands, flags, policies, presets, systems, workloads and files exist."""
    for command in commands(page):
        try:
            check(command)
        except (Exception, SystemExit) as error:
            raise AssertionError(f"{shlex.join(command)}: {error}") from error


def check(command: list[str]) -> None:
    program, name, *given = command
    for before, each in itertools.pairwise(["", *given]):
        flag, _, value = each.partition("=")
        for file in () if flag in WRITTEN or before in WRITTEN else FILE.findall(value or each):
            if not file.startswith("/path/to/"):
                assert Path(file).exists(), f"there is no {file}"
        if flag in ("--policy", "--policies"):
            for policy in value.split(","):
                make_policy(policy)
    if program == "python":
        check_python(name, given)
    elif name == "serve":
        given = ["Hub/name" if each == "FILE" else each.replace("FILE", AZURE) for each in given]
        values = flags.FlagValues()
        own = [name, *launch.with_model(given)]
        launch.parse_flags(own, launch.preset_path("tiny_cpu"), values)
        launch.read_config(values)
    elif name == "bench":
        bench.parse(given)
    elif name == "profile":
        launch.parse_flags([name, *given[1:]], launch.preset_path("tiny_cpu"), flags.FlagValues())
    elif name in SIMULATED:
        check_simulated(name, given)
    else:
        args = parsed(lambda: cli.main([name, *given])).found
        assert name != "optimal" or args.workload


def check_simulated(name: str, given: list[str]) -> None:
    ours = simulate_flags.parser("") if name == "simulate" else advise.flag_parser()
    args = ours.parse_args(given)
    assert (simulate_flags if name == "simulate" else advise).check(args) == ""
    args.policy = args.policy or deployable()
    runs = replay.read(args).runs(args) if args.replay else simulate_flags.runs(args)
    for run in runs[:: len(args.policy)]:
        run.workload.make_workload(run.seed)


def check_python(name: str, given: list[str]) -> None:
    if name == "-c":
        compile(given[0], "docs", "exec")
    elif name == "-m" and not given[0].startswith("jaxserve_lab."):
        assert importlib.util.find_spec(given[0]) is not None, given[0]
    elif name == "-m":
        module = importlib.import_module(f"{given[0]}.__main__")
        args = parsed(lambda: module.main(given[1:])).found
        for text in getattr(args, "run", None) or ():
            read_case(PAPERS[given[0].rpartition(".")[2]], text)
    else:
        source = (ROOT / name).read_text()
        for each in given:
            flag = each.partition("=")[0]
            assert not flag.startswith("--") or f'"{flag}"' in source, flag


@pytest.mark.parametrize("page", ALL, ids=NAMES)
def test_commands_within_lines_have_flags_that_exist(page: Path) -> None:
    for command in mentions(page):
        given = [each.partition("=")[0] for each in command if each.startswith("--")]
        assert set(given) - {"--help", "--version"} <= set(known(command)), shlex.join(command)


def known(command: list[str]) -> Iterator[str]:
    """The flags of a command."""
    serving = [f"--{name}" for name in launch.flag_names()]
    if command[0] == "python":
        module = importlib.import_module(f"{command[2]}.__main__")
        yield from parsed(lambda: module.main([])).parser.flags()
        return
    name = command[1] if len(command) > 1 else "--help"
    assert name in (*cli.COMMANDS, "--help"), f"there is no command {name}"
    if name in ("serve", "bench", "profile"):
        yield from serving
    if name == "bench":
        which = command[2] if len(command) > 2 else ""
        assert which in (*bench.LAB_COMMANDS, *bench.MEASURED, "")
        yield from (each.partition("=")[0] for each in command[3:])  # which are parsed here
        if which:
            bench.parse([each for each in command[2:] if not re.search(r"\b[A-Z]+$", each)])
    elif name == "profile":
        yield "--out"
    elif name not in ("serve", "--help"):
        yield from parsed(lambda: cli.main([name, *NEEDED.get(name, [])])).parser.flags()


def test_every_page_is_read() -> None:
    """Else the tests above would pass on pages that they cannot read."""
    found = {page.name: len(commands(page)) + len(mentions(page)) for page in ALL}
    assert sum(found.values()) > 150 and min(found["lab.md"], found["performance.md"]) > 15
    assert all(found[notebook.name] for notebook in NOTEBOOKS)


@pytest.mark.parametrize("page", ALL, ids=NAMES)
def test_presets_are_named_as_an_installed_package_knows_them(page: Path) -> None:
    """`--config=configs/x.py` is a file of a clone, `--config=x` a preset anywhere."""
    assert not re.search(r"--config[= ]\S*configs/", text_of(page))


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("jaxserve simulat --workload=alpaca", "did not raise"),
        ("jaxserve simulate --workload=alpaca --policies=vllm", "--policies"),
        ("jaxserve simulate --workload=alpaca --policy=vlm", "vlm"),
        ("jaxserve simulate --workload=alpaco", "alpaco"),
        ("jaxserve simulate --workload=alpaca --system=llama-2-7b@b100", "b100"),
        ("jaxserve simulate --replay=nowhere.jsonl", "nowhere.jsonl"),
        ("jaxserve serve --config=opt_126m_cpu", "opt_126m_cpu"),
        ("jaxserve bench load --rate=1 --rte=3", "--rte"),
        ("jaxserve complete x --ttft=3", "2"),
        ("python -m jaxserve_lab.experiments.bros --number=x", "2"),
        ("python tools/llama_cpp/quality.py --texts=x", "--texts"),
    ],
)
def test_what_is_wrong_is_noticed(
    wrong: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises((Exception, SystemExit, pytest.fail.Exception)) as failed:
        check(shlex.split(wrong))
    assert said.lower() in (str(failed.value) + capsys.readouterr().err).lower()


def reduced(command: list[str]) -> list[str]:
    """The command, with few requests and one seed."""
    _, name, *given = command
    if name not in SIMULATED:
        return [name, *given]
    given = [re.sub(r"^--duration=.*", "--duration=60", each) for each in given]
    given = [re.sub(r"^(--best_effort=closed:batch)=\d+", r"\1=4", each) for each in given]
    given += ["--seeds=1", "--jobs=1"]
    if not any(re.match(rf"--replay|--workload={FILE.pattern}", each) for each in given):
        given.append("--num_requests=20")  # of a sampler: the files here are short
    return [name, *given]


@pytest.mark.slow
@pytest.mark.parametrize("page", ALL, ids=NAMES)
def test_commands_run(page: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in commands(page):
        if command[0] == "jaxserve" and command[1] in RUN:
            # With so few requests a capacity may be unknown, which is exit code 1.
            good = (0, 1) if "--find=capacity" in command else (0,)
            assert cli.main(reduced(command)) in good, shlex.join(command)
            assert capsys.readouterr().out, shlex.join(command)


@pytest.mark.slow
def test_goodput_attains_what_its_page_says(capsys: pytest.CaptureFixture[str]) -> None:
    """By a server's verdict, as everywhere: by the papers' rule it would be 91.2%."""
    page = ROOT / "docs" / "goodput.md"
    command = next(one for one in commands(page) if one[1] == "simulate")
    assert cli.main([*command[1:], "--json"]) == 0
    points = json.loads(capsys.readouterr().out.splitlines()[-1])["points"]
    shares = {point["policy"]: f"{point['mean']['slo_attainment']:.1%}" for point in points}
    words = " ".join(page.read_text().split())
    assert (
        f"{shares['goodput']} of the requests are within their targets, with `edf` "
        f"{shares['edf']}, with `sarathi` {shares['sarathi']}."
    ) in words
