"""`python -m verlite.main_sft data.train_files=FILE.parquet model.path=MODEL key=value ...`

Supervised fine-tuning, in one process or in several:
`torchrun --nproc_per_node 4 -m verlite.main_sft ...`.

The run directory gets config.yaml, metrics.jsonl, and the trained model in huggingface/.

Exit codes:
  0  finished
  2  the configuration or a file is wrong; nothing was trained
  any other code: failed
"""

import os
import sys

from verlite.config.load import parse_argv
from verlite.config.problems import ConfigError
from verlite.config.sft import SFT, compose
from verlite.config.show import console, notes_text


def main(argv: list[str] | None = None) -> int:
    """Validate the configuration, train, and return the exit code."""
    try:
        arguments = sys.argv[1:] if argv is None else argv
        config_name, config_dir, overrides, help_wanted = parse_argv(arguments)
        if help_wanted:
            print(help_text())
            return 0
        loaded = compose(config_name, overrides, config_dir)
        if loaded.notes and os.environ.get("RANK", "0") == "0":
            console().print(notes_text(loaded.notes, SFT), soft_wrap=True)
    except ConfigError as error:
        console(stderr=True).print(error.text(), soft_wrap=True, end="")
        return 2
    # Import torch and transformers only for a valid configuration.
    from verlite.data.dataset import DataError
    from verlite.engine.folder import ModelError
    from verlite.sft.train import train

    try:
        train(loaded)
    except (DataError, ModelError) as error:
        console(stderr=True).print(str(error), markup=False, highlight=False, soft_wrap=True)
        return 2
    except KeyboardInterrupt:
        console(stderr=True).print("interrupted")
        return 130
    return 0


def help_text() -> str:
    """Return the usage and a description of every key."""
    lines = [str(__doc__).strip(), ""]
    for key in SFT.keys.values():
        if not key.section:
            default = "" if key.default == "???" else f" (default {key.default})"
            lines.append(f"{key.name}: {key.type}{default}")
            lines.append(f"    {key.doc}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
