from verlite.api import check as check
from verlite.api import evaluate as evaluate
from verlite.api import export as export
from verlite.api import load_config as load_config
from verlite.api import train as train
from verlite.config.problems import ConfigError as ConfigError

__version__: str
