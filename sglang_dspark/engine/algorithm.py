"""The speculative algorithm `DSPARK_LOAD_AWARE` as SGLang sees it: its predicates, arguments and worker."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang.srt.speculative.spec_registry import CustomSpecAlgo

from sglang_dspark.accelerator import defaults
from sglang_dspark.engine.unsupported import check_start
from sglang_dspark.models.checkpoint import check_draft_folder, local_folder
from sglang_dspark.models.draft_config import DraftConfig
from sglang_dspark.settings.config import check_draft
from sglang_dspark.settings.flags import ALGORITHM, config_of

if TYPE_CHECKING:
    from sglang.srt.managers.overlap_utils import FutureMap
    from sglang.srt.server_args import ServerArgs


class DSparkLoadAware(CustomSpecAlgo):
    """Answers the engine's questions as a block-draft algorithm whose draft reads the target's features.

    It is no `is_dspark`: that predicate belongs to the engine's own DSPARK, which owns a relay and refuses
    drafts without a sequential head. It is of the DFlash family, which gives feature capture, the draft's
    KV pool on the target's slots, and the slot reservation of two blocks per request.
    """

    def is_dflash_family(self) -> bool:
        """True: the family captures features, puts the draft's KV on the target's slots and reserves two blocks."""
        return True

    def supports_target_verify_for_draft(self) -> bool:
        return True

    def supports_prefill_shared_read_done(self) -> bool:
        return True

    def supports_ragged_verify(self) -> bool:
        """True: requests of one verification may have windows of different lengths."""
        return True

    def carries_draft_hidden_states(self) -> bool:
        """False: the draft reads the target's features, and no hidden states of its own pass between steps."""
        return False

    def need_topk(self) -> bool:
        """False: a draft is a block of one token per slot, not a tree."""
        return False

    def get_platform_worker_cls(self) -> None:
        """None: no platform has a worker class of its own."""
        return

    def create_future_map(self, *args, **kwargs) -> FutureMap:
        """The engine's own map, told this algorithm; the first argument is the device."""
        from sglang.srt.managers.overlap_utils import FutureMap

        device, *rest = args
        return FutureMap(device, self, *rest, **kwargs)

    def get_num_tokens_per_req_for_target_verify(self, num_draft_tokens: int, is_draft_worker: bool) -> int:
        """Rows of a request: gamma on the draft; anchor and drafts, gamma + 1, on the target."""
        return num_draft_tokens - 1 if is_draft_worker else num_draft_tokens

    def handle_server_args(self, server_args: ServerArgs) -> None:
        """Fill in the engine's speculative arguments from the draft (fields are only assigned here).

        Raises:
            ValueError: no draft path; a draft that cannot be served; a width that contradicts the draft's; or a start
                whose requests would pass our checks by.
        """
        check_start(server_args)
        path = server_args.speculative_draft_model_path
        if path is None:
            raise ValueError(
                f"{ALGORITHM} needs a draft: pass --speculative-draft-model-path FOLDER (see `sglang-dspark train-draft`), "
                "or --verify-mode off for plain decoding"
            )
        draft = check_draft_folder(local_folder(path))
        check_draft(config_of(server_args), draft)
        width = draft.block_size + 1
        if server_args.speculative_num_draft_tokens not in (None, width):
            raise ValueError(
                f"--speculative-num-draft-tokens {server_args.speculative_num_draft_tokens}: the draft's block_size is "
                f"{draft.block_size}, so {width} would be right; use --max-window to verify fewer"
            )
        server_args.speculative_num_draft_tokens = width
        server_args.speculative_num_steps = 1
        server_args.speculative_eagle_topk = 1
        # The engine delays prefill admission for this family only; without this, speculation is judged unfairly.
        server_args.min_free_slots_delay = 1
        if server_args.device != "cpu":
            defaults.handle_server_args(server_args, draft)


def draft_config_of(server_args: ServerArgs) -> DraftConfig:
    """The checked config of the draft that a server was started with."""
    return check_draft_folder(local_folder(server_args.speculative_draft_model_path))
