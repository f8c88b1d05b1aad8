"""The environment of `make test-clients` has every client of the extra."""

from __future__ import annotations

from importlib.metadata import requires, version

from packaging.requirements import Requirement


def test_every_client_is_installed() -> None:
    wanted = [
        requirement
        for requirement in map(Requirement, requires("selfattn_ext") or [])
        if requirement.marker is not None and requirement.marker.evaluate({"extra": "clients"})
    ]
    assert {client.name for client in wanted} == {"transformers", "timm", "diffusers"}
    for client in wanted:
        assert client.specifier.contains(version(client.name)), client
