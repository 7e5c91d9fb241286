"""How far one request's drafts are accepted, on one program's scalars: the loops inside `accept_triton`'s kernels.

Pointers are the request's own; px holds p(x) of each of its rows, q is [k, C], all float32.
"""

from __future__ import annotations

from .backend import jit, tl


@jit
def next_scale(scale, px, qx):
    """s_i = min(s_{i-1} p(x_i) / q(x_i), 1); 0 where the slot was never drawn (its law is zero)."""
    return tl.minimum(tl.where(qx > 0.0, scale * px / tl.maximum(qx, 1e-37), 0.0), 1.0)


@jit
def joint_scale(px, column_ptr, q, count, C):
    """s_count along the block; s_0 = 1."""
    scale = 1.0
    for i in range(count):
        scale = next_scale(scale, tl.load(px + i), tl.load(q + i * C + tl.load(column_ptr + i)))
    return scale


@jit
def token_stop(px, q, columns, coins, w, K, C):
    """u < p(x) / q(x) up to the first rejection; the bonus row is judged on its draft, if there is one."""
    stop = 0
    running = 1
    for k in range(tl.minimum(w + 1, K)):
        qx = tl.load(q + k * C + tl.load(columns + k))
        passed = tl.load(coins + k) * qx.to(tl.float64) < tl.load(px + k).to(tl.float64)
        running = tl.where(passed, running, 0)
        stop += running
    return stop


@jit
def block_stop(px, q, columns, coins, scaled, w, C):
    """The last i whose coin is below h_i, and the scale of its residual."""
    stop = 0
    stop_scale = 1.0
    scale = 1.0
    for k in range(w):
        scale = next_scale(scale, tl.load(px + k), tl.load(q + k * C + tl.load(columns + k)))
        threshold = scale
        if k + 1 < w:
            mass = tl.maximum(scale - tl.load(scaled + k + 1), 0.0)
            slack = mass + (1.0 - scale)
            threshold = tl.where(slack > 0.0, mass / tl.maximum(slack, 1e-37), 1.0)
        passed = tl.load(coins + k) < threshold.to(tl.float64)
        stop = tl.where(passed, k + 1, stop)
        stop_scale = tl.where(passed, scale, stop_scale)
    return stop, stop_scale
