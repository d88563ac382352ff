"""Bill of materials of an image: what is in it, asked of the image itself, as CycloneDX has it."""

from __future__ import annotations

import json
from typing import Any

import docker
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.model.license import DisjunctiveLicense
from cyclonedx.output.json import JsonV1Dot6
from docker.errors import ImageNotFound
from packageurl import PackageURL

from flows.images.table import Image
from flows.images.wheelhouse import plain_name
from stages.contract.errors import UserError

# Runs in the image: the packages of its Python, and Debian's.
_PROBE = """
import importlib.metadata, json, subprocess
pythons = [
    (each.metadata["Name"], each.version, each.metadata["License-Expression"])
    for each in importlib.metadata.distributions()
]
listed = subprocess.run(
    ["dpkg-query", "--show", "--showformat", "${Package}\\t${Version}\\t${Architecture}\\n"],
    stdout=subprocess.PIPE, text=True, check=True,
)
debian = [each.split("\\t") for each in listed.stdout.splitlines()]
print(json.dumps({"pypi": pythons, "deb": debian}))
"""


def bill_of_materials(client: docker.DockerClient, image: Image) -> str:
    """The packages of an image as a CycloneDX 1.6 document.

    Raises:
        UserError: The image is not there.
    """
    try:
        found = client.images.get(image.tag)
    except ImageNotFound as error:
        raise UserError(f"no image {image.tag}", "`geb images build` makes it") from error
    told = client.containers.run(
        found,
        entrypoint=["python", "-c", _PROBE],
        command=[],
        network_mode="none",
        read_only=True,
        remove=True,
    )
    packages: dict[str, list[list[Any]]] = json.loads(told)
    repository, _, version = image.tag.partition(":")
    bom = Bom()
    bom.metadata.component = Component(
        name=repository,
        version=version,
        type=ComponentType.CONTAINER,
        purl=PackageURL("oci", name=repository, version=found.id, qualifiers={"tag": version}),
    )
    for name, number, licence in packages["pypi"]:
        url = PackageURL("pypi", name=plain_name(name), version=number)
        bom.components.add(_component(url, licence))
    for name, number, architecture in packages["deb"]:
        url = PackageURL("deb", "debian", name, number, {"arch": architecture})
        bom.components.add(_component(url, None))
    bom.register_dependency(bom.metadata.component, bom.components)
    return JsonV1Dot6(bom).output_as_string(indent=2)


def _component(url: PackageURL, licence: str | None) -> Component:
    return Component(
        name=url.name,
        version=url.version,
        type=ComponentType.LIBRARY,
        purl=url,
        bom_ref=url.to_string(),
        licenses=[DisjunctiveLicense(name=licence)] if licence else [],
    )
