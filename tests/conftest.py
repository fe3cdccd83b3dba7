"""What all tests share."""

from without import take_out

take_out()
