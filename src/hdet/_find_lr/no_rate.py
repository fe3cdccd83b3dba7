"""Why no rate was found, and what to do."""

from __future__ import annotations

from hdet._find_lr.decisions import Curve, rises_for_good
from hdet._find_lr.trial import Trial

_UNCHANGED = {
    True: "the weights did: the probe's loss_fn must use the model that it is given",
    False: "nor did the weights: begin with a higher rate, unless all gradients are zero",
}


class FindLRError(RuntimeError):
    """There is no learning rate to be found; the message says what to do. Everything was put back.

    Attributes:
        worse_above: rates above this one made the loss worse than it was; None if that was not seen.
    """

    def __init__(self, text: str, worse_above: float | None = None) -> None:
        super().__init__(text)
        self.worse_above = worse_above


def no_rate(trial: Trial, first: float, curves: list[Curve]) -> FindLRError:
    """The error for curves without a fall that counts. Called where the last ramp has ended, on all replicas.

    Args:
        trial: with the weights as the last ramp has left them.
        first: the loss before the first step.
        curves: of all ramps.
    """
    points = [point for curve in curves for point in curve]
    rates = f"learning rates from {min(points)[0]:.3g} to {max(points)[0]:.3g}"
    trains_the_model, moved = trial.effect()
    if not trains_the_model:
        return FindLRError(
            "the optimizer holds no parameter of the model that the probe scores, so the probe's loss, "
            f"{first:.6g}, did not fall at {rates}; make the optimizer of model.parameters(), after whatever replaces "
            "them, and pass that very model"
        )
    if all(loss == first for _, loss in points):
        return FindLRError(f"the probe's loss, {first:.6g}, did not change at all at {rates}; {_UNCHANGED[moved]}")
    bounds = [bound for curve in curves if (bound := rises_for_good(curve, first)) is not None]
    if not bounds:
        return FindLRError(
            f"the probe's loss, {first:.6g}, fell by less than 1 % at {rates}, and did not rise either: begin with a "
            "higher rate"
        )
    bound = min(bounds)
    if all(bound <= curve[0][0] for curve in curves):
        return FindLRError(
            f"the probe's loss, {first:.6g}, never fell at {rates}, and rose at the lowest one already: begin with a "
            "lower rate",
            bound,
        )
    return FindLRError(
        f"the probe's loss, {first:.6g}, fell by less than 1 % at all {rates}, and rates above {bound:.3g} make it "
        "worse, as with weights that are trained already: train at a rate below that. If the weights are new, check "
        "that what is trained is the loss that is scored, on the same kind of data",
        bound,
    )
