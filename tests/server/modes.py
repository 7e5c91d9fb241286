"""The modes that tests switch the speculating server between.

Each names every setting that another one may have left behind. `min_window` forces drafting where the planner would
rather rest: a tiny target is as cheap as its draft.
"""

from __future__ import annotations

STATIC = {"verify_mode": "static", "min_window": 0, "max_window": None, "window_policy": None, "accept_rule": "block"}
COMPACT = {**STATIC, "verify_mode": "compact", "min_window": 1}
CAUSAL = {**COMPACT, "window_policy": "causal"}
CAP_ACCEPT = {**CAUSAL, "verify_mode": "cap-accept"}

# Every rule and every way to a window, for comparisons that cost seconds each.
MODES = {
    "static": STATIC,
    "static-token": {**STATIC, "accept_rule": "token"},
    "compact": CAUSAL,
    "ahead": {**COMPACT, "window_policy": "ahead", "max_window": 3, "accept_rule": "coupled"},
    "cap-accept": CAP_ACCEPT,
}
# Every mode with every policy that it may have, and the two ends: a narrow window and no draft.
EVERY_POLICY = {
    "static": STATIC,
    **{f"compact-{policy}": {**COMPACT, "window_policy": policy} for policy in ("causal", "lagged", "ahead")},
    **{f"cap-accept-{policy}": {**CAP_ACCEPT, "window_policy": policy} for policy in ("causal", "lagged", "ahead")},
    "compact-causal-2": {**CAUSAL, "max_window": 2},
    "off": {**STATIC, "verify_mode": "off"},
}
