"""What happens next: one state machine for a run, from its first signal handler to its exit code.

An event is a method of `Machine`, which takes the time, in seconds of a clock that never goes back,
and what is known of the event. It returns commands and does nothing else: it reads no clock, starts
no thread, knows no process and no file. The shell (`trainer.stop.Stop` for the process,
`trainer.run.Run` and `sft.run.Run` for the loop) tells it what happened and does what it says. Of
the commands that it returns at most one says what the loop does next, and that is the last one.
"""

from dataclasses import dataclass

from verlite.control import limits
from verlite.control.commands import (
    BeginStep,
    CheckHealth,
    Command,
    Do,
    EndProcess,
    Exit,
    Fail,
    Say,
    WallTimeOver,
    Warn,
)
from verlite.control.exit_codes import DONE, INTERRUPTED, STOPPED
from verlite.control.patience import GIVEN_UP, INTERRUPT, Patience, Phase
from verlite.control.policy import Policy


@dataclass(frozen=True)
class Outage:
    """A service failed more samples than its max_error_rate allows."""

    service: str
    """What has to recover, in words."""
    lost: str
    """How many samples lost what, in words."""
    limit_s: float
    """How long to wait."""


class Machine:
    """Decides stops, deadlines, validations, saves, restarts, waits and the exit code of a run.

    Attributes:
        phase: where the run is. `START` until `step_wanted`.
        step: the current step, from 1, or the last finished one; 0 before the first.
        resumed_step: step of the checkpoint that this process resumed from; 0 without one.
        finished: the last step whose updates are done.
        saved_step: the newest checkpoint in the run directory.
        requested: name of the first signal, or what else asked for the stop, or None.
        code: the exit code once it is decided.
        restarts: rollout engines that were started again in this step.
    """

    def __init__(self) -> None:
        self.policy = Policy()
        self.phase = Phase.START
        self.step = self.resumed_step = self.finished = self.saved_step = 0
        self.requested: str | None = None
        self.code: int | None = None
        self.restarts = 0
        self.patience = Patience()
        self._step_s = self._save_s = 0.0  # the longest so far
        self._base = Phase.START  # the phase without RESTART and RESYNC
        self._samples_fail = False  # whether the step's first death was the engine's own failure
        self._is_first_death = True
        self._failed_saves = 0
        self._first_failed_save = 0.0
        self._outage: Outage | None = None
        self._outage_began = 0.0
        self._resamples = 0

    @property
    def must_save(self) -> bool:
        """Whether a stop waits: a finished step has no checkpoint yet, or the loop never gives up
        a step."""
        if not self.policy.gives_up:
            return self.phase is not Phase.START
        return self.finished > max(self.saved_step, self.resumed_step)

    @property
    def exit_code(self) -> int:
        """The decided exit code, or that of a process that was asked to stop."""
        if self.code is not None:
            return self.code
        return INTERRUPTED if self.requested in (INTERRUPT, None) else STOPPED

    # The loop

    def begins(
        self,
        now: float,
        policy: Policy,
        step: int = 0,
        saved: int = 0,
        longest: tuple[float, float] = (0.0, 0.0),
    ) -> list[Command]:
        """The run is built.

        Args:
            step: of the checkpoint that it resumes from, 0 without one.
            saved: the newest checkpoint in the run directory; 0 if there is none there.
            longest: seconds of the longest of the last steps, and of their saves, of earlier runs
                in the directory; 0 if there was none.
        """
        self.policy = policy
        self.step = self.resumed_step = self.finished = step
        self.saved_step = saved
        self._step_s, self._save_s = longest
        return []

    def started(self, now: float) -> list[Command]:
        """The engines have their first weights. -> VALIDATE or nothing"""
        wanted = self.policy.validates_first and (not self.resumed_step or self.policy.val_only)
        return [Do.VALIDATE] if wanted else []

    def step_wanted(self, now: float) -> list[Command]:
        """Nothing of the last step is left to do. -> BeginStep or END_LOOP"""
        commands: list[Command] = []
        self._enter(Phase.IDLE)
        if self.step < self.policy.total_steps and not self.policy.val_only:
            commands = self._look_at_time(now)
            if self.requested is None:
                self.step += 1
                self.restarts = self._resamples = 0
                self._is_first_death = True
                self._enter(Phase.SAMPLE if self.policy.gives_up else Phase.UPDATE)
                return [BeginStep(self.step)]
        self._enter(Phase.END)
        return [*commands, Do.END_LOOP]

    def stopped_elsewhere(self, now: float) -> list[Command]:
        """The step that was to begin does not, because another rank was asked to stop."""
        self.step -= 1
        self._enter(Phase.END)
        return []

    def update_begins(self, now: float) -> list[Command]:
        """An update comes next, which cannot be undone. -> nothing or GIVE_UP"""
        commands = self.polled(now)
        if not commands:
            self._enter(Phase.UPDATE)
        return commands

    def step_finished(self, now: float) -> list[Command]:
        """All updates of the step are done."""
        self.finished = self.step
        self._enter(Phase.FINISH)
        return []

    def step_measured(self, now: float) -> list[Command]:
        """The metrics of a finished step are computed. -> VALIDATE, SAVE or nothing"""
        if not self.policy.validates(self.step):
            return self._save_if_due()
        commands = self._look_at_time(now) if self.policy.gives_up else []
        if self.policy.gives_up and self.requested is not None:
            return [*commands, Do.END_ENGINES, self._validation_given_up(), *self._save_if_due()]
        self._enter(Phase.VALIDATE)
        return [Do.VALIDATE]

    def validated(self, now: float) -> list[Command]:
        """The validation has ended or was given up. -> SAVE or nothing"""
        self._enter(Phase.FINISH)
        return self._save_if_due()

    def _validation_given_up(self) -> Say:
        return Say(f"{self.requested}: the validation of step {self.step} was given up")

    def _save_if_due(self) -> list[Command]:
        stops = self.policy.gives_up and self.requested is not None
        if not stops and not self.policy.saves(self.step):
            return []
        self._enter(Phase.SAVE)
        return [Do.SAVE]

    def saved(self, now: float) -> list[Command]:
        """A checkpoint of the step is complete. -> nothing; after the loop Exit"""
        self.saved_step = self.step
        self._failed_saves = 0
        return self._after_save([Exit(STOPPED)])

    def save_failed(self, now: float, error: str) -> list[Command]:
        """The checkpoint could not be written. -> nothing or Fail"""
        if not self._failed_saves:
            self._first_failed_save = now
        self._failed_saves += 1
        limit = self.policy.max_failed_saves
        last = self.step >= self.policy.total_steps  # there is no later save
        is_early = now - self._first_failed_save < limits.FAILED_SAVES_S and limit > 1 and not last
        if self._failed_saves >= limit and not is_early:
            return [Fail()]
        text = (
            f"{error} Failed saves in a row: {self._failed_saves}; the run stops at "
            f"{self.policy.failed_saves_key}{limit}, but not within {limits.FAILED_SAVES_S:g} s of "
            "the first"
        )
        end = f"stopped by {self.by} after step {self.step}, whose checkpoint could not be written"
        return [Warn(text), *self._after_save([Fail(end)])]

    def _after_save(self, at_end: list[Command]) -> list[Command]:
        """Go on after a save in the loop; return `at_end` after one that ends the run."""
        if self._base is Phase.SAVE:
            self._enter(Phase.FINISH)
            return []
        return at_end

    def step_ends(self, now: float, step_s: float, save_s: float = 0.0) -> list[Command]:
        """The step is logged. What it took, in seconds; `save_s` is 0 without a save."""
        self._step_s = max(self._step_s, step_s)
        self._save_s = max(self._save_s, save_s)
        self._enter(Phase.IDLE)
        return []

    @property
    def by(self) -> str:
        """What stopped the run."""
        return self.requested or "a signal to another rank"

    def loop_ends(self, now: float) -> list[Command]:
        """No step follows. -> SAVE, EXPORT or Exit"""
        policy = self.policy
        self._enter(Phase.END)
        stops = policy.gives_up and self.requested is not None
        if stops or (self.step < policy.total_steps and not policy.val_only):
            return [Do.SAVE] if self.step > self.saved_step else [Exit(STOPPED)]
        exports = policy.exports and self.step and not policy.val_only
        return [Do.EXPORT] if exports else [Exit(DONE)]

    def exported(self, now: float) -> list[Command]:
        """The model is exported. -> Exit"""
        return [Exit(DONE)]

    def _enter(self, phase: Phase) -> None:
        self.phase = self._base = phase

    # Engines and services

    def engines_died(
        self, now: float, count: int, names: str, cause: str, fails_on_samples: bool = False
    ) -> list[Command]:
        """Rollout engines died; all other calls are answered. -> RESTART, GIVE_UP or Fail

        Args:
            cause: one line, without a period.
            fails_on_samples: whether the engine itself failed: if it fails again, the samples are
                the reason.
        """
        if self._is_first_death:
            self._is_first_death, self._samples_fail = False, fails_on_samples
        self.phase = Phase.RESTART
        commands = self.polled(now)
        if commands:
            return commands
        limit = self.policy.max_restarts
        if self.restarts + count > limit:
            return [self._no_restart(f"at most {limit} are started again")]
        self.restarts += count
        text = (
            f"{cause}. Starting again: {names} ({self.restarts} of "
            f"actor_rollout_ref.rollout.max_restarts={limit} in this step)"
        )
        return [Warn(text), Do.RESTART]

    def restart_failed(self, now: float, error: str) -> list[Command]:
        """No new engine runs. -> Fail"""
        return [self._no_restart(f"a new engine could not be started: {error}")]

    def _no_restart(self, reason: str) -> Fail:
        more = (
            f"{self.restarts} rollout engines were started again in step {self.step}, and {reason} "
            "(actor_rollout_ref.rollout.max_restarts)"
        )
        # Otherwise the same samples have failed in several processes.
        return Fail(more, may_pass=not (self._samples_fail and self.restarts))

    def engines_restarted(self, now: float) -> list[Command]:
        """The new engines run, without weights."""
        repeats = self._base in (Phase.SAMPLE, Phase.VALIDATE)
        self.phase = Phase.RESYNC if repeats else self._base
        return []

    def weights_given(self, now: float) -> list[Command]:
        """All engines have the weights again, and the interrupted call is repeated."""
        self.phase = self._base
        return []

    def answered(self, now: float, outage: Outage | None = None) -> list[Command]:
        """A generation was answered. -> nothing (use the answers) or CheckHealth"""
        self._outage = outage
        if outage is None or self._resamples >= limits.MAX_RESAMPLES:
            self._resamples = 0
            return []
        self._outage_began = now
        text = f"{outage.lost}; waiting up to {outage.limit_s:g} s for the {outage.service}"
        return [Warn(text), CheckHealth()]

    def health(self, now: float, is_broken: bool) -> list[Command]:
        """The service was asked. -> CheckHealth, RESAMPLE or nothing (use the answers)"""
        outage = self._outage
        assert outage is not None
        waited = now - self._outage_began
        left = outage.limit_s - waited
        if not is_broken:
            self._resamples += 1
            text = (
                f"the {outage.service} recovered after {waited:.0f} s; sampling the step's prompts "
                "again"
            )
            return [Say(text), Do.RESAMPLE]
        if left < limits.SHORTEST_WAIT_S:
            self._resamples = 0
            return []
        return [CheckHealth(min(limits.HEALTH_EVERY_S, left))]

    # Stops

    def polled(self, now: float) -> list[Command]:
        """The main thread waits for workers, and may give that up. -> nothing or GIVE_UP"""
        commands = self._look_at_time(now)
        stops = bool(commands) or self.requested is not None
        if stops and self.policy.gives_up and self.phase in GIVEN_UP:
            commands += self._give_up()
        return commands

    def _give_up(self) -> list[Command]:
        """Give up the phase: what it did is lost, and nothing else."""
        if self._base is Phase.SAMPLE:
            self.step -= 1
            self._enter(Phase.END)
            return [Do.GIVE_UP]
        if self._base is Phase.VALIDATE:
            self._enter(Phase.FINISH)
            return [self._validation_given_up(), Do.GIVE_UP]
        self.phase = self._base
        end = f"no engine is started again; the run saves step {self.step} and stops"
        return [Say(f"{self.requested}: {end}"), Do.GIVE_UP]

    def _look_at_time(self, now: float) -> list[Command]:
        """Ask for a stop if only the time to save and to end is left; between steps, also if it is
        too short for another step."""
        if self.policy.deadline is None or self.requested is not None:
            return []
        needed = limits.SLOWER * (self._save_s or limits.UNKNOWN_SAVE_S)
        needed += limits.LEAVE_S + limits.SPARE_S
        if self.phase is Phase.IDLE:
            needed += limits.SLOWER * self._step_s
        if self.policy.deadline - now >= needed:
            return []
        key = f"trainer.max_runtime={self.policy.max_runtime}"
        commands = [WallTimeOver(key), *self.asked(now, key)]
        self.patience.first = key  # the main thread will not obey a signal that it learns of later
        return commands

    def asked(self, now: float, name: str) -> list[Command]:
        """The main thread learns of a request to stop: the name of a signal, or what else asks."""
        if self.requested is not None or self.code is not None:
            return []
        self.requested = name
        self.patience.begin(name, now)
        if name == INTERRUPT or not self.must_save:
            return [Do.INTERRUPT]
        return [Say(f"{name}: {self._what_follows()}")]

    def _what_follows(self) -> str:
        if not self.policy.gives_up and self.step >= self.policy.total_steps:
            return f"the run ends with step {self.step}, its last, as it would without a stop"
        if self._base is Phase.UPDATE:
            return f"the run finishes step {self.step}, saves it, and stops"
        if self.finished > self.saved_step:
            return f"step {self.finished} is not saved yet; the run stops once it is"
        return f"the run stops after step {self.finished}"

    def signal(self, now: float, name: str) -> list[Command]:
        """A signal has reached the process, whatever the main thread does."""
        counts = self.patience.signal(name, now)
        return self._look(name if counts else None, now)

    def watched(self, now: float) -> list[Command]:
        """Time has passed since a stop was requested, or the exit code decided."""
        return self._look(None, now)

    def _look(self, signal: str | None, now: float) -> list[Command]:
        decided = self.code is not None
        saves = not decided and self.patience.first != INTERRUPT and self.must_save
        found = self.patience.look(signal, now, saves, decided, self.policy.stop_grace_s)
        if found is None:
            return []
        if not isinstance(found, str):
            return [found]
        if self.requested is None:  # the main thread ran no handler
            self.requested = self.patience.first
        self.code = self.exit_code
        return [EndProcess(self.code, found, decided)]

    # The end

    def ended(self, now: float, code: int | None = None) -> list[Command]:
        """The run has ended. `code`: its exit code; None: that of the stop which ended it."""
        if self.code is not None:
            return []
        self.code = self.exit_code if code is None else code
        self.patience.leave(limits.END_S if code is None else limits.LEAVE_S, now)
        return [Do.DECIDED]
