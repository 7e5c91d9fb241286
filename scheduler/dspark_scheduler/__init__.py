"""The scheduling mathematics of DSpark: how many drafted tokens are worth verifying, for every request, at every step.

numpy and scipy only; no torch, no engine. Read `survival`, `windows`, `plan`, `budget`, `policies`, `planner` in this order.
"""

from .acceptance import Acceptance
from .budget import best_budget, plan_budget
from .calibration import SequentialTemperatureScaling, expected_calibration_error
from .contenders import all_policies
from .cost import AdditiveCostModel, CostModel
from .cost_fit import fit_cost_model
from .fingerprint import Fingerprint, FingerprintMismatch
from .machines import MACHINES, Machine
from .online_calibration import OnlineCalibrator
from .online_cost import CostLearning, OnlineCostModel
from .plan import DraftShape, Plan, Terms
from .planner import Planner
from .policies import POLICIES, Ahead, Causal, Lagged, Policy, Static
from .probes import ProbeRule
from .relay import ContextSurvival, LaggedSurvival, SurvivalRelay
from .simulation import Load, SimulationResult, simulate
from .survival import survival
from .windows import allocate_windows

__all__ = [
    "MACHINES",
    "POLICIES",
    "Acceptance",
    "AdditiveCostModel",
    "Ahead",
    "Causal",
    "ContextSurvival",
    "CostLearning",
    "CostModel",
    "DraftShape",
    "Fingerprint",
    "FingerprintMismatch",
    "Lagged",
    "LaggedSurvival",
    "Load",
    "Machine",
    "OnlineCalibrator",
    "OnlineCostModel",
    "Plan",
    "Planner",
    "Policy",
    "ProbeRule",
    "SequentialTemperatureScaling",
    "SimulationResult",
    "Static",
    "SurvivalRelay",
    "Terms",
    "all_policies",
    "allocate_windows",
    "best_budget",
    "expected_calibration_error",
    "fit_cost_model",
    "plan_budget",
    "simulate",
    "survival",
]
