"""Every field there is, with its default; a preset starts from here and changes some.

Not a preset of its own: it names no model. Any field can be set on the command line,
`--config.scheduler.max_rows=16`; `jaxserve serve --help` shows what is said of each in
jaxserve/config/sections.py.
"""

from ml_collections import ConfigDict

from jaxserve.config.config_dict import default_config_dict


def get_config() -> ConfigDict:
    """What `jaxserve serve`, the bench and the notebook take."""
    return default_config_dict()
