"""How far one request's drafts are accepted, on one program's scalars: the loops inside `accept_triton`'s kernels.

Pointers are the request's own; `first` is its first row among the target's. p is [M, V], q [k, C], float32.
"""

from __future__ import annotations

from .backend import jit, tl


@jit
def joint_ratio(p_ptr, token_ptr, column_ptr, q_ptr, first, count, V, C):
    """s_count = min(... min(p(x_1) / q(x_1), 1) ..., 1) along the block; s_0 = 1 (pointers are the request's own)."""
    scale = 1.0
    for i in range(count):
        px = tl.load(p_ptr + (first + i).to(tl.int64) * V + tl.load(token_ptr + i))
        qx = tl.load(q_ptr + i * C + tl.load(column_ptr + i))
        scale = tl.minimum(tl.where(qx > 0.0, scale * px / tl.maximum(qx, 1e-37), 0.0), 1.0)
    return scale


@jit
def token_stop(p_ptr, q, tokens, columns, coins, first, w, K, V, C):
    """u < p(x) / q(x) up to the first rejection; the bonus row is judged on its draft, if there is one."""
    stop = 0
    running = 1
    for k in range(tl.minimum(w + 1, K)):
        px = tl.load(p_ptr + (first + k).to(tl.int64) * V + tl.load(tokens + k))
        qx = tl.load(q + k * C + tl.load(columns + k))
        passed = tl.load(coins + k) * qx.to(tl.float64) < px.to(tl.float64)
        running = tl.where(passed, running, 0)
        stop += running
    return stop


@jit
def block_stop(p_ptr, q, tokens, columns, coins, scaled, first, w, V, C):
    """The last i whose coin is below h_i, and the scale of its residual."""
    stop = 0
    stop_scale = 1.0
    scale = 1.0
    for k in range(w):
        px = tl.load(p_ptr + (first + k).to(tl.int64) * V + tl.load(tokens + k))
        qx = tl.load(q + k * C + tl.load(columns + k))
        scale = tl.minimum(tl.where(qx > 0.0, scale * px / tl.maximum(qx, 1e-37), 0.0), 1.0)
        threshold = scale
        if k + 1 < w:
            mass = tl.maximum(scale - tl.load(scaled + k + 1), 0.0)
            slack = mass + (1.0 - scale)
            threshold = tl.where(slack > 0.0, mass / tl.maximum(slack, 1e-37), 1.0)
        passed = tl.load(coins + k) < threshold.to(tl.float64)
        stop = tl.where(passed, k + 1, stop)
        stop_scale = tl.where(passed, scale, stop_scale)
    return stop, stop_scale
