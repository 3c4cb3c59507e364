"""Which calibration a server uses: the one that is named, or the one in the cache."""

from __future__ import annotations

import functools
import logging
from pathlib import Path
from typing import Any

from sglang_oasis.config import AUTO, NONE, LookaheadKVConfig
from sglang_oasis.errors import LookaheadKVError
from sglang_oasis.tier.calibration import Calibration, find, model_hash

_log = logging.getLogger(__name__)


def calibration_of(config: LookaheadKVConfig, model_config: Any, ranks: int) -> Calibration | None:
    """Return a model's calibration, None for none.

    With `auto`, a model that is no folder has none, and a file in the cache that does not fit is not used, with a
    warning.

    Args:
        config: the configuration.
        model_config: SGLang's ModelConfig.
        ranks: tensor-parallel ranks.

    Raises:
        LookaheadKVError: the file that the configuration names cannot be read, or is another model's.
    """
    if config.calibration == NONE:
        return None
    automatic, folder = config.calibration == AUTO, Path(model_config.model_path)
    if automatic and not folder.is_dir():
        return None
    try:
        model = model_hash(folder)
        file = find(model, config.block_size) if automatic else Path(config.calibration)
        if file is None:
            return None
        found = _load(file, file.stat().st_mtime_ns if file.exists() else 0)
        heads, layers = model_config.get_total_num_kv_heads(), model_config.num_attention_layers
        found.check(model, config.block_size, layers, heads, model_config.head_dim, ranks)
    except (LookaheadKVError, OSError) as error:
        if not automatic:
            raise
        _log.warning("The model is served without a calibration: %s", error)
        return None
    return found


@functools.lru_cache(maxsize=2)
def _load(file: Path, changed: int) -> Calibration:
    """Read a file once, as it was at a time."""
    return Calibration.load(file)
