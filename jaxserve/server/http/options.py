"""The HTTP frontend's settings."""

from __future__ import annotations

from dataclasses import dataclass

from jaxserve.config import Config, SchedulerConfig
from jaxserve.server.requests.templates.chat_template import ChatTemplate, load_chat_template


@dataclass(frozen=True)
class HttpSettings:
    """Settings of the HTTP frontend.

    Attributes:
        port: 0 takes a free one.
        template: makes prompts of chats.
        limits: limits of a step, which the console shows.
    """

    port: int
    template: ChatTemplate
    limits: SchedulerConfig


def http_settings(config: Config) -> HttpSettings | None:
    """The settings in a config; None if HTTP is off. Raises ConfigError if the chat template cannot
    be read."""
    if config.server.http_port < 0:
        return None
    template = load_chat_template(config.model.path, config.server)
    return HttpSettings(config.server.http_port, template, config.scheduler)
