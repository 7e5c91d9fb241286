"""Everything that is read with a draft before a server starts: its folder, its fit to the target, measured files."""

from __future__ import annotations

from pathlib import Path

from sglang_dspark.errors import wrong_value
from sglang_dspark.models.checkpoint import check_draft_folder, check_draft_weights
from sglang_dspark.models.draft_config import DraftCheckpointError, DraftConfig
from sglang_dspark.settings.config import COST_KEYWORDS, ConfigError, DSparkConfig


def check_draft(folder: Path, target: dict, target_file: Path) -> DraftConfig:
    """The config of the draft in `folder`, whose every weight and temperature was read and found right.

    Args: target: the target's config, read from target_file.
    Raises: DraftCheckpointError.
    """
    from sglang_dspark.learning.confidence import draft_temperatures

    draft = check_draft_folder(folder)
    text = target.get("text_config", target)
    sizes = {key: text.get(key) for key in ("hidden_size", "vocab_size", "num_hidden_layers")}
    for key, size in sizes.items():
        if type(size) is not int:
            raise DraftCheckpointError(f"{target_file}: {wrong_value(key, size, 'a whole number')}")
    draft.check_target(**sizes)
    check_draft_weights(folder)
    if (folder / "sts.json").exists():
        try:
            for head in ("main", "hidden"):
                draft_temperatures(folder / "sts.json", head, draft.block_size)
        except ValueError as error:
            raise DraftCheckpointError(str(error)) from error
    return draft


def check_measured_files(config: DSparkConfig) -> None:
    """Read a cost and a calibration file that were named: each must be one.

    Whether they were measured on this very server is known only when the engine has been built.
    Raises: ConfigError.
    """
    from dspark_scheduler import AdditiveCostModel, SequentialTemperatureScaling

    try:
        if config.cost_model not in COST_KEYWORDS:
            AdditiveCostModel.load(config.cost_model, None)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--cost-model {config.cost_model}: {error}") from error
    try:
        if config.calibration not in ("online", "off"):
            SequentialTemperatureScaling.load(config.calibration, None)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--calibration {config.calibration}: {error}") from error
