"""Bases of the adapters in a store, for ``geb verify``."""

from __future__ import annotations

from pathlib import Path

from flows.pipeline.external import resolve
from stages.contract.adapters import BASE, base_of_adapter
from stages.contract.errors import UserError
from stages.contract.manifest import Manifest
from stages.contract.request import ArtifactInput, HubInput
from stages.contract.store import Store


def fault_of_base(store: Store, manifest: Manifest) -> str | None:
    """Fault of the base of an artifact's adapter; None where all is well, or there is no adapter.

    The files of a base in the store are hashed as those of its own artifact. A repository of the
    hub is pinned by its commit, and not asked for.
    """
    for name in manifest.files:
        path, _, file = name.rpartition("/")
        base = base_of_adapter(manifest, path) if file == BASE else None
        if base is None or isinstance(base, HubInput):
            continue
        adapter = f"the adapter {manifest.stage}/{manifest.key[:12]}"
        if isinstance(base, ArtifactInput):
            place = f"{base.stage}/{base.key[:12]}/{base.path}"
            made = store.manifest(base.stage, base.key)
            now = made.digest(base.path) if made and made.files_at(base.path) else None
        else:
            place = base.location
            try:
                now = resolve(place, "model").digest if Path(place).exists() else None
            except UserError as error:
                return f"{adapter} lacks its base: {error.message}"
        if now is None:
            return f"{adapter} lacks its base: there is no {place}"
        if now != base.digest:
            return f"{adapter} goes over the base with the digest {base.digest}: {place} has {now}"
    return None
