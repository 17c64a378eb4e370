"""When processes of tests look for garbage."""

import gc


def look_rarely() -> None:
    """Look at nothing that is there now, since it stays, and seldom at the rest.

    Captures live as long as the tests, and each look reads them all.
    """
    gc.freeze()
    gc.set_threshold(500_000, 20, 20)
    gc.enable()
