"""`ray start` for machines that are too slow for one of its time limits.

python -m verlite.launch.ray_start --dashboard-agent-listen-port=PORT OPTION...
"""

import sys

from verlite.controller import ray_internals

LISTEN_PORT = "--dashboard-agent-listen-port"


def main(options: list[str]) -> None:
    """Run `ray start` with these options; exit with its code."""
    for option, following in zip(options, [*options[1:], ""], strict=True):
        name, _, value = option.partition("=")
        port = value or following
        if name == LISTEN_PORT and port.isdigit():
            ray_internals.give_raylet_the_agents_port(int(port))
    from ray.scripts.scripts import cli

    cli(["start", *options], prog_name="ray")


if __name__ == "__main__":
    main(sys.argv[1:])
