"""What happens next: one state machine for a run, from its first signal handler to its exit code.

`Machine.handle(event, now)` returns commands and does nothing else: it reads no clock, starts no
thread, knows no process and no file. The shell (`controller.stop.Stop` for the process,
`trainer.run.Run` and `sft.run.Run` for the loop) tells it what happened and does what it says. Of
the commands that it returns at most one says what the loop does next, and that is the last one.
"""

from collections.abc import Callable
from typing import Any

from verlite.control import events as e
from verlite.control import limits
from verlite.control.exit_codes import DONE, INTERRUPTED, STOPPED
from verlite.control.patience import GIVEN_UP, INTERRUPT, Patience, Phase
from verlite.control.policy import Policy


class Machine:
    """Decides stops, deadlines, validations, saves, restarts, waits and the exit code of a run.

    Attributes:
        phase: where the run is. `START` until `StepWanted`.
        step: the current step, from 1, or the last finished one; 0 before the first.
        resumed: step of the checkpoint that this process resumed from; 0 without one.
        finished: the last step whose updates are done.
        saved: the newest checkpoint in the run directory.
        requested: name of the first signal, or what else asked for the stop, or None.
        code: the exit code once it is decided.
        restarts: rollout engines that were started again in this step.
    """

    def __init__(self) -> None:
        self.policy = Policy()
        self.phase = Phase.START
        self.step = self.resumed = self.finished = self.saved = 0
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
        self._outage: e.Outage | None = None
        self._outage_began = 0.0
        self._resamples = 0
        self._handlers: dict[type[Any], Callable[[Any, float], list[e.Command]]] = {
            e.Begins: self._begins,
            e.Started: self._started,
            e.StepWanted: self._step_wanted,
            e.StoppedElsewhere: self._stopped_elsewhere,
            e.UpdateBegins: self._update_begins,
            e.StepFinished: self._step_finished,
            e.StepMeasured: self._step_measured,
            e.Validated: self._validated,
            e.Saved: self._saved,
            e.SaveFailed: self._save_failed,
            e.StepEnds: self._step_ends,
            e.LoopEnds: self._loop_ends,
            e.Exported: self._exported,
            e.EnginesDied: self._engines_died,
            e.EnginesRestarted: self._engines_restarted,
            e.RestartFailed: self._restart_failed,
            e.WeightsGiven: self._weights_given,
            e.Answered: self._answered,
            e.Health: self._health,
            e.Polled: self._polled,
            e.Asked: self._asked,
            e.Signal: self._signal,
            e.Watched: self._watched,
            e.Ended: self._ended,
        }

    def handle(self, event: e.Event, now: float) -> list[e.Command]:
        """Take an event at the time `now`, in seconds of a clock that never goes back."""
        return self._handlers[type(event)](event, now)

    @property
    def must_save(self) -> bool:
        """Whether a stop waits: a finished step has no checkpoint yet, or the loop never gives up
        a step."""
        if not self.policy.gives_up:
            return self.phase is not Phase.START
        return self.finished > max(self.saved, self.resumed)

    @property
    def exit_code(self) -> int:
        """The decided exit code, or that of a process that was asked to stop."""
        if self.code is not None:
            return self.code
        return INTERRUPTED if self.requested in (INTERRUPT, None) else STOPPED

    # The loop

    def _begins(self, event: e.Begins, now: float) -> list[e.Command]:
        self.policy = event.policy
        self.step = self.resumed = self.finished = event.step
        self.saved = event.saved
        self._step_s, self._save_s = event.step_s, event.save_s
        return []

    def _started(self, event: e.Started, now: float) -> list[e.Command]:
        wanted = self.policy.validates_first and (not self.resumed or self.policy.val_only)
        return [e.Validate()] if wanted else []

    def _step_wanted(self, event: e.StepWanted, now: float) -> list[e.Command]:
        commands: list[e.Command] = []
        self._enter(Phase.IDLE)
        if self.step < self.policy.total_steps and not self.policy.val_only:
            commands = self._look_at_time(now)
            if self.requested is None:
                self.step += 1
                self.restarts = self._resamples = 0
                self._is_first_death = True
                self._enter(Phase.SAMPLE if self.policy.gives_up else Phase.UPDATE)
                return [e.BeginStep(self.step)]
        self._enter(Phase.END)
        return [*commands, e.EndLoop()]

    def _stopped_elsewhere(self, event: e.StoppedElsewhere, now: float) -> list[e.Command]:
        self.step -= 1
        self._enter(Phase.END)
        return []

    def _update_begins(self, event: e.UpdateBegins, now: float) -> list[e.Command]:
        commands = self._polled(event, now)
        if not commands:
            self._enter(Phase.UPDATE)
        return commands

    def _step_finished(self, event: e.StepFinished, now: float) -> list[e.Command]:
        self.finished = self.step
        self._enter(Phase.FINISH)
        return []

    def _step_measured(self, event: e.StepMeasured, now: float) -> list[e.Command]:
        if not self.policy.validates(self.step):
            return self._save_if_due()
        commands = self._look_at_time(now) if self.policy.gives_up else []
        if self.policy.gives_up and self.requested is not None:
            return [*commands, e.EndEngines(), self._validation_given_up(), *self._save_if_due()]
        self._enter(Phase.VALIDATE)
        return [e.Validate()]

    def _validated(self, event: e.Validated, now: float) -> list[e.Command]:
        self._enter(Phase.FINISH)
        return self._save_if_due()

    def _validation_given_up(self) -> e.Say:
        return e.Say(f"{self.requested}: the validation of step {self.step} was given up")

    def _save_if_due(self) -> list[e.Command]:
        stops = self.policy.gives_up and self.requested is not None
        if not stops and not self.policy.saves(self.step):
            return []
        self._enter(Phase.SAVE)
        return [e.Save()]

    def _saved(self, event: e.Saved, now: float) -> list[e.Command]:
        self.saved = self.step
        self._failed_saves = 0
        return self._after_save([e.Exit(STOPPED)])

    def _save_failed(self, event: e.SaveFailed, now: float) -> list[e.Command]:
        if not self._failed_saves:
            self._first_failed_save = now
        self._failed_saves += 1
        limit = self.policy.max_failed_saves
        last = self.step >= self.policy.total_steps  # there is no later save
        is_early = now - self._first_failed_save < limits.FAILED_SAVES_S and limit > 1 and not last
        if self._failed_saves >= limit and not is_early:
            return [e.Fail()]
        text = (
            f"{event.error} Failed saves in a row: {self._failed_saves}; the run stops at "
            f"{self.policy.failed_saves_key}{limit}, but not within {limits.FAILED_SAVES_S:g} s of "
            "the first"
        )
        end = f"stopped by {self.by} after step {self.step}, whose checkpoint could not be written"
        return [e.Warn(text), *self._after_save([e.Fail(end)])]

    def _after_save(self, at_end: list[e.Command]) -> list[e.Command]:
        """Go on after a save in the loop; return `at_end` after one that ends the run."""
        if self._base is Phase.SAVE:
            self._enter(Phase.FINISH)
            return []
        return at_end

    def _step_ends(self, event: e.StepEnds, now: float) -> list[e.Command]:
        self._step_s = max(self._step_s, event.step_s)
        self._save_s = max(self._save_s, event.save_s)
        self._enter(Phase.IDLE)
        return []

    @property
    def by(self) -> str:
        """What stopped the run."""
        return self.requested or "a signal to another rank"

    def _loop_ends(self, event: e.LoopEnds, now: float) -> list[e.Command]:
        policy = self.policy
        self._enter(Phase.END)
        stops = policy.gives_up and self.requested is not None
        if stops or (self.step < policy.total_steps and not policy.val_only):
            return [e.Save()] if self.step > self.saved else [e.Exit(STOPPED)]
        exports = policy.exports and self.step and not policy.val_only
        return [e.Export()] if exports else [e.Exit(DONE)]

    def _exported(self, event: e.Exported, now: float) -> list[e.Command]:
        return [e.Exit(DONE)]

    def _enter(self, phase: Phase) -> None:
        self.phase = self._base = phase

    # Engines and services

    def _engines_died(self, event: e.EnginesDied, now: float) -> list[e.Command]:
        if self._is_first_death:
            self._is_first_death, self._samples_fail = False, event.fails_on_samples
        self.phase = Phase.RESTART
        commands = self._polled(event, now)
        if commands:
            return commands
        limit = self.policy.max_restarts
        if self.restarts + event.count > limit:
            return [self._no_restart(f"at most {limit} are started again")]
        self.restarts += event.count
        text = (
            f"{event.cause}. Starting again: {event.names} ({self.restarts} of "
            f"actor_rollout_ref.rollout.max_restarts={limit} in this step)"
        )
        return [e.Warn(text), e.Restart()]

    def _restart_failed(self, event: e.RestartFailed, now: float) -> list[e.Command]:
        return [self._no_restart(f"a new engine could not be started: {event.error}")]

    def _no_restart(self, reason: str) -> e.Fail:
        more = (
            f"{self.restarts} rollout engines were started again in step {self.step}, and {reason} "
            "(actor_rollout_ref.rollout.max_restarts)"
        )
        # Otherwise the same samples have failed in several processes.
        return e.Fail(more, may_pass=not (self._samples_fail and self.restarts))

    def _engines_restarted(self, event: e.EnginesRestarted, now: float) -> list[e.Command]:
        repeats = self._base in (Phase.SAMPLE, Phase.VALIDATE)
        self.phase = Phase.RESYNC if repeats else self._base
        return []

    def _weights_given(self, event: e.WeightsGiven, now: float) -> list[e.Command]:
        self.phase = self._base
        return []

    def _answered(self, event: e.Answered, now: float) -> list[e.Command]:
        self._outage = event.outage
        if event.outage is None or self._resamples >= limits.MAX_RESAMPLES:
            self._resamples = 0
            return []
        self._outage_began = now
        text = (
            f"{event.outage.failed} of {event.outage.samples} samples lost their "
            f"{event.outage.lost} ({event.outage.example}); waiting up to "
            f"{event.outage.limit_s:g} s for the {event.outage.service}"
        )
        return [e.Warn(text), e.CheckHealth()]

    def _health(self, event: e.Health, now: float) -> list[e.Command]:
        outage = self._outage
        assert outage is not None
        waited = now - self._outage_began
        left = outage.limit_s - waited
        if not event.is_broken:
            self._resamples += 1
            text = (
                f"the {outage.service} recovered after {waited:.0f} s; sampling the step's prompts "
                "again"
            )
            return [e.Say(text), e.Resample()]
        if left < limits.SHORTEST_WAIT_S:
            self._resamples = 0
            return []
        return [e.CheckHealth(min(limits.HEALTH_EVERY_S, left))]

    # Stops

    def _polled(self, event: e.Event, now: float) -> list[e.Command]:
        if self.requested is None:
            if self.policy.deadline is None:
                return []
            commands = self._look_at_time(now)
            if not commands:
                return []
        else:
            commands = []
        if self.policy.gives_up and self.phase in GIVEN_UP:
            commands += self._give_up()
        return commands

    def _give_up(self) -> list[e.Command]:
        """Give up the phase: what it did is lost, and nothing else."""
        if self._base is Phase.SAMPLE:
            self.step -= 1
            self._enter(Phase.END)
        elif self._base is Phase.VALIDATE:
            self._enter(Phase.FINISH)
            return [self._validation_given_up(), e.GiveUp()]
        else:
            self.phase = self._base
            end = f"no engine is started again; the run saves step {self.step} and stops"
            return [e.Say(f"{self.requested}: {end}"), e.GiveUp()]
        return [e.GiveUp()]

    def _look_at_time(self, now: float) -> list[e.Command]:
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
        return [e.WallTimeOver(key), *self._asked(e.Asked(key), now)]

    def _asked(self, event: e.Asked, now: float) -> list[e.Command]:
        if self.requested is not None or self.code is not None:
            return []
        self.requested = event.name
        self.patience.begin(event.name, now)
        if event.name == INTERRUPT or not self.must_save:
            return [e.Interrupt()]
        return [e.Say(f"{event.name}: {self._what_follows()}")]

    def _what_follows(self) -> str:
        if not self.policy.gives_up and self.step >= self.policy.total_steps:
            return f"the run ends with step {self.step}, its last, as it would without a stop"
        if self._base is Phase.UPDATE:
            return f"the run finishes step {self.step}, saves it, and stops"
        if self.finished > self.saved:
            return f"step {self.finished} is not saved yet; the run stops once it is"
        return f"the run stops after step {self.finished}"

    def _signal(self, event: e.Signal, now: float) -> list[e.Command]:
        counts = self.patience.signal(event.name, now)
        return self._look(event.name if counts else None, now)

    def _watched(self, event: e.Watched, now: float) -> list[e.Command]:
        return self._look(None, now)

    def _look(self, signal: str | None, now: float) -> list[e.Command]:
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
        return [e.EndProcess(self.code, found, decided)]

    # The end

    def _ended(self, event: e.Ended, now: float) -> list[e.Command]:
        """Decide the exit code. The first one counts."""
        if self.code is not None:
            return []
        self.code = self.exit_code if event.code is None else event.code
        self.patience.leave(limits.END_S if event.code is None else limits.LEAVE_S, now)
        return [e.Decided()]
