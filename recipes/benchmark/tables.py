"""The tables of docs/benchmarks.md, computed from results.json."""

from collections.abc import Callable, Iterable
from typing import Any

from workload import WORKLOADS

STAGES = ("gen", "reward", "adv", "update_actor", "update_weights")
"""Stages of a step, in order; the others take negligible time."""


def tables(results: dict[str, Any]) -> dict[str, str]:
    """Return the Markdown of each part of the page that has results."""
    parts = results["parts"]
    found = {"steps": "\n".join((_steps(parts), _stages(parts), _first_steps(parts)))}
    found["generation"] = "\n".join(
        _generation(name, parts[f"generation_{name}"])
        for name in WORKLOADS
        if f"generation_{name}" in parts
    )
    served = {name: parts[f"server_{name}"] for name in WORKLOADS if f"server_{name}" in parts}
    if served:
        found["server"] = "\n".join(_server(name, one) for name, one in served.items())
    on_gpus = {part: found for part, found in parts.items() if part.startswith("gpu_")}
    if on_gpus:
        found["gpu"] = _gpu(on_gpus)
    return found | {part: made(parts[part]) for part, made in _TABLES.items() if part in parts}


def table(head: tuple[str, ...], rows: Iterable[Iterable[str]]) -> str:
    """Return a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join(
        f"| {' | '.join(cells)} |\n".replace("| --- |", "|---|").replace(" --- |", "---|")
        for cells in lines
    )


def measured_steps(parts: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Return the workloads whose steps were measured, by name."""
    return [(name, parts[f"step_{name}"]) for name in WORKLOADS if f"step_{name}" in parts]


def _steps(parts: dict[str, Any]) -> str:
    rows = [
        (
            f"{name}, engine {step['engine']}, {step['rounds']} x {step['steps_per_round']} steps",
            f"{step['seconds']:.2f} s",
            f"{step['trl_seconds']:.2f} s",
            f"{step['vs_trl']:.2f}",
            f"{step['vs_trl_per_token']:.2f}",
            f"{step['floor_seconds']:.2f} s",
            f"{WORKLOADS[name].distinct(step['tokens_per_step']) * step['floor_seconds']:.2f} s",
            f"{step['vs_floor']:.2f}",
        )
        for name, step in measured_steps(parts)
    ]
    head = ("whole steps", "verlite", "TRL", "ratio", "ratio by token")
    return table((*head, "floor", "floor, prompts once", "times the floor"), rows)


def _stages(parts: dict[str, Any]) -> str:
    rows = [
        (
            name,
            *(
                f"{step['stages'][stage]:.2f} s ({step['stages'][stage] / step['seconds']:.0%})"
                for stage in STAGES
            ),
        )
        for name, step in measured_steps(parts)
    ]
    return table(("where a step's time goes", *STAGES), rows)


def _first_steps(parts: dict[str, Any]) -> str:
    rows = [
        (
            f"{name}, engine {step['engine']}",
            f"{step['seconds_to_first_step']:.0f} s",
            f"{step['trl_seconds_to_first_step']:.0f} s",
        )
        for name, step in measured_steps(parts)
    ]
    return table(("from the process's start to the end of the first step", "verlite", "TRL"), rows)


def _training(found: dict[str, Any]) -> str:
    rows = [
        (
            what,
            f"{found[f'{name}_seconds']:.2f} s",
            f"{found[f'bare_{name}_seconds']:.2f} s",
            f"{found[f'{name}_speed_vs_bare']:.2f}",
            f"{found[f'{name}_vs_floor']:.2f}",
        )
        for name, what in (("update", "one update"), ("log_prob", "one pass for log-probs"))
    ]
    return table(
        (
            "the training engine alone, w25",
            "verlite",
            "bare loop",
            "verlite's speed over the bare loop's",
            "times the floor",
        ),
        rows,
    )


def _trees(found: dict[str, Any]) -> str:
    rows = [
        (
            f"{name}: {one['words']}",
            f"{one['tokens']:,}",
            f"{one['distinct'] / one['tokens']:.2f}",
            *(f"{one[call]['vs_flat']:.2f}" for call in ("update", "log_prob")),
            f"{one['predicted']:.2f}",
            f"{one['update']['flat_seconds'] / one['update']['flat_floor']:.2f}",
            f"{one['update']['shared_seconds'] / one['update']['shared_floor']:.2f}",
        )
        for name, one in found["workloads"].items()
    ]
    return table(
        (
            "w25's model, shared over flat",
            "tokens",
            "distinct",
            "update",
            "log-probs",
            "update predicted",
            "flat update over its floor",
            "shared update over its floor",
        ),
        rows,
    )


def _generation(name: str, found: dict[str, Any]) -> str:
    speeds = found["tokens_per_s"]
    rows = [
        (
            "bare vLLM without log-probs",
            "vllm_without_log_probs",
            f"verlite with vllm: {found['vs_vllm_without_log_probs']:.2f} of this",
        ),
        ("bare vLLM", "vllm", f"verlite with vllm: {found['vs_vllm']:.2f} of this"),
        ("verlite, engine vllm", "verlite_vllm", ""),
        ("verlite, engine hf", "verlite_hf", f"{found['hf_vs_vllm']:.2f} of bare vLLM"),
    ]
    head = (
        f"generation, {name}, {found['tokens']:,} tokens, {found['rounds']} rounds",
        "tokens/s",
        "ratio",
    )
    return table(head, [(what, f"{speeds[side]:,.0f}", ratio) for what, side, ratio in rows])


def _server(name: str, found: dict[str, Any]) -> str:
    speeds, cpu = found["tokens_per_s"], found["cpu_seconds"]
    rows = [
        ("engine vllm, in the worker's process", f"{speeds['verlite_vllm']:,.0f}", ""),
        (
            "the same engine in a server",
            f"{speeds['verlite_server']:,.0f}",
            f"{found['server_vs_engine']:.2f}",
        ),
    ]
    head = (f"generation, {name}, {found['tokens']:,} tokens, {found['rounds']} rounds",)
    used = [(process, f"{seconds:.2f} s") for process, seconds in cpu.items()]
    return "\n".join(
        (
            table((*head, "tokens/s", "of the engine in the process"), rows),
            table(("processes of the server and its client", "CPU time of a round"), used),
        )
    )


def _gateway(found: dict[str, Any]) -> str:
    speeds, memory = found["tokens_per_s"], found["bytes_per_session"]
    rows = [
        (f"engine {found['engine']} alone", f"{speeds['engine']:,.0f}", ""),
        ("through the gateway", f"{speeds['gateway']:,.0f}", f"{found['vs_engine']:.2f}"),
    ]
    sessions = f"{found['sessions']} sessions of {found['turns']} turns at once"
    head = (f"{sessions}, {found['workload']}, {found['rounds']} rounds", "tokens/s", "ratio")
    ratios = ", ".join(f"{ratio:.2f}" for ratio in found["ratios"])
    used = [
        ("ratio of each round", ratios),
        ("the same ratio in CPU time of the process", f"{found['vs_engine_cpu']:.2f}"),
        ("CPU time of a request: event loop and encoder", f"{found['cpu_ms_per_request']:.1f} ms"),
        ("memory of a session before its first request", f"{memory['idle'] / 1e3:.1f} kB"),
        ("memory of a session after its last", f"{memory['full'] / 1e3:.1f} kB"),
    ]
    return "\n".join((table(head, rows), table(("the gateway", ""), used)))


def _reference(found: dict[str, Any]) -> str:
    rows = [
        ("the engine in this process", f"{found['tokens_per_s']['local']:,.0f}", ""),
        (
            "the service",
            f"{found['tokens_per_s']['service']:,.0f}",
            f"{found['service_vs_local']:.2f}",
        ),
    ]
    head = f"log-probs, {found['sequences']} sequences of {found['tokens']} tokens, float32"
    return table((head, "tokens/s", "of local"), rows)


def _sync(found: dict[str, Any]) -> str:
    names = ("export", "trainer_fingerprint", "load", "engine_fingerprint", "release")
    rows = [
        (
            f"{name}, {one['bytes'] / 1e6:.0f} MB",
            *(f"{one['parts'][part]:.3f}" for part in names),
            f"{one['seconds']:.3f}",
            f"{one['copy_seconds']:.3f}, {one['fresh_copy_seconds']:.3f}",
            f"{one['vs_memcpy']:.1f}, {one['vs_fresh_memcpy']:.1f}",
            f"{one['fingerprint_share']:.0%}",
            f"{one['parts']['probe']:.3f}",
        )
        for name, one in found["syncs"].items()
    ]
    head = (
        "weight sync, seconds",
        "publish",
        "trainer's fingerprint",
        "load",
        "engine's fingerprint",
        "release",
        "whole",
        "one copy, to used and to fresh memory",
        "times that",
        "fingerprints' share",
        "log-prob probe, not in the whole",
    )
    return table(head, rows)


def _memory(found: dict[str, Any]) -> str:
    rows = []
    for name, parts in found["shapes"].items():
        for phase in ("built", "forward", "update"):
            planned = parts["planned"][phase]
            sides = [parts[side][phase] for side in ("tensors", "process")]
            shown = [f"{size / 2**20:,.0f} ({size / planned - 1:+.1%})" for size in sides]
            rows.append((name, phase, f"{planned / 2**20:,.0f}", *shown))
    head = (
        "largest use of memory, MiB",
        "phase",
        "planned",
        "torch's allocator",
        "resident memory above the start",
    )
    return table(head, rows)


CALLS = ("ray", "nothing", "make", "take", "make_large", "take_large")


def _controller(found: dict[str, Any]) -> str:
    rows = [
        (
            workers,
            f"{one['start_seconds']:.1f} s",
            *(f"{one[f'{call}_ms']:.1f} ms" for call in CALLS),
        )
        for workers, one in found["workers"].items()
    ]
    head = (
        "workers",
        "start",
        "plain Ray call",
        "a call without a batch",
        "128 samples of 128 tokens made",
        "taken elsewhere",
        f"{found['samples']} of up to {found['longest']} made",
        "taken elsewhere",
    )
    share = (
        f", {found['dispatch_overhead_64']:.2%} of w25's step of {found['step_seconds']:.1f} s"
        if "dispatch_overhead_64" in found
        else ""
    )
    most = max(map(int, found["workers"]))
    more = [
        (
            f"the calls of one step with {most} workers",
            f"{found['calls_ms_per_step']:.0f} ms{share}",
        ),
        (
            f"through the driver for each sample of {found['mean_tokens']:.0f} tokens",
            f"{found['driver_bytes_per_sample'] / 1e3:.1f} kB",
        ),
        ("most memory of the driver", f"{found['driver_peak_bytes'] / 2**30:.2f} GiB"),
    ]
    if ranks := found.get("ranks"):
        more += [
            (
                f"driver's CPU time for the calls of one step to {ranks['ranks']:,} ranks",
                f"{ranks['driver_cpu_ms_per_step'] / 1e3:.2f} s",
            ),
            (
                f"driver's memory after them (ranks in {ranks['processes']} processes)",
                f"{ranks['driver_bytes_now'] / 2**30:.2f} GiB",
            ),
        ]
    made = [table(head, rows), table(("the controller", ""), more)]
    if all("worker_bytes" in one for one in found["workers"].values()):
        made[1:1] = [_workers(found), _projection(found["workers"])]
    return "\n".join(made)


def _long_context(found: dict[str, Any]) -> str:
    """Peak memory and time of an update by length and by what saves memory."""
    rows = []
    base = next(iter(found["means"].values()))
    for means, lengths in found["means"].items():
        for length, row in lengths.items():
            shown = ("", "", "")
            if "peak" in row:
                price = row["cpu_seconds"] / base[length]["cpu_seconds"]
                shown = (
                    f"{row['peak'] / 2**20:,.0f}",
                    f"{row['cpu_seconds']:.2f} s",
                    f"{price:.2f}",
                )
            rows.append((means, f"{int(length):,}", f"{row['planned'] / 2**20:,.0f}", *shown))
    head = (
        "an update with one sequence",
        "tokens",
        "MiB planned",
        "MiB, torch's allocator",
        "CPU time of rank 0",
        "of the default's",
    )
    return table(head, rows)


def _driver(found: dict[str, Any]) -> str:
    """The driver's own work for one step, before and after what the page tells of."""
    groups = {
        "division among the ranks": ("balance",),
        "messages": ("split", "count bytes", "write", "read", "join"),
    }
    rows = []
    for row in found["rows"]:
        for which in ("before", "now"):
            if which not in row:
                continue
            one = row[which]
            shown = [sum(one["seconds"][name] for name in names) for names in groups.values()]
            shown += [one["total"] - sum(shown), one["total"]]
            rows.append(
                (
                    f"{row['samples']:,}",
                    f"{row['ranks']:,}",
                    which,
                    *(f"{seconds:.2f} s" for seconds in shown),
                    f"{one['total'] / 60:.1%}",
                    f"{one['peak_bytes'] / 2**30:.2f} GiB",
                )
            )
    head = ("samples", "ranks", "", *groups, "the rest", "CPU time", "of 60 s", "memory")
    return table(head, rows)


def _projection(workers: dict[str, dict[str, float]]) -> str:
    """The driver's costs on the line through the fewest and the most workers."""
    few, many = min(workers, key=int), max(workers, key=int)
    names = {
        "start_driver_cpu": ("CPU time for the start", 1, "s"),
        "nothing_driver_cpu_ms": ("CPU time for a call without a batch", 1, "ms"),
        "make_driver_cpu_ms": ("CPU time for a call that makes samples", 1, "ms"),
        "take_driver_cpu_ms": ("CPU time for a call that takes samples", 1, "ms"),
        "driver_bytes_now": ("memory", 2**20, "MiB"),
    }
    rows = []
    for key, (name, unit, suffix) in names.items():
        low, high = workers[few][key] / unit, workers[many][key] / unit
        each = (high - low) / (int(many) - int(few))
        projected = high + (1000 - int(many)) * each
        rows.append((name, f"{each:.3g} {suffix}", f"{projected:,.0f} {suffix}"))
    head = ("the driver's", f"for each worker, between {few} and {many}", "on that line, 1,000")
    return table(head, rows)


def _starts(found: dict[str, Any]) -> str:
    """What workers cost that are started in both ways, and the ratio."""
    forks, new = found["forks"], found["new_processes"]
    rows = [
        (
            name,
            f"{new[key] / unit:.1f} {suffix}",
            f"{forks[key] / unit:.1f} {suffix}",
            f"{forks[key] / new[key]:.2f}",
        )
        for name, key, unit, suffix in (
            ("until all are ready", "start_seconds", 1, "s"),
            ("CPU time of all, and of the process that is forked", "start_cpu", 1, "s"),
            ("CPU time of one worker", "start_worker_cpu", 1, "s"),
            ("memory of its own, one worker", "worker_bytes", 2**20, "MiB"),
            ("CPU time of the driver", "start_driver_cpu", 1, "s"),
        )
    ]
    head = (f"start of {found['workers']} workers", "new processes", "forks", "ratio")
    return table(head, rows)


def _workers(found: dict[str, Any]) -> str:
    """What workers and driver cost, by the number of workers."""
    head = (
        "workers, forks of one process",
        "start",
        "CPU time of a worker's start",
        "memory of its own",
        "driver's CPU time for a call without a batch",
        "128 samples made",
        "taken",
        "driver's memory",
    )
    rows = [
        (
            workers,
            f"{one['start_seconds']:.1f} s",
            f"{one['start_worker_cpu']:.1f} s",
            f"{one['worker_bytes'] / 2**20:.0f} MiB",
            *(f"{one[f'{call}_driver_cpu_ms']:.1f} ms" for call in ("nothing", "make", "take")),
            f"{one['driver_bytes_now'] / 2**30:.2f} GiB",
        )
        for workers, one in found["workers"].items()
    ]
    return table(head, rows)


def _startup(found: dict[str, Any]) -> str:
    engines = [name for name in ("hf", "vllm") if name in found]
    before = found.get("before", {})

    def row(text: str, key: str) -> tuple[str, ...]:
        return (text, *(_before(before.get(e, {}).get(key), found[e][key], 1) for e in engines))

    rows = [
        (part, *(f"{found[engine]['parts'][part]:.1f} s" for engine in engines))
        for part in found[engines[0]]["parts"]
    ]
    rows.append(row("to the end of the first step", "seconds"))
    rows.append(row("the same with empty caches", "seconds_at_first"))
    return table(("starting, wtiny", *(f"engine {engine}" for engine in engines)), rows)


def _commands(found: dict[str, Any]) -> str:
    before = found["cpu_seconds"].get("before", {})
    rows = [
        (name, _before(before.get(name), seconds, 2))
        for name, seconds in found["cpu_seconds"]["now"].items()
    ]
    return table(("command", "CPU"), rows)


def _before(before: float | None, now: float, digits: int) -> str:
    """Return seconds, after those of the commit before if they are known."""
    shown = f"{now:.{digits}f} s"
    return shown if before is None else f"{before:.{digits}f} -> {shown}"


def _watchers(found: dict[str, Any]) -> str:
    own = f"{1000 * found['watchers_seconds']:.1f} ms"
    rows = [
        ("seconds", f"{found['seconds']:.2f} s", own, f"{found['of_seconds']:.2%}"),
        (
            "CPU time of all processes",
            f"{found['cpu_seconds']:.2f} s",
            own,
            f"{found['of_cpu']:.2%}",
        ),
    ]
    head = (
        f"a step of wtiny, mean of {found['steps']}",
        "all",
        "CPU time of heartbeats and watchers",
        "share",
    )
    return table(head, rows)


def _neighbors(found: dict[str, Any]) -> str:
    rows = [
        (
            f"{row['neighbors']}",
            f"{row['spins']:,}",
            f"{row['seconds']:.2f} s",
            f"{row['slower']:.1f}",
            f"{row['others']:.2f}" if "others" in row else "not counted",
        )
        for row in sorted(found["rows"], key=lambda row: (row["neighbors"], -row["spins"]))
    ]
    return table(
        (
            "busy neighbors",
            "rounds that a thread spins",
            "step",
            "against alone",
            "cores that other processes used",
        ),
        rows,
    )


def _overlap(found: dict[str, Any]) -> str:
    rows = [
        (
            row["mode"],
            f"{row['seconds']:.2f} s",
            f"{row['speed']:.2f}",
            f"{row['waits']:.0%}",
            f"{row['age']:.2f}",
            f"{row['response_length']:.1f}",
            f"{row['simulated']:.2f} s" if "simulated" in row else "-",
        )
        for row in found["rows"]
    ]
    head = ("mode", "step", "speed", "share of waiting", "mean age", "tokens of a response",
            "simulated from sync")  # fmt: skip
    return table(head, rows)


def _data(found: dict[str, Any]) -> str:
    rows = [
        (
            "read, turned into verl's rows and written as parquet",
            f"{found['preprocess_rows_per_s']:,.0f}",
        ),
        (
            "read, checked, put through the template, tokenized and measured",
            f"{found['load_rows_per_s']:,.0f}",
        ),
    ]
    return table((f"{found['rows']:,} rows, {found['repeated']} repeated", "rows/s"), rows)


def _retriever(found: dict[str, Any]) -> str:
    rows = [
        ("build, until it answers", f"{found['built_seconds']:.1f} s"),
        ("load, until it answers", f"{found['loaded_seconds']:.1f} s"),
        ("64 queries in a request, one client", f"{found['queries_per_s']:,.0f} queries/s"),
        ("one query in a request, 8 clients", f"{found['single_queries_per_s']:,.0f} queries/s"),
        ("peak memory", f"{found['peak_mib']:,.0f} MiB"),
    ]
    return table((f"the retriever, {found['passages']:,} passages", ""), rows)


def _reward(found: dict[str, Any]) -> str:
    names = {
        "local": "local processes, 1,000 answers",
        "one_request": "the service, 1,000 answers in one request",
        "clients": "the service, 64 clients at once, 16 answers each",
        "training": "the service, by the training client: 1,000 answers, 64 in a request",
    }
    rows = []
    for name, words in names.items():
        ratio = found.get(f"{name}_vs_local")
        shown = "" if ratio is None else f"{ratio:.2f}"
        rows.append((words, f"{found[f'{name}_per_s']:,.0f}", shown))
    return table(("rewards of mathematics", "answers/s", "of local"), rows)


def _gpu(found: dict[str, Any]) -> str:
    lines = []
    for part, measured in found.items():
        for name, row in measured["rows"].items():
            if "seconds" not in row or name == "process":
                continue
            shown = [f"{row['seconds']:.3f} s"]
            shown.append(f"{row['tokens_per_s']:,.0f}" if "tokens_per_s" in row else "")
            shown.append(f"{row['mfu']:.1%}" if "mfu" in row else "")
            shown.append(f"{row['peak_gib']:.1f}")
            lines.append((part.removeprefix("gpu_"), name, *shown, measured["date"]))
    return table(("part", "", "seconds", "tokens/s", "MFU", "peak GiB", "date"), lines)


def _operators(found: dict[str, Any]) -> str:
    """What an update needs on a GPU, predicted from its operators."""
    rows = []
    for name, row in found["rows"].items():
        model, tokens, variant = name.split(", ")
        shown = (f"{row['kernels']:,}", f"{row['tflop']:,.0f}", f"{row['gb']:,.0f}")
        time = (f"{row['ms']:,.0f} ms", f"{row['mfu']:.1%}", f"{row['peak_gib']:.1f}")
        rows.append((model, tokens, variant, *shown, *time))
    head = ("", "tokens", f"predicted for an {found['card']}", "kernels", "TFLOP", "GB moved")
    return table((*head, "an update", "MFU", "planned peak, GiB"), rows)


def _library(found: dict[str, Any]) -> str:
    return table(
        ("functions in one process, and two workers", "milliseconds"),
        [(name, f"{taken:.1f}") for name, taken in found["milliseconds"].items()],
    )


def _sft(found: dict[str, Any]) -> str:
    names = {"verlite": "main_sft", "loop": "plain loop", "trl": "TRL's SFTTrainer"}
    rows = [
        (
            names[name],
            f"{seconds:.2f} s",
            f"{found['ratios'][name]:.2f}" if name in found["ratios"] else "",
            f"{found['first_losses'][name]:.5f}",
        )
        for name, seconds in found["seconds"].items()
    ]
    head = (
        f"a step, w25, {found['examples']} examples, {found['tokens']:.0f} tokens",
        "median",
        "main_sft's seconds over these",
        "first loss",
    )
    return table(head, rows)


_TABLES: dict[str, Callable[[dict[str, Any]], str]] = {
    "training": _training,
    "trees": _trees,
    "sft": _sft,
    "sync": _sync,
    "memory": _memory,
    "controller": _controller,
    "driver": _driver,
    "long_context": _long_context,
    "controller_starts": _starts,
    "startup": _startup,
    "commands": _commands,
    "watchers": _watchers,
    "overlap": _overlap,
    "neighbors_wtiny": _neighbors,
    "neighbors_w25": _neighbors,
    "neighbors_quickstart": _neighbors,
    "data": _data,
    "retriever": _retriever,
    "reward": _reward,
    "reference": _reference,
    "gateway_vllm": _gateway,
    "library": _library,
    "operators": _operators,
}
