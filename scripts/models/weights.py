"""Writes the folder of a tiny random model."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from scripts.models.cases import Case
from scripts.models.renamed import RENAMED, Renamed

GAIN, NOISE = 2.0, 0.1
"""Scale of the weights, chosen so that attention is far from uniform and a wrong selection changes the answer."""

CONFIGURATION = "configuration_tiny"
CONFIGURATION_MODULE = """from transformers import PretrainedConfig


class TinyConfig(PretrainedConfig):
    model_type = {model_type!r}
"""


def write_model(case: Case, folder: Path, seed: int = 0) -> dict[str, str]:
    """Make the model of a case and write it to two folders.

    Args:
        case: what to make.
        folder: its subfolder `served` is for SGLang, `reference` for transformers; they are the same unless renamed.

    Returns:
        {"architecture": the class that SGLang looks for}.
    """
    config = AutoConfig.for_model(case.model_type, **case.settings)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    randomise(model, seed)
    reference = folder / "reference"
    model.save_pretrained(reference)
    if case.renamed is None:
        (folder / "served").symlink_to(reference)
        return {"architecture": type(model).__name__}
    renamed = RENAMED[case.renamed]
    _write_renamed(renamed, reference, folder / "served")
    return {"architecture": renamed.architecture}


def randomise(model: PreTrainedModel, seed: int) -> None:
    """Set random weights of a scale at which every part of the model matters."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() > 1:
                parameter.copy_(noise * GAIN * parameter.shape[-1] ** -0.5)
            else:
                parameter.add_(NOISE * noise)


def _write_renamed(renamed: Renamed, reference: Path, folder: Path) -> None:
    folder.mkdir()
    config = AutoConfig.from_pretrained(reference)
    weights = renamed.weights(load_file(reference / "model.safetensors"), config)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    stored = json.loads((reference / "config.json").read_text())
    model_type = f"tiny_{renamed.architecture.lower()}"
    theta = stored["rope_parameters"]["rope_theta"]  # older models have it beside the other settings
    stored |= {"architectures": [renamed.architecture], "model_type": model_type, "rope_theta": theta}
    stored |= {"auto_map": {"AutoConfig": f"{CONFIGURATION}.TinyConfig"}, **renamed.stored}
    (folder / "config.json").write_text(json.dumps(stored, indent=2))
    (folder / f"{CONFIGURATION}.py").write_text(CONFIGURATION_MODULE.format(model_type=stored["model_type"]))
