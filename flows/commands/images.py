"""Command ``geb images``: build the container images and list them."""

from typing import Annotated

import typer

from flows.commands.common import AsJson, console, print_json
from flows.images.table import IMAGES, Flavour
from stages.contract.errors import UserError

_NAMES = ", ".join(dict.fromkeys(image.name for image in IMAGES))
images = typer.Typer(help="Container images of the stages and of the orchestrator.")


@images.command("build")
def build(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="IMAGE...", help=f"{_NAMES}; all if none is named."),
    ] = None,
    flavour: Annotated[Flavour, typer.Option(help="Which builds of torch and vLLM.")] = "cpu",
    base: Annotated[
        str | None,
        typer.Option(envvar="GEB_BASE_IMAGE", help="Base image; python:3.X-slim if unset."),
    ] = None,
    index: Annotated[
        str | None,
        typer.Option(envvar="GEB_TORCH_INDEX", help="A further package index for the wheels."),
    ] = None,
    uid: Annotated[int, typer.Option(min=1, help="User and group id of what runs there.")] = 10001,
) -> None:
    """Build images, with wheels that are downloaded here first."""
    from flows.images.build import DEFAULT_BASE, engine_errors_explained
    from flows.images.build import build as build_image
    from flows.runners.docker.container import connect

    offered = {image.name: image for image in IMAGES if image.flavour in (None, flavour)}
    if unknown := [name for name in names or () if name not in offered]:
        raise UserError(f"no image {', '.join(unknown)}", f"images: {', '.join(offered)}")
    client = connect()
    for image in [offered[name] for name in names or offered]:
        console.print(f"[bold]{image.tag}[/] [dim]{image.purpose}[/]")
        with engine_errors_explained():
            size = build_image(client, image, base or DEFAULT_BASE, index, uid, typer.echo)
        console.print(f"[green]✓[/] {image.tag}: {size / 2**20:,.0f} MiB")


@images.command("list")
def list_images(as_json: AsJson = False) -> None:
    """Show which images there are, how large, and whether they hold the code that is here."""
    from flows.images.build import engine_errors_explained, find_image
    from flows.images.table import CODE_LABEL, REVISION_LABEL
    from flows.runners.docker.container import connect
    from stages.contract.manifest import stages_digest

    client = connect()
    here = stages_digest()
    found = []
    for image in IMAGES:
        line = {"image": image.title, "tag": image.tag, "purpose": image.purpose, "state": "none"}
        found.append(line)
        with engine_errors_explained():
            there = find_image(client, image.tag)
        if there is None:
            continue
        attributes = there.attrs
        labels = attributes["Config"]["Labels"] or {}
        line["state"] = "current" if labels.get(CODE_LABEL) == here else "of other code"
        line["revision"] = labels.get(REVISION_LABEL, "")
        line["digest"] = attributes["Id"]
        line["mib"] = str(attributes["Size"] >> 20)
    if as_json:
        print_json(found)
        return
    for line in found:
        size = f"{line['mib']:>7} MiB" if "mib" in line else " " * 11
        state = f"{line['state']} {line.get('revision', '')}"
        console.print(f"{line['tag']:<24} {size}  {state:<28} [dim]{line['purpose']}[/]")
