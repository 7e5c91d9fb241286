"""Start-up refusals of the verifier that a CPU can check with stand-ins: attention backends that ignore windows.

Bug class (facts of SGLang 0.5.23, section 2): a backend that never looks at the ragged layout reads uniform rows, which
is wrong rows or out of bounds as soon as windows differ; the engine consults the flag for graphs only.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from sglang_dspark.config import ConfigError
from sglang_dspark.verifier import Verifier


def verifier(device: str, reads_layout: bool) -> Verifier:
    backend = SimpleNamespace(supports_ragged_verify_graph=reads_layout)
    return Verifier(SimpleNamespace(model_runner=SimpleNamespace(device=device, attn_backend=backend)), gamma=4)


@pytest.mark.parametrize("mode", ["compact", "cap-accept"])
def test_windows_on_a_backend_that_does_not_read_them_are_refused_at_start(mode):
    with pytest.raises(ConfigError, match="--verify-mode static"):
        verifier("cuda", reads_layout=False).check_backend(mode)


@pytest.mark.parametrize(("device", "reads", "mode"), [("cuda", True, "compact"), ("cuda", False, "static"),
                                                       ("cpu", False, "compact")])
def test_everything_else_starts(device, reads, mode):
    verifier(device, reads).check_backend(mode)
