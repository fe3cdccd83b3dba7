"""Detects forgotten calls: optimizer steps without `Ensemble.step()`, and the reverse."""

from __future__ import annotations

from hdet._run.run import Run
from hdet._user_warning import warn

_MOST_UNSEEN = 100  # calls of `Ensemble.step()`
_FORGOTTEN = 1000  # optimizer steps, before the first call of `Ensemble.step()`


class ForgottenCalls:
    """Reports a loop in which optimizer and ensemble do not step together. Every replica counts for itself."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._unseen = 0
        self._may_warn = self._may_raise = True

    def reset(self) -> None:
        """Optimizer steps were counted, so the loop does call `Ensemble.step()`."""
        self._unseen, self._may_raise = 0, False

    def note_unseen(self) -> None:
        """`Ensemble.step()` was called, but no optimizer step was seen since: a micro-batch, or a mistake."""
        self._unseen += 1
        outer = self._run.settings.averaging.steps
        if self._unseen >= _MOST_UNSEEN and (self._run.settings.explored or outer):
            raise RuntimeError(
                f"no optimizer step was seen in {_MOST_UNSEEN} calls of step(). Is this the optimizer that "
                "trains? A wrapper that does not call its hooks, or a captured graph, cannot fan out: pass "
                "the torch optimizer inside it. With more micro-batches than that per step, call step() once "
                "per optimizer step with the mean loss"
            )

    def note_uncounted(self) -> None:
        """Optimizer steps are taken, but `Ensemble.step()` is not called."""
        run, fan_out = self._run, self._run.values.fan_out
        given, averaging, steps = run.settings, run.settings.averaging, fan_out.steps_of_all
        needed = given.diverges or averaging.steps or averaging.tail or given.safety.rollback is not None
        if steps < fan_out.patience or not needed or run.at.finished:
            return
        problem = (
            f"{steps} optimizer steps were taken without a call of ensemble.step(), so no round ends and the replicas "
            "are not averaged; call ensemble.step(loss) after each optimizer.step() (with OneCycleAutoLR, "
            "scheduler.step(loss)), or ensemble.finish() to continue with plain training"
        )
        if self._may_raise and steps >= _FORGOTTEN:
            raise RuntimeError(problem)
        if self._may_warn:
            self._may_warn = False
            warn(problem)
