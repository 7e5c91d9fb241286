"""The scheduling mathematics of DSpark: how many drafted tokens are worth verifying, for every request, at every step.

numpy and scipy only; no torch, no engine. Read `survival`, `windows`, `budget`, `planner` in this order.
"""

from .acceptance import Acceptance
from .budget import Budget, best_budget, plan_budget
from .calibration import SequentialTemperatureScaling, expected_calibration_error
from .contenders import all_policies
from .cost import AdditiveCostModel, CostModel
from .cost_fit import fit_cost_model
from .fingerprint import Fingerprint, FingerprintMismatch
from .machines import MACHINES, Machine
from .online_calibration import OnlineCalibrator
from .online_cost import OnlineCostModel
from .planner import Planner
from .policies import POLICIES, Plan, ahead, causal, lagged
from .relay import ContextSurvival, LaggedSurvival, SurvivalRelay
from .simulation import Load, SimulationResult, simulate
from .skip import ProbeClock, ProbeSchedule
from .survival import survival
from .windows import allocate_windows

__all__ = [
    "MACHINES",
    "POLICIES",
    "Acceptance",
    "AdditiveCostModel",
    "Budget",
    "ContextSurvival",
    "CostModel",
    "Fingerprint",
    "FingerprintMismatch",
    "LaggedSurvival",
    "Load",
    "Machine",
    "OnlineCalibrator",
    "OnlineCostModel",
    "Plan",
    "Planner",
    "ProbeClock",
    "ProbeSchedule",
    "SequentialTemperatureScaling",
    "SimulationResult",
    "SurvivalRelay",
    "ahead",
    "all_policies",
    "allocate_windows",
    "best_budget",
    "causal",
    "expected_calibration_error",
    "fit_cost_model",
    "lagged",
    "plan_budget",
    "simulate",
    "survival",
]
