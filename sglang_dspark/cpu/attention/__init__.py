"""Attention, norm and rotation of a plain CPU, compiled by numba at the first use."""
