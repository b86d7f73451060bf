"""The configuration: one tree of frozen dataclasses, made from a ConfigDict at the start, and
checked when it is made."""

from jaxserve.config.errors import ConfigError as ConfigError
from jaxserve.config.sections import AUTO as AUTO
from jaxserve.config.sections import DTYPES as DTYPES
from jaxserve.config.sections import JSON as JSON
from jaxserve.config.sections import LOAD_FORMATS as LOAD_FORMATS
from jaxserve.config.sections import LORA_NAME as LORA_NAME
from jaxserve.config.sections import MAX_LORAS as MAX_LORAS
from jaxserve.config.sections import NO_DEFAULTS as NO_DEFAULTS
from jaxserve.config.sections import TEXT as TEXT
from jaxserve.config.sections import CacheConfig as CacheConfig
from jaxserve.config.sections import EngineConfig as EngineConfig
from jaxserve.config.sections import LoraConfig as LoraConfig
from jaxserve.config.sections import MeshConfig as MeshConfig
from jaxserve.config.sections import SchedulerConfig as SchedulerConfig
from jaxserve.config.sections import ServedModelConfig as ServedModelConfig
from jaxserve.config.sections import ServerConfig as ServerConfig
from jaxserve.config.sections import TelemetryConfig as TelemetryConfig
from jaxserve.config.tree import Config as Config
