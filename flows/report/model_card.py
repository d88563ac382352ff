"""Copies a registered model out of the store, with a model card for the Hugging Face hub."""

import shutil
from pathlib import Path
from typing import Any

from flows.report.files import json_text, new_folder
from stages.contract.atomic import write_atomically
from stages.contract.manifest import Manifest
from stages.contract.request import ArtifactInput
from stages.store.base import Artifact, Store
from stages.store.registry import ModelRegistry, ModelVersion


def export_model(store: Store, model: str, folder: Path) -> ModelVersion:
    """Copies a registered checkpoint into a new folder and writes its model card.

    Raises:
        UserError: The model is unknown, or the folder is not empty.
    """
    version, artifact = ModelRegistry(store).resolve(model)
    card = model_card(store, version, artifact)
    with new_folder(folder):
        folder.mkdir(parents=True, exist_ok=True)
        checkpoint = artifact.file(version.checkpoint.path)
        # File by file, so that an error names the file; `shutil.copytree` collects errors.
        for path in sorted(checkpoint.rglob("*")):
            target = folder / path.relative_to(checkpoint)
            if path.is_dir():
                target.mkdir()
            else:
                shutil.copy2(path, target)
        # It replaces the card of the base model if the checkpoint has one.
        write_atomically(folder / "README.md", card)
    return version


def model_card(store: Store, version: ModelVersion, artifact: Artifact) -> str:
    """Markdown with metadata that the hub reads: base, figures, settings and digest."""
    # The library takes half a second to load.
    from huggingface_hub import ModelCardData

    manifest = artifact.manifest
    policies = _policies(store, manifest)
    data = ModelCardData(
        library_name="transformers",
        base_model=policies[-1].get("repo") if policies else None,
        tags=["dpo", "rlhf"],
    )
    origin = {
        "run": version.run,
        "step": version.step,
        "created": version.created,
        "artifact": f"{manifest.stage}/{manifest.key}",
        "digest": version.checkpoint.digest,
        "policies": policies,
    }
    return f"""---
{data.to_yaml()}
---
# {version.name}, version {version.version}

Trained by iterative online DPO. The last of the `policies` is the starting model; its licence
applies to this model too.

```json
{json_text(origin)}
```

Figures at registration:

```json
{json_text(version.metrics)}
```

Settings of the last training:

```json
{json_text(manifest.params)}
```
"""


def _policies(store: Store, manifest: Manifest) -> list[dict[str, Any]]:
    """Sources of the policy that a training started from, of that policy's training, and so on."""
    policies = []
    training: Manifest | None = manifest
    while training is not None and "policy" in training.inputs:
        [source] = training.inputs["policy"]
        policies.append(source.model_dump(mode="json") | {"digest": source.digest})
        training = None
        if isinstance(source, ArtifactInput):
            training = store.manifest(source.stage, source.key)
    return policies
