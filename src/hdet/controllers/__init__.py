"""Controllers: what moves the scales of the explored hyperparameters between rounds."""

from hdet.controllers.fixed import Fixed
from hdet.controllers.report import Controller, Observation, Plan, Report, State, check_state, plan
from hdet.controllers.softmax import RULES, Softmax
from hdet.controllers.steering import Steering

__all__ = [
    "RULES",
    "Controller",
    "Fixed",
    "Observation",
    "Plan",
    "Report",
    "Softmax",
    "State",
    "Steering",
    "check_state",
    "plan",
]
