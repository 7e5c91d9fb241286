"""The scheduling mathematics of DSpark: how many drafted tokens are worth verifying, for every request, at every step.

numpy and scipy only; no torch, no engine. Read `survival`, `windows`, `budget`, `planner` in this order.
"""

from .budget import Budget, best_budget, plan_budget
from .calibration import SequentialTemperatureScaling, expected_calibration_error
from .cost import AdditiveCostModel, CostModel
from .cost_fit import fit_cost_model
from .fingerprint import Fingerprint, FingerprintMismatch
from .online_calibration import OnlineCalibrator
from .online_cost import OnlineCostModel
from .planner import Planner
from .policies import POLICIES, Plan, ahead, causal, lagged
from .relay import ContextSurvival, LaggedSurvival, SurvivalRelay
from .skip import ProbeClock, ProbeSchedule
from .survival import survival
from .windows import allocate_windows

__all__ = [
    "POLICIES",
    "AdditiveCostModel",
    "Budget",
    "ContextSurvival",
    "CostModel",
    "Fingerprint",
    "FingerprintMismatch",
    "LaggedSurvival",
    "OnlineCalibrator",
    "OnlineCostModel",
    "Plan",
    "Planner",
    "ProbeClock",
    "ProbeSchedule",
    "SequentialTemperatureScaling",
    "SurvivalRelay",
    "ahead",
    "allocate_windows",
    "best_budget",
    "causal",
    "expected_calibration_error",
    "fit_cost_model",
    "lagged",
    "plan_budget",
    "survival",
]
