"""Records in experiment trackers: one sink for each, with the numbers of `hdet.records.metrics`.

Each needs its own package, imported when the sink is made, and writes from the first replica.
"""

from hdet.records.trackers.mlflow import MLflow
from hdet.records.trackers.tensorboard import TensorBoard
from hdet.records.trackers.trackio import Trackio
from hdet.records.trackers.wandb import WandB

__all__ = ["MLflow", "TensorBoard", "Trackio", "WandB"]
