"""serve.py up to the engine: flags, config files, and one clear line for what is wrong."""

from __future__ import annotations

import dataclasses
import importlib
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from absl import flags
from huggingface_hub.utils import filter_repo_objects

from jaxserve import __version__
from jaxserve.config import Config, ConfigError, ServerConfig
from jaxserve.config.config_dict import config_from_config_dict
from jaxserve.config.tree import DEFAULTS
from jaxserve.models.presets import preset_names
from jaxserve.server.access.options import Access
from jaxserve.server.access.tls import Tls
from jaxserve.server.requests.options import ServerOptions, server_options
from jaxserve.server.server import Server
from jaxserve.server.startup import flag_hints, launch, process
from tests.server.fake_engine import INFO, FakeEngine

ROOT = Path(__file__).resolve().parents[3]
# It is ml_collections that loads config files so.
pytestmark = pytest.mark.filterwarnings("ignore:the load_module:DeprecationWarning")
TINY = str(ROOT / "configs" / "tiny_cpu.py")
PRESETS = sorted(
    path.stem for path in (ROOT / "configs").glob("*.py") if path.stem not in ("base", "__init__")
)


def parse(*arguments: str) -> Config:
    values = flags.FlagValues()
    launch.parse_flags(["serve.py", *arguments], TINY, values)
    return launch.read_config(values)


def test_without_flags_the_tiny_model_is_served() -> None:
    config = parse()
    assert config.model.path.endswith("assets/tiny-stories")
    assert config.server.port == ServerConfig.port


def test_fields_and_shortcuts_override_the_file() -> None:
    opt = str(ROOT / "configs" / "opt_125m_cpu.py")
    config = parse(
        f"--config={opt}",
        "--config.scheduler.max_rows=7",
        "--config.engine.row_buckets=(1, 7)",
        "--noconfig.engine.overlap",
        "--policy=vllm",
        "--port=0",
        "--metrics_port=-1",
        "--request_log",
        "--log_format=json",
    )
    assert (config.telemetry.request_log, config.telemetry.log_prompts) == (True, False)
    assert config.telemetry.log_format == "json"
    assert config.model.preset == "opt-125m"
    assert config.scheduler.max_rows == 7
    assert config.engine.row_buckets == (1, 7)
    assert not config.engine.overlap
    assert config.scheduler.policy == "vllm"
    assert (config.server.port, config.server.metrics_port) == (0, -1)


def test_dashes_do_for_underscores() -> None:
    names = ("--config.server.slo_classes.my-own=jct=60s", "--noconfig.server.reflection")
    config = parse("--http-port", "0", "--metrics-port=-1", "--config.engine.record-mib=3", *names)
    assert (config.server.http_port, config.server.metrics_port) == (0, -1)
    assert config.engine.record_mib == 3 and config.server.slo_classes["my-own"] == "jct=60s"
    assert not config.server.reflection
    assert parse("-http_port=0").server.http_port == 0


def test_what_other_servers_call_a_flag_is_one_of_ours() -> None:
    known = launch.flag_names()
    assert [ours for ours in flag_hints._RIVALS.values() if ours not in known] == []


def test_the_policys_parameters_are_the_policys_own(tmp_path: Path) -> None:
    assert parse().scheduler.params == {}
    flag = "--config.scheduler.params"
    config = parse("--policy=aptserve", f"{flag}.slo_decay=0.4", f"{flag}.adaptive=false")
    assert config.scheduler.params == {"slo_decay": "0.4", "adaptive": "false"}
    lines = ["from jaxserve.configs import base", "def get_config():"]
    lines += ["    c = base.get_config()", "    c.scheduler.params.slo_decay = 0.5", "    return c"]
    (tmp_path / "mine.py").write_text("\n".join(lines))
    mine = f"--config={tmp_path / 'mine.py'}"
    assert parse(mine).scheduler.params["slo_decay"] == 0.5
    assert parse(mine, f"{flag}.slo_decay=0.4").scheduler.params["slo_decay"] == "0.4"


def test_slo_classes_come_from_file_and_command_line(tmp_path: Path) -> None:
    flag = "--config.server.slo_classes"
    config = parse(f"{flag}.interactive=ttft=500ms:tbt=50ms", f"{flag}.my-own=jct=60s")
    assert config.server.slo_classes == {
        **Config().server.slo_classes,
        "interactive": "ttft=500ms:tbt=50ms",
        "my-own": "jct=60s",
    }
    lines = ["from jaxserve.configs import base", "def get_config():", "    c = base.get_config()"]
    lines += ["    c.server.slo_classes.gold = 'ttft=1s'", "    del c.server.slo_classes.offline"]
    (tmp_path / "mine.py").write_text("\n".join([*lines, "    return c"]))
    mine = f"--config={tmp_path / 'mine.py'}"
    assert set(parse(mine).server.slo_classes) == {"interactive", "standard", "gold"}
    changed = parse(mine, f"{flag}.gold=ttft=2s").server.slo_classes
    assert changed["gold"] == "ttft=2s"
    with pytest.raises(ConfigError, match=r"server\.slo_classes\.gold: ttft: must be a time"):
        parse(mine, f"{flag}.gold=ttft=2")


def test_a_model_of_ones_own_replaces_a_presets_random_weights() -> None:
    opt = f"--config={ROOT / 'configs' / 'opt_125m_cpu.py'}"
    config = parse(opt, "--model=/my/opt")
    assert (config.model.path, config.model.load_format, config.model.preset) == (
        "/my/opt",
        "auto",
        "",
    )
    assert parse(opt, "--model=/my/opt", "--load_format=random").model.load_format == "random"


def test_a_preset_beside_a_checkpoint_is_refused_and_served_without() -> None:
    preset = "--config.model.preset=opt-125m"
    with pytest.raises(ConfigError, match=r"model\.preset=opt-125m and model\.path=.*two models"):
        parse(preset)
    assert parse(preset, "--model=").model.preset == "opt-125m"


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("--config.scheduler.polcy=x", "scheduler.polcy; did you mean scheduler.policy"),
        ("--noconfig.engine.overlp", "engine.overlp; did you mean engine.overlap"),
        ("--config.sheduler.policy=x", "did you mean scheduler.policy"),
        ("--config.zzz=1", "fields are .*cache.block_size"),
        (
            "--config.scheduler.max_rows=abc",
            "config.scheduler.max_rows=abc: must be a whole number$",
        ),
        ("--config.engine.overlap=maybe", "engine.overlap=maybe: must be true or false$"),
        ("--config.server.refuse_late=x", "server.refuse_late=x: must be a number$"),
        ("--request_log=maybe", "--request_log=maybe: must be true or false$"),
        ("--config.scheduler=3", "scheduler"),
        ("--config.scheduler.params=3", "a parameter is set as --config.scheduler.params.NAME"),
        ("--config.scheduler.params.watermark", "set as --config.scheduler.params.NAME=VALUE"),
        ("--noconfig.scheduler.params.requeue", "unknown field"),
        ("--config.server.slo_classes=3", "a class is set as --config.server.slo_classes.NAME"),
        ("--config.server.slo_classes.a", "a class is set as --config.server.slo_classes.NAME"),
        ("--lora=a/b=folder", "adapters are --lora=NAME=FOLDER, one a flag$"),
        ("--enable-lora", r"did you mean --config\.lora\.max_loras\?$"),
        ("--confg=x", r"there is no flag --confg; did you mean --config\?$"),
        ("--tensor-parallel-size=2", r"did you mean --config\.mesh\.tensor\?$"),
        ("--dtype=half", r"did you mean --config\.model\.dtype\?$"),
        ("--seed=5", r"did you mean --config\.model\.seed or --config\.scheduler\.seed\?$"),
        ("--no-request-lg", r"did you mean --request_log\?$"),
        ("--zzqq", "there is no flag --zzqq; --help says what there is$"),
        ("--config=no/such.py", "no file 'no/such.py'; presets: .*tiny_cpu$"),
        ("--port=abc", "--port=abc: must be a whole number$"),
        ("tiny", "unexpected argument 'tiny'"),
    ],
)
def test_a_wrong_flag_is_a_usage_error(argument: str, words: str) -> None:
    with pytest.raises(launch.UsageError, match=words) as error:
        parse(argument)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("x", "NameError: name 'x'"),
        ("def get_config(: pass", "SyntaxError"),
        ("get_config = None", "TypeError"),
        ("", "get_config"),
    ],
)
def test_a_config_file_that_fails_is_a_usage_error(tmp_path: Path, code: str, words: str) -> None:
    (tmp_path / "mine.py").write_text(code)
    with pytest.raises(launch.UsageError, match=words) as error:
        parse(f"--config={tmp_path / 'mine.py'}")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("c.scheduler.polcy = 'x'", "unknown field scheduler.polcy; did you mean"),
        ("del c.scheduler.params", "scheduler.params is missing; start from configs/base.py"),
        ("del c.server.slo_classes", "server.slo_classes is missing; start from configs/base.py"),
        ("c.server.slo_classes.a = 5", "server.slo_classes.a: must be text"),
        ("del c.cache.block_size", "cache.block_size is missing; start from configs/base.py"),
        ("c.engine.token_buckets = (16, 2.5)", "engine.token_buckets: must be tuple of int"),
        ("c.server.grace_s = -1.0", "server.grace_s: must be 0 to 86400"),
        ("c.server.port = 70000", "server.port: must be 0 to 65535, got 70000"),
        ("c.server.metrics_port = -2", "server.metrics_port: must be -1 to 65535"),
        ("c = {}", "get_config\\(\\) returned dict"),
    ],
)
def test_a_config_that_is_not_base_pys_shape(tmp_path: Path, code: str, words: str) -> None:
    lines = ["from jaxserve.configs import base", "def get_config():"]
    lines += ["    c = base.get_config()", f"    {code}", "    return c"]
    (tmp_path / "mine.py").write_text("\n".join(lines))
    with pytest.raises(ConfigError, match=words):
        parse(f"--config={tmp_path / 'mine.py'}")


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_well_formed_and_says_its_command(name: str) -> None:
    module = importlib.import_module(f"jaxserve.configs.{name}")
    config = config_from_config_dict(module.get_config())
    assert f"jaxserve serve {name}" in module.__doc__
    assert config.model.path or config.model.preset in preset_names()
    assert config.scheduler.max_prefill_tokens <= config.scheduler.max_batch_tokens


@pytest.mark.parametrize("name", ["port", "http_port", "metrics_port"])
def test_a_taken_port_is_found_before_the_model_is_loaded(name: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        ports = {"port": 0, "http_port": 0, "metrics_port": 0, name: port}
        flags = (f"--{flag}={number}" for flag, number in ports.items())
        config = parse("--config.server.host=127.0.0.1", *flags)
        with pytest.raises(ConfigError, match=f"server.{name}: cannot listen on .*:{port} "):
            launch.check_ports(config.server)


@pytest.mark.parametrize("ports", [(), ("--port=0", "--metrics_port=-1")])
def test_a_host_that_does_not_exist(ports: tuple[str, ...]) -> None:
    config = parse("--config.server.host=not a host", *ports)
    with pytest.raises(ConfigError, match=r"server\.host"):
        launch.check_ports(config.server)


def test_what_is_printed_when_the_server_is_ready() -> None:
    with Server(FakeEngine(), metrics_port=0) as server:
        text = launch.ready_text(INFO, server, 1.25)
        for words in (
            "ready after 1.2 s",
            "fake (none, 1.0M parameters, float32 on cpu, xla attention)",
            "1,024 blocks of 16: 8,192 tokens, 1 MiB",
            "fcfs",
            "steps    predicted by a cost model, timed at the start\n",
            f"address  {server.address}\n",
            f"http://{server.metrics_address}/metrics",
            "batches  off\n",
            f' complete --address={server.address} "Once upon a time"',
        ):
            assert words in text


def test_it_is_printed_how_hidden_caches_are_read() -> None:
    with Server(FakeEngine(), metrics_port=0) as server:
        info = dataclasses.replace(INFO, hidden_read="absorbed", rho=-2.5e-7)
        text = launch.ready_text(info, server, 1.25)
        assert "fcfs, KV and hidden caches, absorbed at -0.25 us per token\n" in text
        kv_only = dataclasses.replace(INFO, hidden_read=None, rho=None)
        assert "hidden" not in launch.ready_text(kv_only, server, 1.25)


def test_the_clients_line_is_as_short_as_it_can_be(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    short = 'jaxserve complete "Once upon a time"'
    folder = tmp_path / ".venv" / "bin"
    folder.mkdir(parents=True)
    (folder / "jaxserve").touch()
    monkeypatch.setattr(sys, "executable", str(folder / "python"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(shutil, "which", lambda name: str(folder / name))
    assert launch.client_line("localhost:50051", Access()) == short
    assert launch.client_line("0.0.0.0:50051", Access()) == short
    assert "--address=box:50051 " in launch.client_line("box:50051", Access())
    assert launch.client_line("localhost:8000", Access(), chats=True) == "jaxserve chat"
    assert launch.client_line("box:80", Access(), chats=True) == "jaxserve chat --address=box:80"
    tls = Access(tls=Tls(Path("cert"), Path("key")))
    assert " --tls " in launch.client_line("localhost:50051", tls)
    mutual = Access(tls=Tls(Path("cert"), Path("key"), Path("ca")))
    assert " --tls_cert=FILE --tls_key=FILE " in launch.client_line("localhost:50051", mutual)
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    assert launch.client_line("localhost:50051", Access()) == f".venv/bin/{short}"
    (folder / "jaxserve").unlink()  # not installed: a clone's folder is on the path
    module = short.replace("jaxserve", "python -m jaxserve")
    assert launch.client_line("localhost:50051", Access()) == f".venv/bin/{module}"


def test_a_model_comes_first(tmp_path: Path) -> None:
    base_config = f"--config={launch.preset_path('base')}"
    for model in (str(tmp_path), "Qwen/Qwen2.5-0.5B", "no/such"):
        assert launch.with_model([model, "--port=0"]) == [
            base_config,
            f"--model={model}",
            "--port=0",
        ]
        given = [model, "--config", "opt_125m_cpu"]
        assert launch.with_model(given) == [f"--model={model}", *given[1:]]
    for preset in ("opt-125m-cpu", "opt_125m_cpu", str(ROOT / "configs" / "opt_125m_cpu.py")):
        assert launch.with_model([preset]) == [f"--config={preset}"]
        assert parse(*launch.with_model([preset])).model.preset == "opt-125m"
    assert parse("--config", "opt_125m_cpu", "--port=0").model.preset == "opt-125m"
    assert launch.with_model(["--port=0"]) == ["--port=0"]
    with pytest.raises(
        launch.UsageError, match=r"'llama' is neither a folder, a file nor one of smollm2, .*;"
    ):
        launch.with_model(["llama"])


def test_a_model_of_the_hub_is_found_in_its_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {}

    def download(model: str, **options: Any) -> str:
        asked.update(options, model=model)
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    (tmp_path / "config.json").touch()
    config = launch.find_checkpoint(parse("--model=Qwen/Qwen2.5-0.5B"))
    assert (config.model.path, config.model.name) == (str(tmp_path), "Qwen/Qwen2.5-0.5B")
    assert asked.pop("model") == "Qwen/Qwen2.5-0.5B"
    wanted = ["config.json", "model.safetensors", "additional_chat_templates/tool_use.jinja"]
    others = ["model.bin", "original/params.json", "original/model.safetensors"]
    assert list(filter_repo_objects(wanted + others, **asked)) == wanted
    (tmp_path / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"config\.json is missing"):
        launch.find_checkpoint(parse("--model=Qwen/Qwen2.5-0.5B"))


def test_serve_py_answers_with_one_line_and_without_jax() -> None:
    done = run_without_jax("--port=99999")
    assert done.returncode == 2
    assert re.fullmatch(r"serve\.py: .+\n", done.stderr)
    assert done.stdout == "False\n"


def test_help_lists_every_field_with_its_comment_and_value() -> None:
    asked = ("--policy=vllm", "--config.server.slo_classes.mine=ttft=2s")
    asked = (*asked, "--lora=law=/a=b", "--lora=sql=c", "--config.lora.adapters.med=d")
    done = run_without_jax("--help", *asked)
    assert (done.returncode, done.stderr) == (0, "")
    text = " ".join(done.stdout.split())
    for path in DEFAULTS:
        assert f" --config.{path}=" in text
    for words in (
        "--model=VALUE checkpoint directory, Hugging Face or Orbax, or a GGUF file; the same as",
        "--config.lora.adapters=law=/a=b, med=d, sql=c Adapters loaded at the start",
        "cache: The pool of cache blocks. --config.cache.block_size=0 Tokens that a block holds.",
        "--config.scheduler.policy=vllm ",
        "--config.scheduler.max_rows=16 Most requests of a batch",
        "mine=ttft=2s",
    ):
        assert words in text, words
    assert done.stdout.endswith("False\n"), "jax was imported"
    assert f"{answered('-h', *asked)}\nFalse\n" == done.stdout


def test_the_version_is_told() -> None:
    assert answered("--version", "--config=no/such.py") == f"jaxserve {__version__}"


def test_a_wrong_flag_beside_help_is_a_usage_error() -> None:
    with pytest.raises(launch.UsageError, match="there is no flag --polcy"):
        answered("--help", "--polcy=x")


def test_a_server_goes_on_where_nobody_reads_what_it_prints(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    read, write = os.pipe()
    os.close(read)
    monkeypatch.setattr(sys, "stdout", os.fdopen(write, "w"))
    process.announce("ready\nat localhost:1", "text")
    (record,) = caplog.records
    assert record.getMessage() == "stdout: Broken pipe; ready"
    print("and nothing is raised at the end", flush=True)


def answered(*arguments: str) -> str | None:
    """What a command line that is a question is answered."""
    return launch.answer(["serve.py", *arguments], TINY, flags.FlagValues())


def run_without_jax(*arguments: str) -> subprocess.CompletedProcess[str]:
    """serve.py with these arguments; in the end it prints whether jax was imported."""
    script = (
        "import sys, runpy\n"
        f"sys.argv = ['serve.py', *{arguments!r}]\n"
        "try:\n"
        f"    runpy.run_path({str(ROOT / 'serve.py')!r}, run_name='__main__')\n"
        "finally:\n"
        "    print('jax' in sys.modules)\n"
    )
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)


def test_the_defaults_bound_all_that_can_grow() -> None:
    config = Config()
    assert server_options(config) == ServerOptions(
        max_calls=config.scheduler.max_queue + config.scheduler.max_rows,
        stream_buffer_bytes=1 << 20,
        write_timeout_s=30.0,
        stall_s=60.0,
        exit_on_failure=True,
        refuse_late=0.75,
        request_log=False,
        reflection=True,
    )
    assert server_options(config.with_fields(server__max_calls=7)).max_calls == 7


def test_the_process_stays_where_the_config_says_so() -> None:
    config = Config().with_fields(server__exit_on_failure="off")
    assert not server_options(config).exit_on_failure
