"""What all tests share."""

import pytest
from without import take_out

take_out()


@pytest.fixture(scope="module")
def browser():
    """A browser that can be asked for pages."""
    from browser import open_browser

    with open_browser() as found:
        yield found
