"""Records in experiment trackers: one sink for each, with the numbers of `hdet.metrics`.

Each needs its own package, which is imported when the sink is made, and writes from the first replica.
"""

from hdet.trackers.mlflow import MLflow
from hdet.trackers.tensorboard import TensorBoard
from hdet.trackers.trackio import Trackio
from hdet.trackers.wandb import WandB

__all__ = ["MLflow", "TensorBoard", "Trackio", "WandB"]
