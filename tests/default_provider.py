"""The kernels under the engines of tests that are about something else: the native ones, which compile fastest.

`make test-slow` runs these tests on the reference as well.
"""

import os

PROVIDER = os.environ.get("JAXKV_TEST_PROVIDER", "native")
