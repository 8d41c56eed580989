"""The preflight: all that is checked before a run starts, as one list.

`walk` runs it. main_ppo, main_sft and main_dpo end with the first problem; `verlite check` goes on
and notes every one. Nothing else calls these functions.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verlite.spec.catalog import load
from verlite.trainer.checkpoints import Checkpoint, CheckpointError
from verlite.trainer.errors import REFUSED, AlreadyComplete, HubMissing, ServiceMissing

RL, SFT, DPO = "rl", "sft", "dpo"
TUNING = (SFT, DPO)
ALL = (RL, *TUNING)
SPLITS = ("train", "val")
ROWS = 1000
"""Rows of each file that `verlite check` reads and tokenizes."""

DIRECTORY = "directory"
"""Before the run's log begins."""
FILES = "files"
"""Without torch. main_ppo then starts Ray, unless it joins an existing cluster."""
LIBRARIES = "libraries"
"""With torch and transformers. No cluster is joined and no worker is built before its end."""
PHASES = (DIRECTORY, FILES, LIBRARIES)

DATA, MODEL, CODE, SERVICES, CLUSTER = "data", "model", "own code", "services", "cluster"


@dataclass(frozen=True)
class Check:
    """One row of the list."""

    name: str
    """With {split}, the row stands for one check of the training and one of the validation data."""
    function: str
    """Takes a Preflight, and the split if the row has one. Raises what is in REFUSED, adds
    warnings, and keeps what the run needs."""
    phase: str
    commands: tuple[str, ...] = ALL
    needs: tuple[str, ...] = ()
    """What it reads or asks."""
    uses: tuple[str, ...] = ()
    """Checks whose results it uses. `verlite check` leaves it out if one of them failed."""


def _checks_of(module: str, commands: tuple[str, ...]) -> Callable[..., Check]:
    """Return what makes checks of these commands, whose functions are in one module."""

    def check(name: str, function: str, phase: str, **uses: tuple[str, ...]) -> Check:
        return Check(name, f"{module}:{function}", phase, commands, **uses)

    return check


_rl = _checks_of("verlite.trainer.checks", (RL,))
_common = _checks_of("verlite.trainer.common_checks", ALL)
_tuning = _checks_of("verlite.sft.checks", TUNING)
CHECKS = (
    _common("run directory", "run_directory", DIRECTORY),
    _common("checkpoint", "checkpoint", FILES, needs=(DATA, MODEL, CODE)),
    _rl("{split} rows", "rows", FILES, needs=(DATA, CODE)),
    _tuning("{split} rows", "rows", FILES, needs=(DATA,)),
    _tuning("order", "order", FILES, uses=("train rows",)),
    _rl(
        "reward function",
        "reward_function",
        FILES,
        needs=(CODE, SERVICES),
        uses=("train rows", "val rows"),
    ),
    Check("disk space", "verlite.trainer.disk:disk_space", FILES, (RL,), uses=("train rows",)),
    _rl("tools", "tools", FILES, needs=(CODE, SERVICES)),
    _rl("verifiers", "verifiers_environment", FILES, needs=(CODE,)),
    _rl("imports of agents", "agent_imports", FILES, needs=(CODE,)),
    _rl("reference service", "reference_service", FILES, needs=(SERVICES,)),
    _rl("teacher service", "teacher_service", FILES, needs=(SERVICES,)),
    _rl("generation servers", "generation_servers", FILES, needs=(SERVICES,)),
    _rl("Ray cluster", "ray_cluster", FILES, needs=(CLUSTER,)),
    _rl("estimator", "estimator", LIBRARIES, needs=(CODE,)),
    _rl("policy loss", "policy_loss", LIBRARIES, needs=(CODE,)),
    _common("model configuration", "model_configuration", LIBRARIES, needs=(MODEL,)),
    _rl("positions", "positions", LIBRARIES, uses=("model configuration",)),
    _common("tokenizer", "tokenizer", LIBRARIES, needs=(MODEL,)),
    _rl(
        "reference model",
        "reference_model",
        LIBRARIES,
        uses=("reference service", "model configuration"),
    ),
    _rl(
        "teacher",
        "teacher",
        LIBRARIES,
        needs=(MODEL,),
        uses=("teacher service", "model configuration", "tokenizer"),
    ),
    _common("trainable model", "trainable_model", LIBRARIES, needs=(MODEL,)),
    _common("adapters", "adapters", LIBRARIES, needs=(MODEL,), uses=("trainable model",)),
    _rl("trainable critic", "trainable_critic", LIBRARIES, needs=(MODEL,)),
    _rl("environment", "environment", LIBRARIES, needs=(CODE,), uses=("tokenizer",)),
    _rl("{split} prompts", "prompts", LIBRARIES, uses=("{split} rows", "tokenizer", "environment")),
    _tuning("{split} examples", "examples", LIBRARIES, uses=("{split} rows", "tokenizer")),
    _tuning("room for {split} rows", "room", LIBRARIES, uses=("{split} examples",)),
    _tuning(
        "positions of {split} tokens",
        "positions",
        LIBRARIES,
        uses=("{split} examples", "model configuration"),
    ),
    _rl("{split} tokens", "tokens", LIBRARIES, uses=("{split} prompts", "model configuration")),
    _tuning(
        "{split} tokens", "tokens", LIBRARIES, uses=("{split} examples", "model configuration")
    ),
    _rl("order", "order", LIBRARIES, needs=(CODE,), uses=("train prompts",)),
    _common("position", "position", LIBRARIES, uses=("checkpoint", "order")),
    _common("steps left", "steps_left", LIBRARIES, uses=("checkpoint", "order")),
)
"""In the order of the walk: cheap checks first, and each one after those that it uses."""


@dataclass
class Findings:
    """What was found, as sentences that may lack the period."""

    seen: list[str] = field(default_factory=list)
    """What the data look like."""
    warnings: list[str] = field(default_factory=list)
    """What a run warns about, and what could not be tried here."""
    missing: list[str] = field(default_factory=list)
    """What does not answer now. A run would not start until it does."""
    errors: list[str] = field(default_factory=list)
    """Why a run would be refused, in its own words."""

    def add(self, error: Exception) -> None:
        """Add what a run would end with."""
        if isinstance(error, AlreadyComplete):
            self.warnings.append(str(error))
        elif isinstance(error, ServiceMissing):
            self.missing.append(f"{error}. A run does not begin until then")
        elif str(error) not in self.errors:  # several checks load one model
            self.errors.append(str(error))

    def verdict(self, has_notes: bool = False) -> str:
        """Return the last line that `verlite check` prints if there are no errors."""
        if self.missing:
            return "The configuration is fine, but a run would not start now. See the notes above."
        if self.warnings or has_notes:
            return "The configuration is fine. See the notes above."
        return "The configuration is fine."


@dataclass
class Preflight:
    """What the checks of one command are given, and what they have found for the run."""

    command: str
    """RL, SFT or DPO."""
    config: Any
    """The whole configuration, with absolute paths."""
    run_dir: Path
    model: Any
    """The section of the model to train."""
    section: str
    """What stands before `model.` in its keys."""
    settings: Callable[[], dict[str, Any]]
    """The settings that must not change on resume."""
    first: int | None = None
    """Rows of each file that are read. None: all, for a run. Else nothing is written."""
    plan: Any = None
    """The plan of RL training."""
    task: Any = None
    """The task of SFT or DPO."""
    code: Callable[[], dict[str, str]] = dict
    """The digests of the user's own files."""
    exports: bool = True
    """Whether the run ends with an export of the model."""
    validates_only: bool = False
    is_first: bool = True
    """Whether this is the first of several processes, which writes."""
    say: Callable[[str], None] = print
    """Say at once what the run waits for."""
    warn: Callable[[str], None] | None = None
    """Show a warning as soon as its check has ended, also if it failed. None: the findings keep
    all."""
    on_first_rank: Callable[[Callable[[], Any]], Any] = lambda call: call()
    """Call a function on the first of several processes, and return its result on all."""

    findings: Findings = field(default_factory=Findings)
    lock: Any = None
    """The locked file in the run directory."""
    checkpoint: Checkpoint | None = None
    """The checkpoint to resume from. None: start from the beginning."""
    state: dict[str, Any] = field(default_factory=lambda: {"step": 0})
    """The driver's part of it."""
    rows: dict[str, Any] = field(default_factory=dict)
    """Split -> the rows of its files."""
    service: Any = None
    """Model of the reference service (ModelInfo). None: the run has none."""
    teacher_service: Any = None
    """Likewise of the service with the teacher."""
    ray_address: str | None = None
    """The Ray cluster to join. None: start one."""
    described: Any = None
    """The model's config.json, as transformers loads it."""
    tokenizer: Any = None
    env_factory: Any = None
    """Environment of multi-turn samples. None for single-turn runs."""
    data: dict[str, Any] = field(default_factory=dict)
    """Split -> its prompts (RL) or examples, as token ids."""
    sampler: Any = None
    """The order of the training rows."""
    is_whole: bool = True
    """Whether the sampler knows all rows of the run."""
    total_steps: int | None = None
    """Steps of the whole run. None: more rows must be read to know it."""
    failed: set[str] = field(default_factory=set)
    """Names of checks that failed or were left out."""

    @property
    def is_run(self) -> bool:
        return self.first is None


def walk(found: Preflight, *phases: str, without: str = "") -> None:
    """Run the checks of these phases. `without`: leaves out those that need this.

    Raises:
        REFUSED, AlreadyComplete, CheckpointError: of the first check that fails, in a run. For
            `verlite check` the findings have all of them.
    """
    unreachable: dict[str, list[str]] = {}
    for check in CHECKS:
        if check.phase not in phases or found.command not in check.commands:
            continue
        for split in SPLITS if "{split}" in check.name else ("",):
            name = check.name.format(split=split)
            uses = {used.format(split=split) for used in check.uses}
            if uses & found.failed or (without and without in check.needs):
                found.failed.add(name)
                continue
            try:
                load(check.function)(*((found, split) if split else (found,)))
            except (*REFUSED, AlreadyComplete, CheckpointError) as error:
                if found.is_run:
                    raise
                found.failed.add(name)
                if isinstance(error, HubMissing):
                    unreachable.setdefault(str(error), []).append(name)
                else:
                    found.findings.add(error)
            finally:
                while found.warn is not None and found.findings.warnings:
                    found.warn(found.findings.warnings.pop(0))
    for reason, names in unreachable.items():
        found.findings.warnings.append(
            f"{reason}. So {', '.join(names)} and what uses them were not tried"
        )
