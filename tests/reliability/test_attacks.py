"""Two tenants of one directory at once: nothing acknowledged is lost, whatever meets."""

from __future__ import annotations

from tests.reliability import races


def test_two_tenants_of_one_directory_lose_no_object_and_no_pin() -> None:
    figures = races.run(15, seed=1)
    assert figures["findings"] == 0, figures["found"]
    assert figures["done"]["acknowledged"] and figures["done"]["acknowledged pins"]
