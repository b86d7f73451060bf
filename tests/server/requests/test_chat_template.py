"""Chats to prompts."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jaxserve.config import ConfigError
from jaxserve.engine.errors import EngineStopped, QueueFull
from jaxserve.limited import process as limited_process
from jaxserve.sched.request import InvalidRequest
from jaxserve.server.requests.templates import template_process
from jaxserve.server.requests.templates.chat_template import ChatTemplate, load_chat_template
from jaxserve.server.tools.calls import Tool
from tests.models.gguf_files import write_gguf

CHAT = [{"role": "user", "content": "Hi <b>"}, {"role": "assistant", "content": "Yes"}]
PATIENCE = 60


def asking(does: str) -> list[dict[str, str]]:
    """A chat for `any_of`."""
    return [{"role": "user", "content": does}]


def test_without_a_template_turns_have_names(tmp_path: Path) -> None:
    for path in ("", str(tmp_path)):
        template = load_chat_template(path)
        assert not template.own
        text = template.render(CHAT, add_generation_prompt=False)
        assert text == "user: Hi <b>\nassistant: Yes\n"


def test_the_checkpoints_own_template(tmp_path: Path) -> None:
    source = (
        "{{ bos_token }}{% for m in messages %}\n"
        "  [{{ m.role|upper }}] {{ m.content }}{{ eos_token }}\n"
        "{% if loop.last %}{% break %}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}>{{ mood }}{% endif %}{{ messages[0]|tojson }}"
    )
    config = {"chat_template": source, "bos_token": "<s>", "eos_token": {"content": "</s>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    template = load_chat_template(str(tmp_path))
    assert template.own
    assert template.render(CHAT, kwargs={"mood": "!"}) == (
        '<s>  [USER] Hi <b></s>\n  [ASSISTANT] Yes</s>\n>!{"role": "user", "content": "Hi <b>"}'
    )
    (tmp_path / "chat_template.jinja").write_text("from the file")
    assert load_chat_template(str(tmp_path)).render(CHAT) == "from the file"


def test_the_default_of_several(tmp_path: Path) -> None:
    several = [{"name": "rag", "template": "no"}, {"name": "default", "template": "yes"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": several}))
    assert load_chat_template(str(tmp_path)).render(CHAT) == "yes"


TOOL = Tool("look", "", {"type": "object"})


def several(folder: Path, form: str, templates: dict[str, str]) -> str:
    """A checkpoint with these templates, in one of the forms that they come in."""
    if form == "files":
        (folder / "additional_chat_templates").mkdir()
        for name, source in templates.items():
            file = f"additional_chat_templates/{name}.jinja"
            (folder / ("chat_template.jinja" if name == "default" else file)).write_text(source)
    elif form == "gguf":
        names = {name: f"tokenizer.chat_template.{name}" for name in templates}
        fields = {names[name]: source for name, source in templates.items()}
        if "default" in templates:
            fields["tokenizer.chat_template"] = fields.pop(names["default"])
        metadata = {"general.architecture": "llama", "tokenizer.ggml.tokens": ["a"], **fields}
        return str(write_gguf(folder / "m.gguf", metadata, {}))
    else:
        listed = [{"name": name, "template": source} for name, source in templates.items()]
        told = listed if form == "list" else templates
        (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": told}))
    return str(folder)


@pytest.mark.parametrize("form", ["list", "object", "files", "gguf"])
def test_chats_with_tools_have_a_template_of_their_own(form: str, tmp_path: Path) -> None:
    sources = {
        "rag": "no",
        "tool_use": "{{ messages[0].content }}{{ tools|map(attribute='function.name')|join }}",
        "default": "{{ messages[0].content }}{{ 'x' if tools else '-' }}{{ mood }}",
    }
    template = load_chat_template(several(tmp_path, form, sources))
    try:
        assert template.own
        assert template.render(CHAT, tools=[TOOL]) == "Hi <b>look"
        assert template.render(CHAT, kwargs={"mood": "!"}) == "Hi <b>-!"
    finally:
        template.close()


@pytest.mark.parametrize("form", ["list", "object", "files", "gguf"])
@pytest.mark.parametrize(("names", "used"), [(("rag", "tool_use"), "tool_use"), (("rag",), "rag")])
def test_without_a_default_one_of_the_checkpoints_is_used(
    names: tuple[str, ...],
    used: str,
    form: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    path = several(
        tmp_path, form, {name: f"{name}: {{{{ messages[0].content }}}}" for name in names}
    )
    template = load_chat_template(path)
    assert template.render(CHAT) == f"{used}: Hi <b>"
    template.close()
    said = f"no chat template of the name default (it has {', '.join(names)}): {used} is used"
    assert said in caplog.text


def test_the_template_of_a_processor(tmp_path: Path) -> None:
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "{{ bos_token }}"}))
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"bos_token": "<s>"}))
    template = load_chat_template(str(tmp_path))
    assert template.render(CHAT) == "<s>"
    template.close()


@pytest.mark.parametrize("decoder", [{}, {"added_tokens_decoder": {}}])
def test_special_tokens_of_either_file(tmp_path: Path, decoder: dict[str, Any]) -> None:
    config = {"chat_template": "{{ bos_token }}{{ eos_token }}", "bos_token": None, **decoder}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, "eos_token": "</s>"}))
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"bos_token": "<s>"}))
    template = load_chat_template(str(tmp_path))
    assert template.render(CHAT) == "<s></s>"
    template.close()


@pytest.fixture(scope="module")
def any_of() -> Iterator[ChatTemplate]:
    """A template that does what the first message says, one branch each."""
    branches = "".join(
        f"{{% if messages[0].content == {name!r} %}}{source}{{% endif %}}"
        for name, source in BRANCHES.items()
    )
    template = ChatTemplate(branches, {"bos_token": "<s>"})
    yield template
    template.close()


LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
BRANCHES = {
    "raise": "{{ raise_exception('roles must alternate') }}",
    "append": "{{ messages.append(1) }}",
    "class": "{{ ''.__class__.__mro__ }}",
    "format": "{{ '{0.__class__.__mro__}'.format(messages) }}",
    "globals": "{{ namespace.__init__.__globals__ }}",
    "absent": "{{ messages[7].content.x }}",
    "zero": "{{ 1 / 0 }}",
    "range": "{{ range(10 ** 9)|list }}",
    "product": "{{ 'ab' * 1500000000 }}",
    "filter": "{{ 'x'|center(2000000000) }}",
    "power": "{% if 9 ** (9 ** 9) %}{% endif %}",
    "printf": "{{ '%1000000000d' % 1 }}",
    "recursion": "{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}",
    "include": "{% include '/etc/passwd' %}",
    "long": "{% for i in range(34) %}{{ 'a' * 1000000 }}{% endfor %}",
    "json": "{{ messages|tojson(default=raise_exception) }}",
    "tools": "{{ tools is none }}{{ documents is none }}",
    "generation": "{% generation %}said{% endgeneration %}",
    "loop": LOOP,
    "surrogate": "{{ '\\ud800' }}",
    "raise surrogate": "{{ raise_exception('a \\ud800 b') }}",
    "kwargs": "{{ bos_token }}{{ mood }}{{ documents|length }}",
}


@pytest.mark.parametrize(
    ("does", "says"),
    [
        ("raise", "roles must alternate"),
        ("append", "unsafe"),
        ("class", "unsafe"),
        ("format", "unsafe"),
        ("globals", "unsafe"),
        ("absent", "undefined|no element"),
        ("zero", "zero"),
        ("range", "Range too big"),
        ("product", "more than 768 MiB"),
        ("filter", "more than 768 MiB"),
        ("printf", "more than 768 MiB"),
        ("recursion", "recursion"),
        ("include", "no loader"),
        ("long", "more than 32 MiB"),
        ("json", "unexpected keyword"),
    ],
)
def test_what_a_template_may_not_do(any_of: ChatTemplate, does: str, says: str) -> None:
    """Compiled with all of it: nothing is computed before it is asked for."""
    with pytest.raises(InvalidRequest, match=f"messages: the model's chat template: .*({says})"):
        any_of.render(asking(does))


def test_what_templates_of_transformers_have(any_of: ChatTemplate) -> None:
    assert any_of.render(asking("tools")) == "TrueTrue"
    assert any_of.render(asking("generation")) == "said"


def test_a_template_that_loops_ends_and_holds_nobody_up(any_of: ChatTemplate) -> None:
    long = asking("loop") * 101
    looping = any_of.submit(long)
    waiting = any_of.submit(asking("tools") * 101)
    for _ in range(20):
        assert any_of.render(asking("tools")) == "TrueTrue"
    assert not looping.done()
    with pytest.raises(InvalidRequest, match="template: takes more than 2 s of a processor"):
        looping.result(PATIENCE)
    assert waiting.result(PATIENCE) == "TrueTrue"


def test_closing_ends_a_template_that_loops() -> None:
    template = ChatTemplate(LOOP)
    looping, behind = template.submit(CHAT), template.submit(CHAT)
    process = template._processes[0]._process
    assert process is not None
    while not looping.running():
        time.sleep(0.001)
    template.close()
    assert process.process.wait(PATIENCE) == -signal.SIGKILL
    with pytest.raises(EngineStopped):
        looping.result(PATIENCE)
    assert behind.cancelled()
    with pytest.raises(EngineStopped):
        template.submit(CHAT)


def test_who_waits_too_long_for_others_is_told(
    any_of: ChatTemplate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template_process, "WALL_S", -1)
    with pytest.raises(QueueFull, match="other chats took the chat template more than"):
        any_of.render(CHAT)


def test_a_process_that_does_not_answer_is_replaced(
    any_of: ChatTemplate, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped = any_of._processes[0]._process
    assert stopped is not None
    stopped.process.send_signal(signal.SIGSTOP)
    with monkeypatch.context() as patch:
        patch.setattr(template_process, "WALL_S", 0.2)
        with pytest.raises(InvalidRequest, match=r"has not ended after 0\.2 s"):
            any_of.render(CHAT)
    assert stopped.process.returncode == -signal.SIGKILL
    assert any_of.render(asking("tools")) == "TrueTrue"


def test_a_process_that_died_while_idle_is_nobodys_failure(any_of: ChatTemplate) -> None:
    assert any_of.render(asking("tools")) == "TrueTrue"
    died = any_of._processes[0]._process
    assert died is not None
    os.kill(died.process.pid, signal.SIGKILL)  # as the kernel does where memory is short
    os.waitid(os.P_PID, died.process.pid, os.WEXITED | os.WNOWAIT)
    assert any_of.render(asking("tools")) == "TrueTrue"


def test_where_there_can_be_no_process_it_is_tried_again(
    any_of: ChatTemplate, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: Any) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    process = any_of._processes[0]
    assert process._process is not None
    process._process.kill()
    process._process.process.wait()
    with monkeypatch.context() as patch:
        patch.setattr(limited_process.socket, "socketpair", full)
        with pytest.raises(QueueFull, match="no process for the chat template"):
            any_of.render(CHAT)
    assert any_of.render(asking("tools")) == "TrueTrue"


@pytest.mark.promise(31)
def test_tenants_take_turns(any_of: ChatTemplate) -> None:
    long = asking("tools") * 101
    held = any_of._processes[1]
    ended = list[str]()
    with held._changed:  # the thread that asks waits until all have come
        for tenant in ("loud", "loud", "loud", "quiet", "other", "quiet"):
            text = any_of.submit(long, tenant=tenant)
            text.add_done_callback(lambda _, tenant=tenant: ended.append(tenant))
    assert text.result(PATIENCE) == "TrueTrue"
    assert any_of.submit(long).result(PATIENCE) == "TrueTrue"  # behind all of them
    assert ended == ["loud", "quiet", "other", "loud", "quiet", "loud"]


@pytest.fixture(scope="module")
def arguments() -> Iterator[ChatTemplate]:
    template = ChatTemplate("{{ messages[1].tool_calls[0].function.arguments|tojson }}")
    yield template
    template.close()


@pytest.mark.parametrize(
    ("text", "object_"),
    [
        ('{"a": [1]}', {"a": [1]}),
        *((text, {}) for text in ("", " ", "null", "{}")),
        *(
            (text, {"": text})
            for text in ("[1]", "{", '{"a": "\\ud800"}', '{"a": NaN}', "[" * 60_000)
        ),
    ],
)
def test_arguments_of_functions_are_objects_for_templates(
    arguments: ChatTemplate, text: str, object_: Any
) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": text}}
    chat = [*CHAT[:1], {"role": "assistant", "content": "", "tool_calls": [call]}]
    assert json.loads(arguments.render(chat)) == object_


def test_what_is_no_text_is_not_answered(any_of: ChatTemplate) -> None:
    for does in ("surrogate", "raise surrogate"):
        with pytest.raises(InvalidRequest, match=r"template: .*(surrogates not allowed|a \? b)"):
            any_of.render(asking(does))


def test_the_process_has_no_secrets_and_ends_without_the_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("JAXSERVE_API_KEYS", "alice")
    template = ChatTemplate("yes")
    process = template._processes[0]._process
    assert process is not None
    assert b"alice" not in Path(f"/proc/{process.process.pid}/environ").read_bytes()
    process._connection.shutdown(socket.SHUT_RDWR)
    assert process.process.wait(PATIENCE) == 0
    template.close()


def test_kwargs_that_the_template_reads(any_of: ChatTemplate) -> None:
    kwargs = {"mood": 1.5, "documents": [{"title": "a"}, {"title": "b"}]}
    assert any_of.render(asking("kwargs"), kwargs=kwargs) == "<s>1.52"


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("messages", [], "chat_template_kwargs.messages: is a field of the call"),
        ("add_generation_prompt", 1, "chat_template_kwargs.add_generation_prompt: is a field"),
        ("bos_token", "x", "'bos_token' is not read .*read: .*documents, mood"),
        ("tools", [], "chat_template_kwargs.tools: is a field of the call"),
        ("raise_exception", 1, "'raise_exception' is not read"),
        ("self", 1, "'self' is not read"),
        ("x" * 9999, 1, "'x{64}' is not read"),
        ("\ud800", 1, "is not read"),
        ("mood", 10**400, "chat_template_kwargs.mood: holds an integer of more than 64 bits"),
        ("mood", [float("nan")], "not finite"),
        ("mood", [0] * 10_001, "more than 10,000 values"),
        ("mood", [[[[[[[[[]]]]]]]]], "nested more than 8 deep"),
    ],
)
def test_kwargs_that_are_refused(any_of: ChatTemplate, name: str, value: Any, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        any_of.render(CHAT, kwargs={name: value})


def test_the_plain_one_reads_nothing() -> None:
    with pytest.raises(InvalidRequest, match=r"not read by the model's chat template \(read: none"):
        ChatTemplate().render(CHAT, kwargs={"mood": 1})


@pytest.mark.parametrize("text", ["{% if %}", "{{ unclosed"])
def test_a_template_that_cannot_be_read(tmp_path: Path, text: str) -> None:
    (tmp_path / "chat_template.jinja").write_text(text)
    with pytest.raises(ConfigError, match=r"model.path: the chat template in .*\.jinja"):
        load_chat_template(str(tmp_path))


@pytest.mark.parametrize(
    ("text", "says"),
    [("{", "not valid JSON"), ("[" * 200_000, "nested too deeply"), ("\ud800", "surrogates|utf-8")],
)
def test_a_config_that_cannot_be_read(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "tokenizer_config.json").write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(ConfigError, match=rf"cannot read .*tokenizer_config\.json: .*({says})"):
        load_chat_template(str(tmp_path))


def test_files_that_are_none_or_too_long(tmp_path: Path) -> None:
    file = tmp_path / "chat_template.jinja"
    os.mkfifo(file)
    with pytest.raises(ConfigError, match=r"chat_template\.jinja: it is no regular file"):
        load_chat_template(str(tmp_path))
    file.unlink()
    file.write_text("x" * (1 << 20) + "x")
    with pytest.raises(ConfigError, match=r"it has 1,048,577 bytes, and 1,048,576 are allowed"):
        load_chat_template(str(tmp_path))


def test_the_plain_one_takes_any_turn() -> None:
    assert ChatTemplate().render(CHAT).endswith("assistant:")
