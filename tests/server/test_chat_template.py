"""Chats to prompts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jaxserve.engine.errors import ConfigError
from jaxserve.sched.request import InvalidRequest
from jaxserve.server.requests.chat_template import PLAIN, ChatTemplate, load_chat_template

CHAT = [{"role": "user", "content": "Hi <b>"}, {"role": "assistant", "content": "Yes"}]


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
    assert template.render(CHAT, mood="!") == (
        '<s>  [USER] Hi <b></s>\n  [ASSISTANT] Yes</s>\n>!{"role": "user", "content": "Hi <b>"}'
    )
    (tmp_path / "chat_template.jinja").write_text("from the file")
    assert load_chat_template(str(tmp_path)).render(CHAT) == "from the file"


def test_the_default_of_several(tmp_path: Path) -> None:
    several = [{"name": "rag", "template": "no"}, {"name": "default", "template": "yes"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": several}))
    assert load_chat_template(str(tmp_path)).render(CHAT) == "yes"


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages[7].content.x }}", "undefined|no element"),
        ("{{ 1 / 0 }}", "zero"),
    ],
)
def test_what_a_template_may_not_do(source: str, says: str) -> None:
    with pytest.raises(InvalidRequest, match=f"messages: the model's chat template: .*({says})"):
        ChatTemplate(source, {}, own=True).render(CHAT)


@pytest.mark.parametrize("text", ["{% if %}", "{{ unclosed"])
def test_a_template_that_cannot_be_read(tmp_path: Path, text: str) -> None:
    (tmp_path / "chat_template.jinja").write_text(text)
    with pytest.raises(ConfigError, match=r"model.path: the chat template in .*\.jinja"):
        load_chat_template(str(tmp_path))
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"model.path: cannot read .*tokenizer_config\.json"):
        load_chat_template(str(tmp_path))


def test_the_plain_one_takes_any_turn() -> None:
    assert ChatTemplate(PLAIN, {}, own=False).render(CHAT).endswith("assistant:")
