"""Names and labels of this project's images, which docker/build.sh gives them."""

import importlib.metadata

CODE_LABEL = "geb.stages"
"""Label with the digest of the stages' code that an image holds."""
# Images with torch are built for CPUs or for GPUs.
_WITH_TORCH = ("torch", "vllm")


def image_tags(name: str, *, gpus: int) -> list[str]:
    """Tags of the images of a name that serve this many GPUs, the best first."""
    tag = f"geb-{name}:{importlib.metadata.version('geb')}"
    if name not in _WITH_TORCH:
        return [tag]
    return [f"{tag}-gpu"] if gpus else [f"{tag}-cpu", f"{tag}-gpu"]
