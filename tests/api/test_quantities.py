from __future__ import annotations

import re

import pytest

from cacheaware_api import quantities


@pytest.mark.parametrize(
    ("quantity", "size"),
    [
        pytest.param("1Gi", 2**30, id="binary"),
        pytest.param("512Mi", 2**29, id="mebibytes"),
        pytest.param("1G", 10**9, id="decimal"),
        pytest.param("1.5Gi", 3 * 2**29, id="fraction"),
        pytest.param("0.1Ki", 103, id="a part of a byte is rounded up"),
        pytest.param("1e9", 10**9, id="exponent"),
        pytest.param("1E", 10**18, id="E alone is the unit"),
        pytest.param("1048576", 2**20, id="plain text"),
        pytest.param(1048576, 2**20, id="plain integer"),
    ],
)
def test_a_quantity_is_read_as_kubernetes_reads_it(quantity: str | int, size: int) -> None:
    assert quantities.bytes_of(quantity) == size
    assert re.fullmatch(quantities.PATTERN, str(quantity))


@pytest.mark.parametrize(
    "quantity", ["", "Gi", "-1Gi", "+1", "1 Gi", "1gi", "1GiB", "500m", "1e", ".5Gi", "1Gi\n", "x" * 999, -5]
)
def test_what_is_no_amount_of_memory_is_refused(quantity: str | int) -> None:
    with pytest.raises(quantities.QuantityError, match="is not an amount of memory such as"):
        quantities.bytes_of(quantity)


def test_more_than_kubernetes_can_say_is_refused() -> None:
    with pytest.raises(quantities.QuantityError, match="is more than"):
        quantities.bytes_of("8Ei")
    assert quantities.bytes_of("7Ei") == 7 * 2**60
