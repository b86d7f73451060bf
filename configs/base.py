"""All fields with their defaults, which presets start from and change.

Not a preset itself, since it names no model. Any field can be set on the command line,
`--config.scheduler.max_rows=16`; `jaxserve serve --help` explains each, as does
jaxserve/config/sections.py.
"""

from ml_collections import ConfigDict

from jaxserve.config.config_dict import default_config_dict


def get_config() -> ConfigDict:
    """The configuration that `jaxserve serve`, the bench and the notebook start from."""
    return default_config_dict()
