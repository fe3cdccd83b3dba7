"""Controllers: what moves the scales of the explored hyperparameters between rounds."""

from hdet.controllers.auto import Auto
from hdet.controllers.evidence import words, words_not_learning
from hdet.controllers.fixed import Fixed
from hdet.controllers.line_search import LineSearch
from hdet.controllers.report import Controller, Observation, Plan, Report, State, check_state, plan
from hdet.controllers.slope import Slope
from hdet.controllers.softmax import RULES, Softmax
from hdet.controllers.steering import Steering

__all__ = [
    "RULES",
    "Auto",
    "Controller",
    "Fixed",
    "LineSearch",
    "Observation",
    "Plan",
    "Report",
    "Slope",
    "Softmax",
    "State",
    "Steering",
    "check_state",
    "plan",
    "words",
    "words_not_learning",
]
