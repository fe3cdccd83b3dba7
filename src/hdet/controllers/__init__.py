"""Controllers move the scales of the explored hyperparameters between rounds."""

from hdet.controllers.auto import Auto
from hdet.controllers.fixed import Fixed
from hdet.controllers.line_search import LineSearch
from hdet.controllers.report import Controller, Observation, Plan, Report
from hdet.controllers.slope import Slope
from hdet.controllers.softmax import Softmax

__all__ = ["Auto", "Controller", "Fixed", "LineSearch", "Observation", "Plan", "Report", "Slope", "Softmax"]
