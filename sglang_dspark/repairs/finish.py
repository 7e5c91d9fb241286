"""Where a request ends inside an accepted run: at the token where plain decoding would have ended it.

The engine looks at a whole run at once and asks its conditions one after the other (stop strings before stop tokens
before the length), so a stop string behind an EOS of the same run would win, and of two stop strings the first in the
client's list instead of the first in the text. Here every token of the run is shown to the engine's own check alone, in
order, as plain decoding does; what stands behind the end is left to the engine, which cuts text, usage and
log-probabilities at `finished_len`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang_dspark.contract.hooks import AROUND, Hook

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req


def _one_by_one(original, req: Req, new_accepted_len: int = 1) -> None:
    if new_accepted_len <= 1 or req.finished() or req.to_finish:
        original(req, new_accepted_len)
        return
    output, grammar = req.output_ids, req.grammar
    start = len(output) - new_accepted_len
    run = output[start:]
    del output[start:]
    try:
        for count, token in enumerate(run, 1):
            output.append(token)
            # The grammar has walked the whole run and was cut at its end: it may only speak about the last token.
            req.grammar = grammar if count == new_accepted_len else None
            original(req, 1)
            if req.finished():
                break
    finally:
        req.grammar = grammar
        output.extend(run[count:])
    if req.finished() and req.finished_len is None:
        req.finished_len = start + count


HOOKS = (
    Hook("sglang.srt.managers.schedule_batch:Req.update_finish_state", AROUND, _one_by_one, ("new_accepted_len",)),
)
