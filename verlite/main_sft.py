"""`python -m verlite.main_sft data.train_files=FILE.parquet model.path=MODEL key=value ...`: supervised training.

One process, or several: `torchrun --nproc_per_node 4 -m verlite.main_sft ...`. The trained model is a Hugging Face folder.
Exit codes: 0 done; 2 the configuration or a file is wrong, nothing was started; anything else failed.
"""

import sys

from verlite.config import keys
from verlite.config.load import parse_argv
from verlite.config.problems import ConfigError
from verlite.config.sft import SFTConfig, compose
from verlite.config.show import console


def main(argv: list[str] | None = None) -> int:
    """Check the configuration, train, and return the exit code."""
    config_name, config_dir, overrides, help_wanted = parse_argv(
        sys.argv[1:] if argv is None else argv
    )
    if help_wanted:
        print(help_text())
        return 0
    try:
        config = compose(config_name, overrides, config_dir)
    except ConfigError as error:
        console(stderr=True).print(error.text(), soft_wrap=True, end="")
        return 2
    # torch and transformers are imported only for a configuration that can run.
    from verlite.data.dataset import DataError
    from verlite.engine.folder import ModelError
    from verlite.sft.train import train

    try:
        train(config)
    except (DataError, ModelError) as error:
        console(stderr=True).print(str(error), markup=False, highlight=False, soft_wrap=True)
        return 2
    except KeyboardInterrupt:
        console(stderr=True).print("interrupted")
        return 130
    return 0


def help_text() -> str:
    """How to call it, and every key."""
    lines = [__doc__.strip(), ""]
    for key in keys.table(SFTConfig()).values():
        if not key.section:
            default = "" if key.default == "???" else f" (default {key.default})"
            lines += [f"{key.name}: {key.type}{default}", f"    {key.doc}"]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
